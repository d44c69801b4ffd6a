"""A job: a recipe, the means to compute it, and where its data, weights and results lie."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, PositiveInt

from ..errors import UserError
from ..observe.events import PlanComparison
from ..observe.trace import TracedSteps
from ..recipe.compatibility import CUDA_GRAPHS, LISTENS, PORTABLE, RANGE, Setup, check, obstacle
from ..recipe.load import validate
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..runtime import runs_kernels
from ..step.journal import Journaled
from ..step.records import Expected
from ..synchrony.delays import delay_model


class _JobTree(BaseModel):
    recipe: Recipe
    options: RuntimeOptions
    device: Literal["cpu", "cuda"]
    out: Path
    max_steps: PositiveInt | None
    delays: str
    trace: TracedSteps | None


@dataclass(frozen=True)
class Job:
    """What to run, where, and how."""

    recipe: Recipe  # no `auto` in it
    options: RuntimeOptions
    device: str
    out: Path
    data: Path | None = None
    init: str | None = None  # weights to start from, see `trained_weights.read_initial`
    max_steps: int | None = None
    plan: PlanComparison | None = None
    replay: Journaled | None = None  # whose updates are taken again; None: the recipe and the clocks decide them
    expected: Expected | None = None  # the states that steps computed anew must reach; None: this is a run of its own
    delays: str = ""
    lists: tuple[str, ...] | None = None  # of images, found by our launcher (`LauncherArrays`); None: by the ranks
    trace: TracedSteps | None = None
    bucket: str | None = None  # the URL to which what stands in `out` is copied

    def as_dict(self) -> dict[str, Any]:
        """What a machine that joins the run must know of it, as plain JSON; `from_dict` reads it."""
        # Ranks that join get weights and write nothing, so neither `init` nor `bucket` is in it.
        options = self.options.model_dump(mode="json", exclude_unset=True)
        plain = {name: getattr(self, name) for name in ("device", "max_steps", "delays", "trace")}
        return {"recipe": self.recipe.as_dict(), "options": options, "out": str(self.out), **plain}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], data: Path | None) -> "Job":
        """From what `as_dict` gave, with the data set of this machine; UserError if it is something else."""
        return cls(**dict(validate(_JobTree, tree, "the run's job")), data=data)

    def command(self) -> dict[str, Any]:
        """What the user gave beside the recipe, and `with_graphs` decided, as plain JSON, to be given again."""
        options = self.options.model_dump(mode="json", exclude_unset=True)
        data = None if self.data is None else str(self.data)
        return {"data": data, "init": self.init, "max_steps": self.max_steps, "runtime": options}


def setup_of(job: Job, ranks: int | None = None, **more: Any) -> Setup:
    """What the table of compatibility looks at; `more` replaces fields of `Setup`."""
    setup = Setup(job.recipe, job.options, job.device, ranks, job.delays, is_replay=job.replay is not None)
    return replace(setup, **more)


def with_graphs(job: Job, ranks: int, listens: bool) -> Job:
    """The job with `cuda_graphs` decided where a GPU's only rank left it open: yes, if nothing forbids them.

    In portable arithmetic, where the passes alone become graphs, they are left out: nobody has measured them.
    """
    setup = setup_of(job, ranks, listens=listens)
    if job.options.cuda_graphs is not None or (job.device, ranks) != ("cuda", 1):
        return job
    may_change = RANGE.is_in(setup) or LISTENS.is_in(setup)
    graphs = runs_kernels() and not (PORTABLE.is_in(setup) or may_change or obstacle(CUDA_GRAPHS, setup))
    return replace(job, options=job.options.model_copy(update={"cuda_graphs": graphs}))


def check_job(job: Job, ranks: int, device: str, steps: int) -> None:
    """UserError if a job of so many steps can't be run on these ranks."""
    if job.trace is not None and job.trace.last > steps:
        raise UserError(f"--trace {job.trace.first}:{job.trace.last}: the run has {steps} steps")
    check(setup_of(job, ranks, device=device))
    for text in {job.delays, job.recipe.synchrony.delays or ""} - {""}:
        delay_model(text, job.recipe.seed)


def images_at(job: Job) -> str:
    """Where the training images are, for people."""
    return str(job.data or job.recipe.data.source)
