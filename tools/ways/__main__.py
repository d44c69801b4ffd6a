"""Runs `digits` with a profile function in every process, and prints the files that a gradient and a SIGKILL pass.

    .venv/bin/python -m tools.ways [native] [auto] [loss]

`native` and `auto` print, for a gradient with that all-reduce on 2 ranks, the files in the order in which it enters
them. `loss` kills one of 3 ranks and prints how often the launcher and a rank that is left enter each file, and from
where. Both print what ran beside. `tools/ways/ways.py` has the rule, and the names by which functions are found.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from tools.weights_hashes import CaseError, Command, commands_within, ranks, train, wait_for_step

import torusgd

from .calls import read_calls
from .ways import NotFoundError, gradient, is_rank, loss_in_launcher, loss_in_rank, passed, steps_of

HOOK = Path(__file__).with_name("hook")
LIMIT = 1200
"""seconds for one run"""
STEPS, TRACED = 24, 8
"""of a run, and how many of the last ones are looked at: by then `auto` has chosen, and buckets stay"""


def show_gradient(allreduce: str, folder: Path) -> None:
    """Runs 2 ranks and prints the way of a gradient."""
    run = train_traced(folder, "--workers", "2", "--allreduce", allreduce)
    run.end()
    launcher = read_calls(traces(folder) / str(run.process.pid))
    processes = [read_calls(path) for path in traces(folder).iterdir() if path.name != str(run.process.pid)]
    members = [(threads, steps_of(threads, TRACED)) for threads in processes if is_rank(threads)]
    ways = [gradient(threads, steps) for threads, steps in members]
    files = {file: function for way in ways for file, function in way.files.items()}
    print(f"A gradient, --allreduce {allreduce}: {len(files)} files")
    if chosen := re.search("^allreduce auto: .*", run.log.read_text(), re.MULTILINE):
        print(f"  {chosen[0]}")
    for number, (file, function) in enumerate(files.items(), 1):
        print(f"  {number:2} {file:32} {function}")
    sometimes = {file: steps for way in ways for file, steps in way.sometimes.items() if file not in files}
    show_list("now and then", [f"{file} ({steps} of {TRACED} steps)" for file, steps in sometimes.items()])
    show_beside(way.beside for way in ways)
    show_list(
        "the launcher", {file for _, steps in members for each in steps for file in passed(launcher, *each).files}
    )


def show_loss(folder: Path) -> None:
    """Kills the last of 3 ranks and prints the run's way to the step that is redone."""
    run = train_traced(folder, "--workers", "3")
    out = folder / "run"
    wait_for_step(run, out, STEPS // 2)
    first, *_, last = ranks(out)
    killed = time.monotonic_ns()
    os.kill(last, signal.SIGKILL)
    run.end()
    launcher = loss_in_launcher(read_calls(traces(folder) / str(run.process.pid)), killed)
    rank = loss_in_rank(read_calls(traces(folder) / str(first)), killed)
    origins: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for entry in sorted([*launcher.entries, *rank.entries], key=lambda entry: entry.time):
        origins[entry.file][entry in rank.entries].append(entry.origin)
    times = sum(len(in_launcher) + len(in_rank) for in_launcher, in_rank in origins.values())
    again = sum(max(map(len, each)) > 1 for each in origins.values())
    print(f"A SIGKILL: {len(origins)} files, entered {times} times; {again} of them more than once in a process")
    print(f"     {'':32} launcher  rank")
    for number, (file, (in_launcher, in_rank)) in enumerate(origins.items(), 1):
        counts = f"{len(in_launcher) or '':8}  {len(in_rank) or '':4}"
        callers = Counter([*in_launcher, *in_rank])
        text = ", ".join(f"{origin} {n} times" if n > 1 else origin for origin, n in callers.items())
        print(f"  {number:2} {file:32} {counts}  from {text}")
    show_beside([launcher.beside, rank.beside])


def train_traced(folder: Path, *arguments: str) -> Command:
    """`torusgd train digits` whose processes write their calls."""
    traces(folder).mkdir()
    os.environ["WAYS"] = str(traces(folder))
    return train(folder / "run", "digits", "--max-steps", str(STEPS), *arguments)


def traces(folder: Path) -> Path:
    return folder / "traces"


def show_beside(found: Iterable[Mapping[str, Mapping[str, None]]]) -> None:
    """Prints by concern what ran beside a way."""
    concerns: dict[str, dict[str, None]] = defaultdict(dict)
    for each in found:
        for concern, files in each.items():
            concerns[concern] |= files
    for concern, files in sorted(concerns.items()):
        show_list(f"beside: {concern}", files)


def show_list(name: str, items: Iterable[str]) -> None:
    print(f"  {name}: {', '.join(sorted(items)) or 'nothing'}")


SHOWS: dict[str, Callable[[Path], None]] = {
    "native": partial(show_gradient, "native"),
    "auto": partial(show_gradient, "auto"),
    "loss": show_loss,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(SHOWS)}; default: all")
    names = parser.parse_args().ways or list(SHOWS)
    if unknown := set(names) - set(SHOWS):
        parser.error(f"no way {', '.join(unknown)}; choose from {', '.join(SHOWS)}")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["WAYS_PACKAGE"] = str(Path(torusgd.__file__).parent)
    for name in names:
        with tempfile.TemporaryDirectory() as folder, commands_within(LIMIT):
            try:
                SHOWS[name](Path(folder).resolve())
            except (CaseError, NotFoundError) as error:
                sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
