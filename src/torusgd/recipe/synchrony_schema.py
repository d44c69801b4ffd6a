"""What workers wait for: all of them, the first ones, some drawn at random, or nobody (relaxed synchrony)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .section import Count, Fraction, Positive, Section


class Outer(Section):
    """SGD on the mean change of the virtual workers' copies, for form: local."""

    lr: Positive = 0.7
    """fraction of the mean change that the weights take; 1.0: all of it (local SGD)"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """momentum of the changes, from one step to the next; 0.0: none (local SGD)"""
    nesterov: bool = True
    """Nesterov's momentum, as in DiLoCo"""

    @model_validator(mode="after")
    def _check(self) -> "Outer":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: needs a momentum above 0; give nesterov: false")
        return self


SIMULATED = ("sampled", "stale", "asynchronous", "gossip", "elastic")
"""forms in which workers hold weights of different ages: in virtual time only"""
_KEYS = {
    "backup": ("backups", "warmup", "delays"),
    "cutoff": ("count", "threshold", "warmup", "delays"),
    "local": ("local_steps", "outer"),
    "sampled": ("sample", "staleness", "delays"),
    "stale": ("staleness", "delays"),
    "asynchronous": ("delays",),
    "gossip": ("probability", "delays"),
    "elastic": ("pull_every", "delays"),
}
"""keys that have a meaning, by form"""
_NEEDED = {
    "backup": ("backups", "the virtual workers that a step leaves out"),
    "local": ("local_steps", "the updates of each copy a step"),
    "sampled": ("sample", "the workers that each of them looks at"),
    "stale": ("staleness", "the steps by which a worker may be ahead"),
    "gossip": ("probability", "that of a mean with another worker after a step"),
    "elastic": ("pull_every", "the steps from one pull towards the centre to the next"),
}
"""key that a form needs, and its meaning"""


class Synchrony(Section):
    """What a step waits for. With backup and cutoff the mean is over the gradients that came in time, exactly."""

    form: Literal[
        "synchronous", "backup", "cutoff", "local", "sampled", "stale", "asynchronous", "gossip", "elastic"
    ] = "synchronous"
    """backup: the first virtual workers to finish (Chen et al.); cutoff: those in time (Teng and Wood; DropCompute);
    local: each takes some steps of its own (local SGD, DiLoCo). The run's journal records what time decides. Only
    simulated (`torusgd simulate`) are sampled, stale and asynchronous: barriers that look at some workers (PSP), at all
    (SSP) or at none; gossip: means of pairs; elastic: a pull towards a centre (EASGD)"""
    backups: Count | None = None
    """backup: a step takes the first virtual_workers - backups of them"""
    count: Count | Literal["predicted"] | None = None
    """cutoff: a step takes so many, the first to finish; predicted: by the times of earlier steps, as many as make the
    most gradients a second"""
    threshold: Positive | Literal["measured"] | None = None
    """cutoff: seconds of each rank's own clock after which it leaves out the rest; measured: by the times of the
    warm-up, what makes the most gradients a second"""
    warmup: Annotated[int, Field(ge=2)] = 20
    """backup and cutoff: steps at the start of the run that wait for all, and so do as many after ranks start again;
    predicted and measured take their times from them"""
    delays: str | None = None
    """model of delays, such as lognormal, added to the 1 s of virtual time that each virtual worker takes, on a
    machine of its own. backup and cutoff: it decides in place of clocks; simulated forms: null is exponential"""
    local_steps: Count | None = None
    """local: updates of each virtual worker's own copy a step, each on an equal part of its images_per_worker"""
    outer: Outer = Outer()
    sample: Annotated[int, Field(ge=0)] | None = None
    """sampled: workers, drawn afresh each time, that a worker looks at before it goes on"""
    staleness: Annotated[int, Field(ge=0)] | None = None
    """sampled and stale: steps by which it may be ahead of those that it looks at; null: 0"""
    probability: Fraction | None = None
    """gossip: of a mean with another worker's weights after a step"""
    pull_every: Count | None = None
    """elastic: steps of a worker from one pull towards the centre to the next"""

    @model_validator(mode="after")
    def _check(self) -> "Synchrony":
        defaults = {name: field.default for name, field in type(self).model_fields.items() if name != "form"}
        for key, default in defaults.items():
            if getattr(self, key) != default and key not in _KEYS.get(self.form, ()):
                known = " or ".join(form for form, keys in _KEYS.items() if key in keys)
                raise ValueError(f"{key}: has a meaning with form: {known} only")
        if self.form in _NEEDED and getattr(self, key := _NEEDED[self.form][0]) is None:
            raise ValueError(f"{key}: is missing; give {_NEEDED[self.form][1]}")
        if self.form == "cutoff" and (self.count is None) == (self.threshold is None):
            raise ValueError("count, threshold: form: cutoff needs one of them")
        return self

    @property
    def is_simulated(self) -> bool:
        """Whether it is for `torusgd simulate` alone."""
        return self.form in SIMULATED

    def count_of(self, virtual_workers: int) -> int | Literal["predicted"] | None:
        """Of so many virtual workers those that a step waits for; None: all of them."""
        return self.count if self.backups is None else virtual_workers - self.backups

    @property
    def leaves_out(self) -> bool:
        """Whether a step may leave out virtual workers."""
        return self.form in ("backup", "cutoff")

    @property
    def keeps_journal(self) -> bool:
        """Whether a run writes down whose gradients, or changes, entered each update."""
        return self.leaves_out or self.form == "local"

    def check_counts(self, virtual_workers: int, images_per_worker: tuple[int, ...]) -> None:
        """ValueError if a recipe has too few virtual workers, or images of each in a stage that can't be divided."""
        least = self.backups + 1 if self.backups is not None else self.count if isinstance(self.count, int) else 1
        if least > virtual_workers:
            key = "backups" if self.form == "backup" else "count"
            raise ValueError(
                f"synchrony.{key} = {getattr(self, key)}: there are {virtual_workers} virtual workers; use fewer"
            )
        for number, images in enumerate(images_per_worker):
            if images % (self.local_steps or 1):
                raise ValueError(
                    f"stages.{number}.images_per_worker = {images}: must be a multiple of synchrony.local_steps, "
                    f"{self.local_steps}"
                )
