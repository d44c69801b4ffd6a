"""Which gradients a step waits for: all of them, the first ones, or none for a while (relaxed synchrony)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .section import Count, Positive, Section


class Outer(Section):
    """SGD on the mean change of the virtual workers' copies, for form: local."""

    lr: Positive = 0.7
    """share of the mean change that the weights take; 1.0: all of it (local SGD)"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """of the changes, from one step to the next; 0.0: none (local SGD)"""
    nesterov: bool = True
    """as in DiLoCo"""

    @model_validator(mode="after")
    def _check(self) -> "Outer":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: needs a momentum above 0; give nesterov: false")
        return self


class Synchrony(Section):
    """What a step waits for. With backup and cutoff the mean is over the gradients that came in time, exactly."""

    form: Literal["synchronous", "backup", "cutoff", "local"] = "synchronous"
    """backup: the first virtual workers to finish (Chen et al.); cutoff: those in time (Teng and Wood; DropCompute);
    local: each takes some steps of its own (local SGD, DiLoCo). What time decides is kept in the run's journal"""
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
    """backup and cutoff: a model of delays, such as lognormal, whose virtual time decides in place of clocks; each
    virtual worker counts as a machine of its own"""
    local_steps: Count | None = None
    """local: updates of each virtual worker's own copy a step, each on an equal part of its images_per_worker"""
    outer: Outer = Outer()

    @model_validator(mode="after")
    def _check(self) -> "Synchrony":
        meaning = {"backups": "backup", "count": "cutoff", "threshold": "cutoff", "local_steps": "local"}
        for key, form in meaning.items():
            if getattr(self, key) is not None and self.form != form:
                raise ValueError(f"{key}: has a meaning with form: {form} only")
        if self.form != "local" and self.outer != Outer():
            raise ValueError("outer: has a meaning with form: local only")
        is_timed = self.delays is not None or self.warmup != type(self).model_fields["warmup"].default
        if is_timed and not self.leaves_out:
            raise ValueError("delays and warmup: have a meaning with form: backup or cutoff only")
        if self.form == "backup" and self.backups is None:
            raise ValueError("backups: is missing; give the virtual workers that a step leaves out")
        if self.form == "local" and self.local_steps is None:
            raise ValueError("local_steps: is missing; give the updates of each copy a step")
        if self.form == "cutoff" and (self.count is None) == (self.threshold is None):
            raise ValueError("count, threshold: form: cutoff needs one of them")
        return self

    @property
    def leaves_out(self) -> bool:
        """Whether a step may leave out virtual workers, so that the run keeps a journal."""
        return self.form in ("backup", "cutoff")

    def check_recipe(
        self, virtual_workers: int, images_per_worker: tuple[int, ...], reduction: str, blocks: int
    ) -> None:
        """ValueError where the rest of a recipe doesn't go with it; `images_per_worker` are those of the stages."""
        if self.form == "synchronous":
            return
        if reduction != "exact":
            raise ValueError(
                f"synchrony.form = {self.form}: needs reduction: exact, so that a replay has the same bits"
            )
        if blocks > 1:
            raise ValueError(
                f"synchrony.form = {self.form}: needs column_blocks: 1, since ranks that share layers wait"
            )
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
