"""Hugging Face's Trainer with the stream of samples, exact sums, a comparison of ranks and precise batch norm."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import seed_worker
except ImportError as error:
    raise ImportError(
        "torusgd.integrations.transformers needs transformers: pip install 'transformers[torch]'"
    ) from error

from ..data.sampler import BatchSizeSchedule, StreamSampler
from ..errors import UserError
from ..gradients.ddp_hook import Wire
from .parts import StepParts, precise_batch_norm

Inputs = Mapping[str, Tensor]
# of what a checkpoint's trainer_state.json has of the exact sums
_STATE = "torusgd"


class StreamTrainer(Trainer):
    """A Trainer that resumes in mid-epoch, on another number of ranks too, without a lost or repeated sample.

    The batch is `per_device_train_batch_size * world_size * gradient_accumulation_steps`: keep that product on other
    ranks. The micro-batches are the same too if the first factor stays. A checkpoint of another stream is refused;
    skipping batches (`ignore_data_skip`) is switched off, for the stream begins where it should.

    Args:
        schedule: Batches in place of that product, and rates that multiply those of the arguments' scheduler; it needs
            `max_steps`. The micro-batches grow with it, so that the first one is the arguments' at best.
        wire: `exact` sums gradients over ranks in fixed point; `float16`, `bfloat16` halve the bytes (`ddp_hook`).
        compare_every: Steps from one comparison of the ranks' weights to the next; 0: none (`Replicas`).
        calibration: Gives this rank's batches for precise batch norm before each evaluation (`polish`): the model's
            inputs as mappings.

    >>> trainer = StreamTrainer(model, args, train_dataset=images, wire="exact")  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        schedule: BatchSizeSchedule | None = None,
        wire: Wire | None = None,
        compare_every: int = 0,
        calibration: Callable[[], Iterable[Inputs]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if schedule is not None and self.args.max_steps <= 0:
            raise UserError(
                "schedule: epochs have no fixed number of steps with it; give TrainingArguments(max_steps=...)"
            )
        self.args.ignore_data_skip = True
        self._schedule, self._calibration = schedule, calibration
        self._wire, self._compare_every = wire, compare_every
        self.stream: StreamSampler | None = None
        self.callback_handler.callbacks.insert(0, _Follow(self))  # the others see its epoch

    def get_train_dataloader(self) -> DataLoader[Any]:
        options = self.args
        if getattr(options, "train_sampling_strategy", "random") != "random":
            raise UserError(
                f"train_sampling_strategy {options.train_sampling_strategy}: the stream has an order of its own"
            )
        if options.dataloader_drop_last:
            raise UserError("dataloader_drop_last=True: the stream drops nothing, and has no last batch; leave it out")
        lists = options.world_size * options.gradient_accumulation_steps
        try:
            length = len(self.train_dataset)
        except TypeError:
            raise UserError("train_dataset: the stream needs a dataset with a length, not an iterable one") from None
        self.stream = StreamSampler(
            length,
            self._schedule or options.per_device_train_batch_size * lists,
            seed=options.seed if options.data_seed is None else options.data_seed,
            micro_batches=lists,
        )
        seeded = partial(seed_worker, num_workers=options.dataloader_num_workers, rank=options.process_index)
        # Not by accelerate's `prepare`, which would divide the batches between ranks a second time.
        return DataLoader(
            self.train_dataset,
            batch_sampler=self.stream,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            worker_init_fn=seeded,
            num_workers=options.dataloader_num_workers,
            pin_memory=options.dataloader_pin_memory,
            persistent_workers=options.dataloader_persistent_workers,
            prefetch_factor=options.dataloader_prefetch_factor,
        )

    def set_initial_training_values(self, args: Any, dataloader: DataLoader[Any]) -> Any:
        # Epochs differ in steps where the batch doesn't divide them; the library takes the first one's for all.
        found, stream = super().set_initial_training_values(args, dataloader), self.stream
        assert stream is not None
        length, epochs, steps = stream.epoch_samples, float(args.num_train_epochs), args.max_steps
        if steps <= 0:
            steps = math.ceil(math.ceil(epochs * length) / stream.batch(0))
        epochs = math.ceil(stream.samples_before(steps) / length)
        longest = math.ceil(length / (stream.batch(0) if self._schedule is None else self._schedule.least))
        _, _, examples, samples, batch, _, _ = found
        return epochs, longest, examples, samples, batch, longest * args.gradient_accumulation_steps, steps

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self._calibration is not None:
            precise_batch_norm(self.model, (self._prepare_inputs(inputs) for inputs in self._calibration()))
        return super().evaluate(*args, **kwargs)

    def parts(self) -> StepParts:
        """What follows the steps of the model as it trains, wrapped."""
        assert self.stream is not None
        return StepParts(self.model_wrapped, self.optimizer, self.stream, self._wire, self._compare_every)


class _Follow(TrainerCallback):
    def __init__(self, trainer: StreamTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stream = self._trainer.stream
        assert stream is not None
        self._stream, self._parts = stream, self._trainer.parts()
        saved = dict(state.stateful_callbacks.get(_STATE, {}))
        stream.seek(state.global_step)
        if "stream" in saved:  # else it is a checkpoint of a plain Trainer
            stream.load_state_dict(saved.pop("stream"))
        self._parts.load_state_dict(saved)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stream.seek(state.global_step)
        state.epoch = self._stream.consumed / self._stream.epoch_samples
        self._parts.step()
        # Who decides to save does so after this, and no callback is called between.
        state.stateful_callbacks[_STATE] = {**self._parts.state_dict(), "stream": self._stream.state_dict()}
