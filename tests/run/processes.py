"""Runs of the command line as processes that tests can watch, signal and kill."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.commands import command
from tests.polling import until
from tests.run.runs import run_here
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.section import Duration
from torusgd.rundir.run_dir import RunDir

STEPS = 30
RECIPE = f"""
name: faults
data:
  source: tests.run.slow:Slow
  image_size: 8
  channels: 1
  mean: [0.5]
  std: [0.25]
  augment: {{crop: shift, shift: 1, flip: 0.5}}
model: {{name: tests.run.sources:small_net, options: {{dropout: 0.1}}}}
virtual_workers: 4
stages:
  - {{until: 12st, images_per_worker: 3}}
  - {{until: {STEPS}st, images_per_worker: 5, lr: sqrt, momentum: noise-scale}}
rate: {{lr: 0.5, warmup: {{length: 4st}}}}
optimizer: {{name: lars, momentum: 0.9, weight_decay: 1.0e-4, trust: 0.01}}
label_smoothing: 0.1
evaluate: {{every: 10st, images_per_chunk: 5}}
polish: {{}}
runtime: {{checkpoint_every: 4st}}
"""
"""Short, yet with all that makes a state: dropout, batch norm, LARS, two stages, a batch that spans epochs."""

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as IPv6 writes it, and ::1, as /proc/net shows them"""
RESULTS = ("weights_sha256", "loss", "top1", "steps", "samples")


class Process:
    """A command line in a process group of its own, its output in files of `folder`."""

    def __init__(self, folder: Path, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.out")))
        self._paths = folder / f"{number}.out", folder / f"{number}.err"
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            words, variables = [*map(str, arguments)], {**os.environ, **(environment or {})}
            self.popen = subprocess.Popen(words, stdout=out, stderr=err, env=variables, start_new_session=True)
        self.pid = self.popen.pid

    def end(self, timeout: float = 240) -> int:
        """Waits for the end; the exit code. A process that doesn't end is killed, and the test fails."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {timeout} s\n{self.output}") from None

    def kill(self) -> None:
        """kill -9 of the whole group."""
        os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    @property
    def output(self) -> str:
        return f"{self.out}\n{self.err}"

    def descendants(self) -> list[int]:
        return descendants(self.pid)

    def ranks(self) -> list[int]:
        """Process ids of the ranks under our own launcher: the children of the fork server."""
        servers = [pid for pid in children(self.pid) if "forkserver" in command_of(pid)]
        return [rank for server in servers for rank in children(server)]

    def rank(self, out: Path, number: int) -> int:
        """The process id of rank 0, which alone writes events.jsonl, or of another rank."""
        path = str(out / "events.jsonl")
        return until(
            lambda: next((pid for pid in self.ranks() if (path in open_files(pid)) == (number == 0)), 0),
            f"rank {number} is up", self,
        )  # fmt: skip


def torusgd(folder: Path, out: Path, recipe: Path, *arguments: str | Path, **environment: str) -> Process:
    return Process(folder, *torusgd_words(out, recipe, *arguments), environment=environment)


def torusgd_words(out: Path, recipe: Path, *arguments: str | Path) -> list[str]:
    return command("train", recipe, "--out", out, *arguments)


def held_port() -> int:
    """A port of 127.0.0.1 at which nothing listens, and which nobody else is given as long as this process lives."""
    # Who is told this port may bind it too, as servers of a fixed port do (SO_REUSEADDR), since this one never listens.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


_HELD: list[socket.socket] = []


def run_alone(
    out: Path, recipe: Path, *overrides: str, fresh: bool = False, options: RuntimeOptions | None = None, **job: Any
) -> dict[str, Any]:
    """Trains in this process, on one rank and without a launcher; the summary. `job`: fields of `Job`."""
    options = options or RuntimeOptions(checkpoint_every=Duration(4, "st"))
    with RunDir(out).lock():
        return run_here(out, *overrides, recipe=str(recipe), tiny=False, fresh=fresh, options=options, **job)[0]


def pauses(train: float, held_out: float = 0.0) -> list[str]:
    """Flags that make the source take its time, in seconds an image; they change no weight."""
    return ["--set", f"data.options.pause={train}", "--set", f"data.options.eval_pause={held_out}"]


def last_step(out: Path) -> int:
    with suppress(OSError):
        found = re.search(rb'^\{"step": (\d+)[^\n]*\n?\Z', (out / "events.jsonl").read_bytes(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def wait_for_step(out: Path, step: int, process: Process) -> None:
    until(lambda: last_step(out) >= step, f"step {step}", process)


def wait_for_phase(out: Path, phase: str, process: Process) -> None:
    """Waits until status.json names a phase, such as `evaluate`."""
    until(lambda: json.loads((out / "status.json").read_text()).get("phase") == phase, phase, process)


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def results(told: dict[str, Any]) -> dict[str, Any]:
    """What must be equal whatever happened on the way."""
    return {key: told[key] for key in RESULTS}


def ended_well(out: Path, expected: dict[str, Any] | None, *processes: Process) -> dict[str, Any]:
    """The summary of a run whose processes end with 0; it has these results (None: any) and told each step once."""
    for process in processes:
        assert process.end() == 0, process.output
    told = summary(out)
    assert results(told) == (expected or results(told))
    assert_told_once(out, told["steps"])
    return told


def assert_told_once(out: Path, steps: int) -> None:
    """events.jsonl: each line JSON, the steps 1..N without gaps or repetitions."""
    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in told if "event" not in event] == list(range(1, steps + 1))
    others = [(event["event"], event["step"]) for event in told if "event" in event]
    assert len(set(others)) == len(others)


def is_alive(pid: int) -> bool:
    """False for a zombie too."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for_end(pids: Iterable[int]) -> None:
    until(lambda: not any(map(is_alive, pids)), f"{pids} have ended")


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] if int(parent) == pid and state != "Z" else []
    return sorted(found)


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def listening(pids: Iterable[int]) -> list[str]:
    """The addresses (hex, as in /proc/net/tcp) at which these processes listen for TCP connections."""
    inodes = {path.removeprefix("socket:[").removesuffix("]") for pid in pids for path in open_files(pid)}
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in tables.splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def open_files(pid: int) -> list[str]:
    found = list[str]()
    with suppress(OSError):
        found.extend(map(os.readlink, Path(f"/proc/{pid}/fd").iterdir()))
    return found
