"""Hugging Face Accelerate with the stream of samples, exact sums, a comparison of ranks and precise batch norm.

Before an evaluation call `precise_batch_norm(model, batches)` with this rank's batches.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
except ImportError as error:
    raise ImportError("torusgd.integrations.accelerate: pip install accelerate") from error

from ..data.sampler import StreamSampler
from ..errors import UserError
from ..gradients.ddp_hook import Wire
from .parts import StepParts, precise_batch_norm

__all__ = ["follow_steps", "precise_batch_norm", "stream_loader"]


class _StreamLoader(DataLoaderShard):
    """As `accelerator.prepare` has it for one process: moves batches to the device, marks the last, divides nothing."""

    @property
    def sampler(self) -> Any:
        # `skip_first_batches` looks here first, and nothing else: what it makes would begin too far in the stream.
        raise UserError("the stream goes on after the last step that was trained on: leave skip_first_batches out")


def stream_loader(
    accelerator: Accelerator,
    dataset: Dataset[Any],
    batch_size: int | Callable[[int], int],
    *,
    seed: int = 0,
    **options: Any,
) -> tuple[DataLoader[Any], StreamSampler]:
    """A loader for `accelerator`'s ranks, and its sampler; don't give the loader to `accelerator.prepare`.

    The sampler is in what `accelerator.save_state` writes and `load_state` reads: load before you iterate. It counts
    once `follow_steps` was called. There are `gradient_accumulation_steps` micro-batches a rank and step.

    Args:
        accelerator: Of this rank.
        dataset: With a length.
        batch_size: Samples of a step over all ranks, or a function of the samples consumed. The rates of a
            `BatchSizeSchedule` multiply those of a scheduler.
        seed: Decides the order.
        options: For the DataLoader, such as num_workers.
    """
    sampler = StreamSampler(
        len(dataset),  # type: ignore[arg-type]
        batch_size,
        seed=seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        micro_batches=accelerator.num_processes * accelerator.gradient_accumulation_steps,
    )
    accelerator.register_for_checkpointing(sampler)
    device = accelerator.device if accelerator.device_placement else None
    return _StreamLoader(dataset, device, batch_sampler=sampler, **options), sampler


def follow_steps(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    sampler: StreamSampler,
    *,
    wire: Wire | None = None,
    compare_every: int = 0,
) -> None:
    """Counts the steps of what `accelerator.prepare` returned; every rank calls it once, before `load_state`.

    Args:
        accelerator: Of this rank; what it saves has the scales of exact sums too.
        model: In DistributedDataParallel, if there are several ranks.
        optimizer: The one whose steps train the model.
        sampler: Of the loader.
        wire: `exact` sums gradients over ranks in fixed point; `float16`, `bfloat16` halve the bytes (`ddp_hook`).
        compare_every: Steps from one comparison of the ranks' weights to the next; 0: none (`Replicas`).
    """
    parts = StepParts(model, optimizer, sampler, wire, compare_every)
    accelerator.register_for_checkpointing(parts)
    inner = getattr(optimizer, "optimizer", optimizer)
    sampler.follow(inner)
    inner.register_step_post_hook(lambda *_: parts.step())
    step = optimizer.step

    def step_or_skip(*given: Any, **options: Any) -> Any:
        # A gradient scaler may leave the inner optimizer out, and the samples were drawn all the same.
        result = step(*given, **options)
        if accelerator.sync_gradients and getattr(optimizer, "step_was_skipped", False):
            sampler.step()
            parts.step()
        return result

    optimizer.step = step_or_skip
