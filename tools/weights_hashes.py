"""Prints the weights' SHA-256 of short runs: a change that claims to alter no result shows the same before and after.

    .venv/bin/python tools/weights_hashes.py [CASE ...]

The hashes hold for one machine and one torch build, so compare two checkouts on the same machine. `fashion` needs
Fashion-MNIST (`torusgd data fetch fashion-mnist`) and is skipped without it. Runs that lose ranks, are joined, are
interrupted or are divided otherwise must have the weights of a case before them, and the line says so. A case that
fails is named with the reason, the others still run, and the exit code is 1. The tool uses the command line and the
files of a run, and imports nothing of the package, so one copy of it measures any two commits.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT = 1200
"""seconds for one case"""
FASHION = "data/fashion-mnist"
SHORT = ["digits", "--max-steps", "60"]
COLUMNS = [*SHORT, "--set", "column_blocks=2", "--model-parallel", "2"]
CUTOFF = "synchrony={form: cutoff, count: predicted, warmup: 20, delays: 'lognormal+slow:0.3x4'}"
"""leaves out late work; what is late is a function of the recipe, so each run has the same journal"""


class CaseError(Exception):
    """A command did not do what its case needs."""


class Command:
    """`torusgd` as a process in a group of its own, its output in a file.

    Args:
        log: That file.
        arguments: The command line after the program's name.
    """

    started: list["Command"] = []  # noqa: RUF012 - of all commands, so that none outlives its case

    def __init__(self, log: Path, *arguments: str | Path) -> None:
        self.log, self.name = log, f"torusgd {arguments[0]}"
        words = [sys.executable, "-m", "torusgd", *map(str, arguments)]
        with log.open("w") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        self.started.append(self)

    def end(self, code: int = 0) -> None:
        """Waits for its end; CaseError if it ends with another exit code."""
        if (found := self.process.wait()) != code:
            raise CaseError(f"{self.name}: exit code {found}, not {code}\n{self.log.read_text()}")

    def wait_for(self, what: str, find: Callable[[], Any]) -> Any:
        """Waits until something is found and returns it; CaseError if the process ends before."""
        while not (found := find()):
            if self.process.poll() is not None:
                raise CaseError(f"{self.name}: ended before {what}\n{self.log.read_text()}")
            time.sleep(0.02)
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def train(out: Path, *arguments: str) -> Command:
    return Command(out.with_suffix(".train"), "train", *arguments, "--out", out)


def plain(*arguments: str) -> Callable[[Path], None]:
    """A case to which nothing happens."""
    return lambda out: train(out, *arguments).end()


def lose_ranks(out: Path) -> None:
    """The last of four ranks is killed, later rank 0, and two go on."""
    run = train(out, "digits", "--workers", "4")
    for step, victim in ((100, -1), (250, 0)):
        wait_for_step(run, out, step)
        os.kill(ranks(out)[victim], signal.SIGKILL)
    run.end()
    check_summary(out, world_size=2, restarts=0)


def join(out: Path) -> None:
    """To two ranks comes a third by `torusgd join`."""
    run = train(out, "digits", "--workers", "2", "--listen", "127.0.0.1:0")
    address = run.wait_for("it listens", lambda: re.search(r"127\.0\.0\.1:[1-9]\d*", run.log.read_text()))[0]
    wait_for_step(run, out, 20)
    Command(out.with_suffix(".join"), "join", address, "--workers", "1", "--token-file", out / ".join-token").end()
    run.end()
    check_summary(out, world_size=3, restarts=0)


def resume(out: Path) -> None:
    """Three ranks until SIGTERM, then two from the checkpoint on."""
    run = train(out, "digits", "--workers", "3")
    wait_for_step(run, out, 200)
    run.process.terminate()
    run.end(143)
    stopped_at = last_step(out)
    train(out, "digits", "--workers", "2").end()
    check_summary(out, world_size=2, resumed_from=stopped_at)


def replay(out: Path) -> None:
    """Three ranks leave out late work; two replay their journal, and `torusgd replay` compares the weights."""
    original = out.with_name("cutoff")
    train(original, *SHORT, "--workers", "3", "--set", CUTOFF).end()
    Command(out.with_suffix(".replay"), "replay", original, "--workers", "2", "--out", out).end()


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "digits": (plain("digits", "--workers", "2"), ""),
    "lost-ranks": (lose_ranks, "digits"),
    "joined": (join, "digits"),
    "resumed": (resume, "digits"),
    "fashion": (plain("fashion", "--workers", "2", "--max-steps", "20", "--data", FASHION), ""),
    "short": (plain(*SHORT, "--workers", "2"), ""),
    "sharded": (plain(*SHORT, "--workers", "3", "--update", "sharded", "--allreduce", "ring"), "short"),
    "column-parallel": (plain(*COLUMNS, "--workers", "2"), ""),
    "sharded-columns": (plain(*COLUMNS, "--workers", "4", "--update", "sharded"), "column-parallel"),
    "float16": (plain(*SHORT, "--workers", "2", "--set", "precision=float16"), ""),
    "replayed": (replay, ""),
}
"""what each case does, and the case before it whose weights it must have too"""


def summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def check_summary(out: Path, **expected: int) -> None:
    """CaseError unless the summary has these values: else what the case is about did not happen."""
    if expected != (found := {key: summary(out)[key] for key in expected}):
        raise CaseError(f"the summary has {found}, not {expected}")


def last_step(out: Path) -> int:
    """The last step in the events; 0 if there is none."""
    try:
        lines = (out / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def wait_for_step(run: Command, out: Path, step: int) -> None:
    run.wait_for(f"step {step}", lambda: last_step(out) >= step)


def ranks(out: Path) -> list[int]:
    """Process ids of rank 0, which has the events open, and of the other children of its parent, the oldest first."""
    parents, first = dict[int, int](), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if any(os.readlink(file) == str(out / "events.jsonl") for file in (process / "fd").iterdir()):
                first = int(process.name)
        except OSError:  # it has ended meanwhile
            continue
    return [first, *sorted(pid for pid in parents if parents[pid] == parents[first] and pid != first)]


@contextmanager
def commands_within(seconds: int) -> Iterator[None]:
    """Ends all commands that were begun here; CaseError after so many seconds."""

    def stop(signal_number: int, frame: object) -> None:
        raise CaseError(f"no end within {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGTERM, lambda signal_number, frame: sys.exit(143))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        for command in Command.started:
            command.kill()
        Command.started.clear()


def measure(name: str, folder: Path, hashes: dict[str, str]) -> str:
    """The weights' hash of a case; CaseError if the case fails or has not the weights it must have."""
    run, same_as = CASES[name]
    with commands_within(LIMIT):
        run(folder / name)
        found = str(summary(folder / name)["weights_sha256"])
    if hashes.get(same_as, found) != found:
        raise CaseError(f"{found} differs from {same_as}")
    return found


def main() -> None:
    names, hashes = sys.argv[1:] or list(CASES), dict[str, str]()
    if unknown := set(names) - set(CASES):
        sys.exit(f"no case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    if not Path(FASHION).exists() and "fashion" in names:
        names.remove("fashion")
        print(f"fashion is skipped: no {FASHION}; torusgd data fetch fashion-mnist brings it")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                hashes[name] = measure(name, Path(folder).resolve(), hashes)
                same = f" as {CASES[name][1]}" if CASES[name][1] in hashes else ""
                print(f"{name:16} {hashes[name]}{same}", flush=True)
            except (CaseError, OSError, LookupError, ValueError) as error:
                print(f"{name:16} FAILED: {type(error).__name__}: {error}", flush=True)
    if failed := [name for name in names if name not in hashes]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
