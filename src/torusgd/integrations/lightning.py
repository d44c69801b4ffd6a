"""A Lightning callback: the stream of samples, exact sums, a comparison of ranks and precise batch norm."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("torusgd.integrations.lightning: pip install lightning") from error

from ..data.sampler import StreamSampler
from ..errors import UserError
from ..gradients.ddp_hook import Wire
from .parts import StepParts, precise_batch_norm


class StreamCallback(Callback):
    """Has a run resume in mid-epoch, on another number of ranks too, without a lost or repeated sample.

    The module's loader takes the same sampler, `DataLoader(dataset, batch_sampler=sampler)`, and the Trainer
    `use_distributed_sampler=False`, for each rank's batches are its own already. With accumulation the sampler has
    `micro_batches = accumulate_grad_batches * ranks`.

    Args:
        sampler: Made without rank and world size, which are known when the Trainer has started the ranks. The rates of
            its `BatchSizeSchedule`, if it has one, multiply those of the module's scheduler.
        wire: `exact` sums gradients over ranks in fixed point; `float16`, `bfloat16` halve the bytes (`ddp_hook`).
        compare_every: Steps from one comparison of the ranks' weights to the next; 0: none (`Replicas`).
        calibration: Gives this rank's batches for precise batch norm before each validation (`polish`).

    >>> trainer = Trainer(use_distributed_sampler=False, callbacks=[StreamCallback(sampler)])  # doctest: +SKIP
    """

    def __init__(
        self,
        sampler: StreamSampler,
        *,
        wire: Wire | None = None,
        compare_every: int = 0,
        calibration: Callable[[], Iterable[Tensor]] | None = None,
    ) -> None:
        self._sampler, self._wire, self._compare_every, self._calibration = sampler, wire, compare_every, calibration
        self._parts: StepParts | None = None
        self._sums: dict[str, Any] = {}
        self._before = 0  # steps of the sampler that the Trainer doesn't count

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer._accelerator_connector.use_distributed_sampler and trainer.world_size > 1:
            raise UserError(
                "Trainer(use_distributed_sampler=True) would replace or divide the stream once more: give "
                "use_distributed_sampler=False"
            )
        # Epochs differ in steps where the batch doesn't divide them, and a Trainer asks for their number once a loader.
        trainer.reload_dataloaders_every_n_epochs = 1

    def state_dict(self) -> dict[str, Any]:
        return {**self._sampler.state_dict(), "sums": self._sums if self._parts is None else self._parts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Before the Trainer makes the loader's iterator, whose workers begin to read at once.
        self._sampler.load_state_dict(state_dict)
        self._sums = state_dict["sums"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise UserError(f"the stream counts the steps of one optimizer; this module has {len(trainer.optimizers)}")
        assert trainer.model is not None
        self._parts = StepParts(trainer.model, trainer.optimizers[0], self._sampler, self._wire, self._compare_every)
        self._parts.load_state_dict(self._sums)
        self._before = self._sampler.steps - trainer.global_step
        # A checkpoint counts the batches of a rank, which are others on another number of ranks. One that was written
        # at the end of a batch has not counted that one as completed, and the loop adds it later.
        loop = trainer.fit_loop.epoch_loop
        progress, offset = loop.batch_progress.current, self._sampler.epoch_offset
        progress.ready = progress.started = progress.processed = offset
        progress.completed = offset - loop.restarted_on_train_batch_end

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        assert self._parts is not None
        # By the Trainer's count: a gradient scaler may leave the optimizer out, and its batch is over all the same.
        while self._sampler.steps < self._before + trainer.global_step:
            self._sampler.step()
            self._parts.step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._calibration is not None and not trainer.sanity_checking:
            precise_batch_norm(pl_module, self._calibration())
