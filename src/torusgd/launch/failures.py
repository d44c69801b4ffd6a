"""What ends a rank: a user's mistake, a run that can't go on, a defect, or the loss of another rank."""

import json
import os
import re
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from ..comm.base import CommError
from ..errors import RunError, UserError

# How Gloo tells that another rank is gone: plain RuntimeErrors with these texts (torch 2.13).
_GLOO = re.compile(r"/gloo/|Gloo connectFullMesh failed|Application timeout caused pair closure")

_PLACE = re.compile(r"^\[[^]]*] ")


@dataclass(frozen=True)
class Problem:
    """Why a rank ended."""

    text: str
    """one line"""
    code: int
    """exit code of the command: 2 for a user's mistake, else 1"""
    is_loss: bool = False
    """another rank didn't answer: the reason lies there, and a new start may help"""
    trace: str = ""
    """of a defect: the traceback"""

    def error(self) -> UserError | RunError:
        """The error that ends the command with this line and this code."""
        return UserError(self.text) if self.code == 2 else RunError(self.text)


def problem_of(error: BaseException, rank: int) -> Problem:
    """Sorts an exception that ended a rank."""
    line = (str(error).splitlines() or [""])[0]
    if isinstance(error, UserError):
        return Problem(line, 2)
    if isinstance(error, RunError):
        return Problem(line, 1)
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # Rich makes it an exit
        return Problem("nobody reads the output any more; the last checkpoint is good", 1)
    if isinstance(error, OSError):
        return Problem(f"rank {rank}: {line}", 1)
    if isinstance(error, dist.DistError | CommError) or (isinstance(error, RuntimeError) and _GLOO.search(str(error))):
        return Problem(_PLACE.sub("", line).split(". ")[0], 1, is_loss=True)
    trace = "".join(traceback.format_exception(error))
    return Problem(f"rank {rank}: {type(error).__name__}: {line} (traceback above)", 1, trace=trace)


class Notes:
    """A folder in which the ranks of one attempt leave their problems for the launcher.

    Args:
        folder: An empty folder of this machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, rank: int, problem: Problem) -> None:
        """Leaves a rank's problem."""
        temporary = self._folder / f".{rank}"
        temporary.write_text(json.dumps(asdict(problem)))
        os.replace(temporary, self._folder / f"{rank}.json")

    def read(self) -> dict[int, Problem]:
        """The problems by rank."""
        found = {int(path.stem): path for path in self._folder.glob("*.json")}
        return {rank: Problem(**json.loads(found[rank].read_text())) for rank in sorted(found)}

    def stop(self) -> None:
        """Asks the ranks to stop after their step."""
        (self._folder / "stopping").touch()

    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return (self._folder / "stopping").exists()
