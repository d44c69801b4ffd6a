"""One input run, and its end booked: worked, refused in one line, or a problem."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torusgd.data.decode import Undecodable
from torusgd.errors import UserError

MOST_SECONDS = 10.0
MOST_BYTES = 1 << 30


@dataclass
class Tally:
    """How the inputs of one kind ended."""

    kind: str
    inputs: int = 0
    refused: int = 0
    worked: int = 0
    seconds: float = 0.0
    memory: int = 0
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A row of the table."""
        worst = f"{self.seconds:.2f} | {self.memory / 2**20:.0f} MiB"
        return f"| {self.kind} | {self.inputs} | {self.refused} | {self.worked} | {len(self.problems)} | {worst} |"


def fed(tally: Tally, name: str, use: Callable[[], object]) -> None:
    """Runs one input and books its end."""
    resident = reset_peak()
    started = time.perf_counter()
    problem = ""
    try:
        use()
        tally.worked += 1
    except (UserError, Undecodable) as error:
        tally.refused += 1
        if len(str(error).splitlines()) != 1:
            problem = f"{len(str(error).splitlines())} lines: {error}"
    except Exception as error:  # what a user would see as a traceback
        problem = f"{type(error).__name__}: {error}"
    seconds, memory = time.perf_counter() - started, peak() - resident
    tally.inputs += 1
    tally.seconds, tally.memory = max(tally.seconds, seconds), max(tally.memory, memory)
    if seconds > MOST_SECONDS:
        problem = f"took {seconds:.1f} s"
    if memory > MOST_BYTES:
        problem = f"took {memory >> 20} MiB"
    if problem:
        tally.problems.append(f"{tally.kind}: {name}: {problem[:300]}")


def reset_peak() -> int:
    """Begins a new peak of this process' memory; bytes that it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Most bytes resident since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
