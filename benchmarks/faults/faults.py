"""The faults of `punish.py`: what strikes a run, what has to find it, and what became of the weights."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])

from tests.polling import until
from tests.run.faults import BLIND, FAULT
from tests.run.processes import (
    RECIPE,
    Process,
    is_alive,
    last_step,
    pauses,
    results,
    run_alone,
    summary,
    torusgd_words,
    wait_for_step,
)

from torusgd.rehearse.lab import Host, Lab

STEPS, PATIENCE = 30, 60.0
NEAR, FAR = Host(latency=1e-3, rate=1e9), Host(latency=2e-2, rate=2e7)
LINE = "torusgd: "


@dataclass
class Case:
    """One fault in one run."""

    kind: str
    seed: int
    folder: Path
    blind: bool = False
    """the detector is switched off"""
    runtime: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(f"{self.kind} {self.seed}")
        self.workers = self.draw.choice((2, 3, 4))
        self.step = self.draw.randrange(5, 25)
        self.victim = self.draw.randrange(self.workers)
        self.out = self.folder / "out"

    @property
    def recipe(self) -> Path:
        path = self.folder / "recipe.yaml"
        options = json.dumps({"checkpoint_every": "4st", **self.runtime})
        text = RECIPE.replace("tests.run.slow:Slow", "tests.run.faults:Struck")
        path.write_text(re.sub(r"runtime: .*", f"runtime: {options}", text))
        return path

    def start(self, *flags: str, pause: float = 0.004) -> Process:
        words = torusgd_words(self.out, self.recipe, "--workers", str(self.workers), *pauses(pause), *flags)
        if BLIND in self.environment:  # before the launcher does anything
            words[1:3] = ["-c", "import tests.run.faults; from torusgd.__main__ import main; main()"]
        return Process(self.folder, *words, environment=self.environment)

    def ranks_by_hand(self, *flags: str, odd: tuple[str, ...] = ()) -> list[Process]:
        """Ranks whose variables a script has set; the victim has other flags."""
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        told = {"WORLD_SIZE": str(self.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **self.environment}
        return [
            Process(
                self.folder / str(rank),
                *torusgd_words(self.out, self.recipe, *pauses(0.004), *flags, *(odd if rank == self.victim else ())),
                environment=told | {"RANK": str(rank)},
            )
            for rank in range(self.workers)
        ]

    def strike_inside(self, kind: str) -> Path:
        """Has a fault of tests/run/faults.py come at this case's step on the victim; the file that says when."""
        mark = self.folder / "mark"
        told = {"kind": kind, "rank": self.victim, "step": self.step, "mark": str(mark)}
        self.environment[FAULT] = json.dumps(told)
        return mark


@dataclass(frozen=True)
class Row:
    """What came of a case."""

    kind: str
    seed: int
    ranks: int
    verdict: str
    """same hash | early end, then same hash | WRONG: why"""
    named: bool | None = None
    """whether the line named what it had to; None: nothing had to be said"""
    seconds: float | None = None
    """from the fault to the line"""
    redone: int | None = None
    """steps taken a second time"""
    said: str = ""
    blind: bool = False


