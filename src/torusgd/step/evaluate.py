"""Exact evaluation: every held-out image once, in fixed chunks, with integer counts summed over ranks.

Logits depend on the size of a batch, so chunks are cut by image index, never by rank: chunk i goes to rank i mod N.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm.base import AllReduce
from ..comm.exact_sum import FULL, decode, encode
from ..comm.groups import Group
from ..data.pipeline import Batch, Pipeline
from ..data.to_device import pinned, place
from ..errors import DiskError, RunError, is_transient
from ..precision import Precision
from ..recipe.data_schema import Evaluate
from ..runtime import loader_threads

Indices = npt.NDArray[np.int64]
# Called with the logits of a chunk's decodable images, their batch, and the indices of all images of the chunk.
Observe = Callable[[Tensor, Batch, Indices], object]
Progress = Callable[[int], object]  # called with the index of each chunk of this rank


@dataclass(frozen=True)
class Evaluation:
    """The result over all held-out images; the same bits on any number of ranks."""

    top1: float
    top5: float
    loss: float  # mean cross-entropy, without label smoothing
    images: int
    excluded: int
    classes: int  # of the data

    def __str__(self) -> str:
        # Of five classes and fewer top-5 is always 100 %.
        top5 = f"  top-5 {self.top5:.2%}" if self.classes > 5 else ""
        return f"top-1 {self.top1:.2%}{top5}  loss {self.loss:.4f}"

    def as_summary(self) -> dict[str, float | int]:
        figures = {"top1": self.top1, "top5": self.top5, "loss": self.loss}
        return {**figures, "eval_images": self.images, "excluded_images": self.excluded}


@torch.no_grad()
def evaluate(
    model: nn.Module, pipeline: Pipeline, settings: Evaluate, world: Group, allreduce: AllReduce, precision: Precision,
    stop_requested: Callable[[], bool] = lambda: False, progress: Progress = lambda chunk: None,
    observe: Observe = lambda logits, batch, chunk: None,
) -> Evaluation | None:  # fmt: skip
    """Classifies all images of a source; None if a stop was requested meanwhile, RunError if images can't be read.

    The model is left in evaluation mode. `progress` and `observe` are called for each of this rank's chunks.
    """
    model.eval()
    counts = torch.zeros(6, dtype=torch.int64, device=world.device)  # top-1, top-5, seen, excluded, stop, failed
    loss = torch.zeros(FULL.rows, dtype=torch.int64, device=world.device)
    total, size = len(pipeline.source), settings.images_per_chunk
    starts = range(world.rank * size, total, world.size * size)
    chunks = [np.arange(start, min(start + size, total)) for start in starts]
    reason, kind = "", RunError
    try:
        with precision.autocast():
            batches = read_ahead(pipeline.validation_batch, chunks, loader_threads(world.device), progress)
            for batch, chunk in zip(batches, chunks, strict=True):
                if stop_requested():
                    counts[4] += 1
                    break
                if len(batch.targets):
                    images = place(batch, world.device, precision.memory_format)
                    logits = model(images).float()
                    if settings.flip:
                        logits = (logits + model(images.flip(-1)).float()) / 2
                    targets = pinned(batch.targets, world.device).to(world.device, non_blocking=True)
                    counts[:2] += count_correct(logits, targets)
                    observe(logits, batch, chunk)
                    loss += encode(F.cross_entropy(logits, targets, reduction="none")).sum(dim=1)
                counts[2] += len(batch.targets)
                counts[3] += len(chunk) - len(batch.targets)
    except OSError as error:
        counts[5] += 1
        reason, kind = f": {error}", DiskError if is_transient(error) else RunError
    message = torch.cat([counts, loss])
    allreduce.start(message).wait()
    top1, top5, seen, excluded, stop, failed = message[:6].tolist()
    if failed:
        raise kind(f"evaluation: {failed} of {world.size} ranks can't read held-out images{reason}")
    if stop:
        return None
    assert seen + excluded == total, "every held-out image is counted once"
    mean = float(decode(message[6:].reshape(FULL.rows, 1))) / max(seen, 1)
    return Evaluation(top1 / max(seen, 1), top5 / max(seen, 1), mean, seen, excluded, len(pipeline.source.classes))


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """int64 [2]: images in top-1 and top-5. One whose logits hold a nan is wrong; of equal logits the lower wins."""
    of_target = logits.gather(1, targets[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    rank = ((logits > of_target) | ((logits == of_target) & (classes < targets[:, None])) | logits.isnan()).sum(dim=1)
    wrong = logits.isnan().any(dim=1)
    return torch.stack([((rank < k) & ~wrong).sum() for k in (1, 5)])


def read_ahead(
    prepare: Callable[[Indices], Batch], chunks: Iterable[Indices], threads: int, progress: Progress = lambda done: None
) -> Iterator[Batch]:
    """The batches of index chunks, in order, prepared by so many threads while the ones before are used."""
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[Batch]] = deque()
        for index, chunk in enumerate(chunks):
            progress(index)
            pending.append(pool.submit(prepare, chunk))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class Confusion:
    """Counts of images by their class and by the class with the highest logit.

    >>> confusion = Confusion(3, torch.device("cpu"))
    >>> confusion.add(torch.tensor([[9.0, 0.0, 1.0], [9.0, 0.0, 1.0]]), torch.tensor([0, 2]))
    >>> confusion.counts.tolist()
    [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    >>> confusion.accuracies()
    [1.0, None, 0.0]
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        # Int64 [C, C]: row, the class of the image; column, the class that the network chose.
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Counts images, by logits [n, C] and targets [n]; of equal logits the lower class wins, as in top-1."""
        classes = len(self.counts)
        # An image whose logits hold a nan is wrong in top-1, and is counted as the class after its own.
        chosen = torch.where(logits.isnan().any(dim=1), (targets + 1) % classes, logits.argmax(dim=1))
        self.counts += torch.bincount(targets * classes + chosen, minlength=classes**2).view_as(self.counts)

    def sum_over_ranks(self, allreduce: AllReduce) -> None:
        allreduce.start(self.counts.view(-1)).wait()

    def accuracies(self) -> list[float | None]:
        """Of each class the fraction of its images that are right; None without images."""
        rights, images = self.counts.diagonal().tolist(), self.counts.sum(dim=1).tolist()
        return [right / count if count else None for right, count in zip(rights, images, strict=True)]
