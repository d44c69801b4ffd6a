"""The images of this rank's virtual workers, read ahead in the order in which the steps need them; bad ones counted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from torch.profiler import record_function

from ..comm.base import Liveness
from ..data.loader import Loader, Share
from ..data.pipeline import Batch
from ..errors import DiskError, RunError, is_transient
from ..recipe.schedule import Schedule, Step
from .control_vector import ControlVector
from .membership import Membership
from .watch import StepView, StepWatch


class ImageReader:
    """Takes batches from the loader and says which ones follow; `location` of the images is for people."""

    def __init__(
        self, loader: Loader, schedule: Schedule, liveness: Liveness, location: str, watchers: Sequence[StepWatch]
    ) -> None:
        self._loader, self._schedule, self._liveness = loader, schedule, liveness
        self._location, self._watchers = location, watchers
        self._error: OSError | RunError | None = None

    def read(self, step: Step, worker: int, membership: Membership) -> Batch | None:
        """The images of a virtual worker; None if they can't be read, which all ranks learn by the control vector."""
        self._liveness.progress("images", step.index, worker)
        self.begin_wait()
        try:
            return self.take(step, worker, membership)
        except (OSError, RunError) as error:
            self._error = error
            return None

    def begin_wait(self) -> None:
        """From here on it is a disk that this rank waits for, as people may learn."""
        self._liveness.outside("images", self._location)

    def take(self, step: Step, worker: int, membership: Membership) -> Batch:
        """The images of a virtual worker; OSError or RunError if they can't be read."""
        # Batch 1: the images of a virtual worker, and which ones will follow.
        shares = _shares(step, worker)
        with record_function("wait for images"):
            *plain, batch = [self._loader.take(share, self._following(share, membership)) for share in shares]
        return replace(batch, plain=plain[0] if plain else batch) if step.extra_pass else batch

    def note(self, error: OSError | RunError) -> None:
        self._error = error

    def failure(self, step: Step, failed: int, ranks: int, rank: int) -> RunError:
        """The error that ends the step on all ranks, of which so many could not read; a DiskError if it may pass."""
        # The others must learn of it before any of them ends, so a rank's own error is no more than a remark.
        own = "" if self._error is None else f" (rank {rank}: {self._error})"
        kind = DiskError if isinstance(self._error, OSError) and is_transient(self._error) else RunError
        return kind(f"step {step.index}: {failed} of {ranks} ranks can't read training images{own}")

    def _following(self, share: Share, membership: Membership) -> Iterator[Share]:
        """What this rank reads after a share, if the virtual workers of each rank stay as they are."""
        now = self._reads(share.step, membership)
        yield from now[now.index(share) + 1 :] if share in now else ()
        for index in range(share.step + 1, len(self._schedule)):
            yield from self._reads(index, membership)

    def _reads(self, index: int, membership: Membership) -> list[Share]:
        workers = chain(membership.mine, *(watcher.reads_too(index, membership) for watcher in self._watchers))
        return [share for worker in workers for share in _shares(self._schedule[index], worker)]


def _shares(step: Step, worker: int) -> list[Share]:
    """What a virtual worker reads: its images, before them the same un-augmented if its extra pass has others."""
    share = Share(step.index, worker, step.share(worker), step.images_per_worker, step.augment, step.sizes)
    return [replace(share, augment=False), share] if step.extra_pass and step.augment else [share]


class ReplacedImages(StepWatch):
    """Ends a run in which more than the fraction `limit` of the images can't be decoded."""

    def __init__(self, limit: float, train_images: int, replaced: Callable[[], int]) -> None:
        self._limit, self._train_images, self._replaced = limit, train_images, replaced

    def check(self, view: StepView, control: ControlVector) -> None:
        step, replaced = view.step, self._replaced() + control.counts.replaced
        # Against at least one epoch, so that one bad image among the first few is no reason to stop.
        if replaced > self._limit * max(step.start + step.batch, self._train_images):
            what = f"{replaced} training images could not be decoded, more than the share of {self._limit}"
            raise RunError(f"step {step.index}: {what} that data.max_replaced allows; mend the images, or raise it")