def first_line(process: Process, since: float, timeout: float = PATIENCE) -> tuple[str, float | None]:
    """The first line of a run on its error stream, and the seconds from the fault until it came."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        ended = process.popen.poll() is not None
        lines = [line for line in process.err.splitlines() if LINE in line]
        if lines:
            return lines[0], round(time.monotonic() - since, 2)
        if ended:
            break
        time.sleep(0.02)
    return "", None


def judge(case: Case, process: Process, since: float, expected: str | None, again: bool = True) -> Row:
    """Waits for the end of a run, has the same command go on where it ended early, and compares the weights.

    Args:
        case: Of the run.
        process: The launcher, or the rank that speaks.
        since: When the fault came.
        expected: What the first line must hold; None: nothing may be said.
        again: Whether an early end is right.
    """
    before = last_step(case.out)
    said, seconds = ("", None) if expected is None else first_line(process, since)
    named = None if expected is None else bool(re.search(expected, said))
    at = re.search(r"from the checkpoint of step (\d+)", said)
    redone = max(0, before - int(at[1])) if at else 0 if said == "" else None
    try:
        verdict = verdict_of(case, process, again)
    except AssertionError as error:
        verdict = f"WRONG: {str(error).splitlines()[0]}"
    is_silent = expected is not None and not named and not verdict.startswith("WRONG")
    verdict = "WRONG: not named" if is_silent else verdict
    return Row(case.kind, case.seed, case.workers, verdict, named, seconds, redone, said[:300], case.blind)


def verdict_of(case: Case, process: Process, again: bool) -> str:
    """What the end of a run is worth; AssertionError where it does not end in time, or does not go on."""
    code = process.end(timeout=PATIENCE)
    if "Traceback" in process.err:
        return "WRONG: a traceback"
    if code:
        if not again:
            return f"WRONG: ended with {code}: {process.err[-300:]}"
        case.environment.pop(FAULT, None)
        went_on = case.start()
        assert went_on.end(timeout=PATIENCE) == 0, f"did not go on: {went_on.err[-200:]}"
    if results(summary(case.out)) != undisturbed(case):
        return "WRONG: other weights with exit code 0"
    return "early end, then same hash" if code else "same hash"


_undisturbed: dict[str, Any] = {}


def undisturbed(case: Case) -> dict[str, Any]:
    """The results of a run that nothing happens to."""
    if not _undisturbed:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            _undisturbed.update(results(run_alone(Path(folder) / "out", case.recipe)))
    return _undisturbed


def kill_a_rank(case: Case) -> Row:
    process = case.start()
    wait_for_step(case.out, case.step, process)
    victim = process.rank(case.out, case.victim) if case.victim < 2 else case.draw.choice(process.ranks())
    os.kill(victim, signal.SIGKILL)
    return judge(case, process, time.monotonic(), r"rank \d", again=False)


def kill_the_launcher(case: Case) -> Row:
    process = case.start()
    wait_for_step(case.out, case.step, process)
    everything, since = process.descendants(), time.monotonic()
    process.popen.kill()
    until(lambda: not any(map(is_alive, everything)), "no orphan is left")
    seconds, before = round(time.monotonic() - since, 2), last_step(case.out)
    row = judge(case, case.start(), time.monotonic(), None, again=False)
    return Row(**{**asdict(row), "seconds": seconds, "redone": max(0, before - summary(case.out)["resumed_from"])})


def stop_a_rank_for_5_s(case: Case) -> Row:
    process = case.start()
    wait_for_step(case.out, case.step, process)
    victim = case.draw.choice(process.ranks())
    os.kill(victim, signal.SIGSTOP)
    time.sleep(5)
    os.kill(victim, signal.SIGCONT)
    return judge(case, process, time.monotonic(), None, again=False)


def stop_a_rank_for_ever(case: Case) -> Row:
    case.runtime["timeout"] = 1e6 if case.blind else 5
    process = case.start()
    wait_for_step(case.out, case.step, process)
    os.kill(case.draw.choice(process.ranks()), signal.SIGSTOP)
    return judge(case, process, time.monotonic(), r"rank \d on \S+ .*no heartbeat for 5 s, frozen or lost", again=False)


def in_the_lab(case: Case, hosts: list[Host], cut: int | None) -> Row:
    """Ranks on hosts of their own; a cut host must be named, and 2 ranks that are left go on."""
    words = torusgd_words(case.out, case.recipe, *pauses(0.004))
    row: dict[str, Any] = {"kind": case.kind, "seed": case.seed, "ranks": len(hosts)}
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    with Lab(hosts) as lab:
        crew, since = lab.start(words[1:], environment), time.monotonic()
        while cut is not None and last_step(case.out) < case.step:
            time.sleep(0.05)
            if time.monotonic() - since > PATIENCE:
                return Row(verdict=f"WRONG: never at step {case.step}", **row)
        if cut is not None:
            lab.cut(cut)
            since = time.monotonic()
        codes = crew.wait(timeout=2 * PATIENCE)
        seconds = round(time.monotonic() - since, 2)
        lines = [line for text in crew.outputs() for line in text.splitlines() if line.startswith(LINE)]
    if cut is None:
        said, named = "", any('"slowest"' in line for line in (case.out / "events.jsonl").read_text().splitlines())
    else:
        said = lines[0] if lines else ""
        named = f"rank {cut} on " in said and set(codes) == {1}
        row |= {"seconds": seconds, "redone": last_step(case.out) - int((re.search(r"step (\d+)$", said) or "00")[1])}
        case.workers = 2
        case.start().end(timeout=PATIENCE)
    row |= {"named": named, "said": said[:300]}
    if results(summary(case.out)) != undisturbed(case):
        return Row(verdict="WRONG: other weights", **row)
    if not named:
        return Row(verdict="WRONG: not named", **row)
    return Row(verdict="same hash" if cut is None else "early end, then same hash", **row)


def cut_a_link(case: Case) -> Row:
    case.runtime["timeout"] = 3
    return in_the_lab(case, [NEAR] * 3, cut=case.draw.choice((1, 2)))


def slow_a_link(case: Case) -> Row:
    return in_the_lab(case, case.draw.sample([NEAR, NEAR, FAR], 3), cut=None)


def fill_the_disk(case: Case) -> Row:
    disk = case.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    try:
        case.out = disk / "out"
        process = case.start()
        wait_for_step(case.out, case.step, process)
        since = time.monotonic()
        with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(b"x" * 4096):
                pass
        said, seconds = first_line(process, since)
        process.end(timeout=PATIENCE)
        (disk / "ballast").unlink()
        again = case.start()
        row = judge(case, again, time.monotonic(), None, again=False)
        named = "No space left on device" in said
        verdict = "early end, then same hash" if row.verdict == "same hash" and named else row.verdict
        told = {"named": named, "seconds": seconds, "said": said[:300], "verdict": verdict}
        return Row(**{**asdict(row), **told})
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def inside(case: Case, kind: str, expected: str | None, *flags: str, workers: int | None = None) -> Row:
    """A fault of tests/run/faults.py."""
    case.workers = workers or case.workers
    case.victim %= case.workers
    mark = case.strike_inside(kind)
    process = case.start(*flags)
    until(lambda: mark.exists() and mark.read_text(), "the fault", process)
    return judge(case, process, float(mark.read_text()), expected)


def fail_a_read(case: Case) -> Row:
    return inside(case, "read_error", None)


def fail_a_write(case: Case) -> Row:
    case.victim = 0
    return inside(case, "write_error", r"Input/output error")


def flip_in_a_checkpoint(case: Case) -> Row:
    process = case.start()
    wait_for_step(case.out, case.step, process)
    written = (case.out / "checkpoints").glob
    # A run whose only checkpoint is damaged does not begin anew, and rightly so.
    until(lambda: len(list(written("step-????????"))) > 1, "two checkpoints", process)
    process.kill()
    newest = max(written("step-????????"))
    file = newest / case.draw.choice(("model.safetensors", "state.safetensors"))
    content = bytearray(file.read_bytes())
    content[-case.draw.randrange(1, len(content) // 2)] ^= 1 << case.draw.randrange(8)
    file.write_bytes(content)
    if case.blind:
        case.environment[BLIND] = "no_checksum"
    return judge(case, case.start(), time.monotonic(), r"damaged", again=False)


def flip_in_computing(case: Case, where: str) -> Row:
    flags = () if case.blind else ("--audit", "1")
    return inside(case, where, r"rank \d on \S+ computes wrongly", *flags, workers=3)


def flip_in_weights(case: Case) -> Row:
    case.runtime["drift_every"] = 0 if case.blind else 1
    return inside(case, "in_weights", rf"rank {case.victim % 3}\b.* other weights", workers=3)


def turn_the_clock(case: Case) -> Row:
    return inside(case, "clock_jumps", None)


def start_it_twice(case: Case) -> Row:
    if case.blind:
        case.environment[BLIND] = "no_lock"
    process = case.start(pause=0.2)  # the second one waits 10 s for the lock
    wait_for_step(case.out, 3, process)
    since = time.monotonic()
    second = case.start(pause=0.2)
    code = second.end(timeout=PATIENCE)
    seconds = round(time.monotonic() - since, 2)
    named = code == 2 and f"process {process.pid} on " in second.err
    row = judge(case, process, since, None, again=False)
    verdict = row.verdict if named else f"WRONG: the second ended with {code}"
    return Row(**{**asdict(row), "named": named, "seconds": seconds, "said": second.err[:300], "verdict": verdict})


def bring_another_recipe(case: Case) -> Row:
    if case.blind:
        case.environment[BLIND] = "no_fingerprint"
        case.runtime["drift_every"] = 0
    since = time.monotonic()
    ranks = case.ranks_by_hand(odd=("--set", f"rate.lr={case.draw.choice((0.4, 0.6))}"))
    codes = {rank.end(timeout=PATIENCE) for rank in ranks}
    said = next((line for rank in ranks for line in rank.err.splitlines() if line.startswith(LINE)), "")
    row: dict[str, Any] = {"kind": case.kind, "seed": case.seed, "ranks": case.workers, "blind": case.blind}
    named = bool(re.search(rf"rank {case.victim}\b|rank 0\b", said)) and "recipe" in said
    row |= {"named": named, "said": said[:300], "seconds": round(time.monotonic() - since, 2)}
    if codes != {2}:
        return Row(verdict=f"WRONG: ended with {sorted(codes)}", **row)
    if not named:
        return Row(verdict="WRONG: not named", **row)
    shutil.rmtree(case.out, ignore_errors=True)
    if case.start().end(timeout=PATIENCE) or results(summary(case.out)) != undisturbed(case):
        return Row(verdict="WRONG: did not go on", **row)
    return Row(verdict="early end, then same hash", **row)


KINDS: dict[str, Callable[[Case], Row]] = {
    "SIGKILL of a rank": kill_a_rank,
    "SIGKILL of the launcher": kill_the_launcher,
    "SIGSTOP of a rank for 5 s": stop_a_rank_for_5_s,
    "SIGSTOP of a rank for ever": stop_a_rank_for_ever,
    "a cut link": cut_a_link,
    "a slow link": slow_a_link,
    "a full disk": fill_the_disk,
    "EIO at three reads": fail_a_read,
    "EIO at a write": fail_a_write,
    "a flipped bit in a checkpoint": flip_in_a_checkpoint,
    "flipped bits in a rank's gradients": partial(flip_in_computing, where="in_gradient"),
    "flipped bits in a rank's images": partial(flip_in_computing, where="in_images"),
    "a flipped bit in a rank's weights": flip_in_weights,
    "a clock that jumps by a day": turn_the_clock,
    "a second launcher on the folder": start_it_twice,
    "a rank with another recipe": bring_another_recipe,
}
