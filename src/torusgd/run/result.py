"""What a run leaves: its trained weights and its summary; and whether a folder holds them already."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data.file_lists import Once, make_here
from ..data.fingerprint import data_sha256
from ..data.registry import open_sources
from ..errors import RunError
from ..hub import commit_of
from ..recipe.schedule import Schedule
from ..recipe.schema import Recipe
from ..rundir.run_dir import RunDir
from ..signals import exit_code
from ..weights import Tensors, json_text, save_weights, write_text
from .fingerprint import Fingerprint
from .job import Job, init_sha256, replayed_sha256


@dataclass(frozen=True)
class RunResult:
    """How a rank's part in a run ended: with a summary, or by a signal after a checkpoint was written."""

    summary: dict[str, Any] = field(default_factory=dict)
    signal: int = 0
    ranks_change: bool = False
    """it goes on, with ranks that join or without some that leave"""

    @property
    def code(self) -> int:
        """Exit code of the command."""
        return exit_code(self.signal) if self.signal else 0


def finished(job: Job, once: Once = make_here) -> dict[str, Any] | None:
    """The summary of a job that its folder holds the result of; None where there is work left.

    Opening the data also finds a wrong path before any rank is started. `once`: who lists the images.

    Raises:
        UserError: The result is of another data set or other initial weights, or the job can't be run as given.
    """
    source, held_out = open_sources(job.recipe.data, job.data, job.recipe.seed, once)
    steps = len(Schedule(job.recipe, len(source)))
    summary = RunDir(job.out).finished(min(steps, job.max_steps or steps))
    if summary is not None:
        data = data_sha256(source, held_out)
        known = replayed_sha256(job), commit_of(job.data)
        now = Fingerprint(job.recipe.sha256(), len(source), data, init_sha256(job), "", {}, *known)
        now.check_same_run(
            Fingerprint.from_dict({**now.as_dict(), **summary, "conditions": {}}), f"the run in {job.out}"
        )
    return summary


def weights_metadata(recipe: Recipe, classes: Sequence[str]) -> dict[str, str]:
    """What a file of weights says of itself, by which it can be used without the run's folder."""
    return {"classes": json.dumps(classes), "recipe": json.dumps(recipe.as_dict()), "recipe_sha256": recipe.sha256()}


def write_result(folder: RunDir, tensors: Tensors, summary: Mapping[str, Any], metadata: dict[str, str]) -> None:
    """Writes the weights, with the metadata, and after them the summary.

    Raises:
        RunError: The disk doesn't take them.
    """
    try:
        save_weights(folder.model, tensors, metadata)
        write_text(folder.summary, json_text(summary, indent=1) + "\n")
    except OSError as error:
        raise RunError(
            f"{folder.path}: can't write the result: {error.strerror}; the last checkpoint holds the trained weights: "
            "free space and give the same command again"
        ) from None
