"""The table of settings under which 20 steps of `digits-portable` have one hash: python -m tools.one_hash [--control]

Each line of Markdown is a way to divide the work, a machine that this one can be, an interpreter, or something that
happens to ranks. `--python PATH` adds an interpreter with torusgd and other versions of torch and numpy, `--only REGEX`
leaves lines out, `--control` gives the settings that change kernels to `digits` in float32, which must have several
hashes. The exit code is 1 if a line fails.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.run.runs import sets
from tests.run.test_portable import FAR, MACHINES, WAYS
from tools.weights_hashes import CaseError, Command, check_summary, last_step, ranks, summary, train, wait_for_step

GOLDEN = "4d65b2fceacfd0bead0989cf586ccd15a80cba7b98ed820cce826099b336af7c"
JOINED = "0a6bcab03dcc284e7ee1a01d1a8d727b52fa4f037ab2d1ba7f8ced4ecc7765e9"
"""after 100 steps: a rank that joins takes some seconds to start"""
COLUMNS = "338d965049c80ea66e020f634749530ce75ad8cca7418731d9a5b97b77011bb8"
"""with `column_blocks: 2`, another recipe"""
EXPECTED = {
    "columns, 1 worker": COLUMNS,
    "columns, 2 workers": COLUMNS,
    "100 steps, 1 worker": JOINED,
    "a rank joins 2": JOINED,
}
STEPS = ["digits-portable", "--max-steps", "20"]
VERSIONS = "import platform, torch, numpy; print(platform.python_version(), torch.__version__, numpy.__version__)"
METHOD = """
import torusgd.arithmetic.methods as methods
methods.METHODS = {name: methods.METHODS[name] for name in [%r]}
from torusgd.__main__ import main
main()
"""


def run(out: Path, words: list[str], environment: dict[str, str], program: list[str], recipe: str = STEPS[0]) -> str:
    """The hash of a run in a process of its own."""
    done = subprocess.run(
        [*program, "train", recipe, *STEPS[1:], "--out", str(out), *words],
        env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CaseError((done.stdout + done.stderr)[-600:])
    return str(summary(out)["weights_sha256"])


def lose(out: Path, *words: str) -> str:
    """Of three ranks the last one is killed after five steps."""
    command = train(out, *STEPS, "--workers", "3", *words)
    wait_for_step(command, out, 5)
    os.kill(ranks(out)[-1], 9)
    command.end()
    check_summary(out, world_size=2, restarts=0)
    return str(summary(out)["weights_sha256"])


def join(out: Path) -> str:
    """To two ranks comes a third by `torusgd join`."""
    command = train(out, *STEPS, "--max-steps", "100", "--workers", "2", "--listen", "127.0.0.1:0")
    address = command.wait_for("it listens", lambda: re.search(r"127\.0\.0\.1:[1-9]\d*", command.log.read_text()))[0]
    wait_for_step(command, out, 2)
    Command(out.with_suffix(".join"), "join", address, "--workers", "1", "--token-file", out / ".join-token").end()
    command.end()
    check_summary(out, world_size=3, restarts=0)
    return str(summary(out)["weights_sha256"])


def resume(out: Path) -> str:
    """Three ranks until SIGTERM, then two from the checkpoint on."""
    command = train(out, *STEPS, "--workers", "3")
    wait_for_step(command, out, 5)
    command.process.terminate()
    command.end(143)
    stopped_at = last_step(out)
    train(out, *STEPS, "--workers", "2").end()
    check_summary(out, world_size=2, resumed_from=stopped_at)
    return str(summary(out)["weights_sha256"])


def rows(pythons: list[str], control: bool) -> dict[str, Callable[[Path], str]]:
    """What is run, by its name in the table."""
    program = [sys.executable, "-m", "torusgd"]
    recipe = "digits" if control else STEPS[0]
    flags = Path("/proc/cpuinfo").read_text()
    machines = [
        *MACHINES,
        *({"ATEN_CPU_CAPABILITY": name} for name in ("avx512",) if "avx512f" in flags),
        *({"ONEDNN_MAX_CPU_ISA": name} for name in ("AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")),
        {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
        *({"MKL_CBWR": name} for name in ("SSE2", "AVX", "AVX512")),
        {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX"},
        {"CC": "none"},  # passes by torch's operators
    ]
    found: dict[str, Callable[[Path], str]] = {
        " ".join(f"{key}={value}" for key, value in each.items()): partial(
            run, words=["--workers", "1"], environment=each, program=program, recipe=recipe
        )
        for each in ({"OMP_NUM_THREADS": "1"}, *machines)
    }
    for path in pythons:
        versions = subprocess.run([path, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()
        name = "Python {}, torch {}, numpy {}".format(*versions)
        found[name] = partial(run, words=["--workers", "1"], environment={}, program=[path, "-m", "torusgd"],
                              recipe=recipe)  # fmt: skip
    if control:
        return found
    for name, words in WAYS.items():
        found[name] = partial(run, words=words, environment={}, program=program)
    for port, method in enumerate(("float64", "float32", "int8"), 29_871):
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        found[f"products by {method}"] = partial(
            run, words=[], environment=alone, program=[sys.executable, "-c", METHOD % method]
        )
    blocks = sets("column_blocks=2")
    return found | {
        "columns, 1 worker": partial(run, words=["--workers", "1", *blocks], environment={}, program=program),
        "columns, 2 workers": partial(
            run, words=["--workers", "2", "--model-parallel", "2", *blocks], environment=FAR, program=program
        ),
        "100 steps, 1 worker": partial(
            run, words=["--workers", "1", "--max-steps", "100"], environment={}, program=program
        ),
        "a rank of 3 killed": lose,
        "a rank joins 2": join,
        "3 stopped, 2 go on": resume,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--only", default="")
    parser.add_argument("--control", action="store_true")
    args = parser.parse_args()
    chosen = {name: row for name, row in rows(args.python, args.control).items() if re.search(args.only, name)}
    hashes, wrong = set[str](), False

    def measured(name: str, folder: Path) -> str:
        try:
            return chosen[name](folder)
        except (CaseError, OSError, LookupError, subprocess.SubprocessError) as error:
            return f"FAILED: {type(error).__name__}: {error}"

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        folders = [Path(folder).resolve() / str(number) for number in range(len(chosen))]
        for name, found in zip(chosen, pool.map(measured, chosen, folders), strict=True):
            hashes.add(found)
            wrong |= "FAILED" in found or (not args.control and found != EXPECTED.get(name, GOLDEN))
            print(f"| {name} | {found if 'FAILED' in found else found[:8]} |", flush=True)
    print(f"{len(chosen)} settings, {len(hashes)} hashes")
    if wrong:
        sys.exit(1)
    if args.control and len(hashes) < 2:
        sys.exit("float32 has one hash: the table would prove nothing")


if __name__ == "__main__":
    main()
