"""What a run measures of its gradients and factors, in a few of its steps.

The gradient noise scale is the batch up to which more images make a step better in proportion. A gradient over b images
is the true gradient G plus noise of variance S / b. The step's virtual workers, of b images each, and their mean, of B
images, give unbiased estimates of both (McCandlish et al., arXiv 1812.06162, appendix A.1):

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)        S = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

The noise scale is S / |G|^2. With a batch well below it twice the images make nearly twice the progress; well above it
they hardly pay. In portable arithmetic the pairs of factors that multiply to nothing are counted (`arithmetic.scales`),
of one virtual worker now and then. Their share stands in the event of the step after, as `lost_pairs`.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import counting
from ..arithmetic.scales import Pairs
from ..comm.base import AllReduce, Work
from ..data.to_device import pinned
from ..gradients.integer_hash import IntegerHash
from ..recipe.schedule import Schedule
from .control_vector import NO_WORDS, ControlVector
from .membership import Membership
from .watch import StepView, StepWatch

# Steps from one measurement to the next: a norm is one more pass over a virtual worker's gradient.
EVERY = 10
# Weight of the average so far when a new measurement comes: the last hundred steps count for about two thirds.
DECAY = 0.9
# Steps from one count of lost pairs to the next; those of the first one are there after two steps.
PAIRS_EVERY = 20


class NoiseEstimate:
    """Averages of S and |G|^2 over measurements; both begin with 0, which cancels in their ratio."""

    # A single step's estimates scatter widely, and a ratio of means can be trusted better than a mean of ratios.
    def __init__(self, noise: float = 0.0, signal: float = 0.0) -> None:
        self.noise, self.signal = noise, signal

    def add(self, small: float, mean: float, images: int, batch: int) -> None:
        """Takes the mean squared norm of gradients over `images`, and the squared norm of that over the `batch`."""
        noise = (small - mean) / (1 / images - 1 / batch)
        signal = (batch * mean - images * small) / (batch - images)
        self.noise = DECAY * self.noise + (1 - DECAY) * noise
        self.signal = DECAY * self.signal + (1 - DECAY) * signal

    @property
    def value(self) -> float | None:
        """Images; None if nothing has been measured, or the noise hides the gradient."""
        return self.noise / self.signal if self.noise > 0 and self.signal > 0 else None


class NoiseWatch(StepWatch):
    """Measures the noise scale every EVERY steps; every rank has one, and two `workers` of a step at least."""

    name = "noise scale"

    def __init__(
        self,
        schedule: Schedule,
        workers: int,
        device: torch.device,
        allreduce: AllReduce,
        mean_norm: Callable[[], float],
        loss_scale: Callable[[], float],
        to_host: Callable[[Tensor], Tensor] = Tensor.cpu,
    ) -> None:
        self._to_host = to_host
        self._workers, self._device, self._allreduce = workers, device, allreduce
        self._ends = {span.stop_step for span in schedule.spans}
        self._mean_norm, self._loss_scale = mean_norm, loss_scale
        self._estimate = NoiseEstimate()
        # Of each slot float32 [], by virtual worker of this rank.
        self._norms: dict[int, list[Tensor]] = {}
        self._sent = torch.zeros(0, dtype=torch.int64)
        self._work: Work | None = None
        self._squares: list[float] = []  # of all virtual workers, once they have come; empty: none are due

    def due(self, step: int) -> bool:
        return self._is_measured(step) or step + 1 in self._ends

    def _is_measured(self, step: int) -> bool:
        # Not at a multiple: a run's first step is measured twice, and speeds are compared in tenth steps.
        return step % EVERY == EVERY // 2

    def gradients_of(self, step: int, worker: int) -> Callable[[int, Tensor], object] | None:
        if not self._is_measured(step):
            return None
        norms = self._norms[worker] = list[Tensor]()
        # On a GPU the host reads none of them before the passes are done.
        return lambda slot, gradient: norms.append(torch.linalg.vector_norm(gradient.detach().float()))

    def after_passes(self, view: StepView) -> None:
        if self._work is not None:  # of passes that are repeated
            self._work.wait()
            self._work = None
        if not self._is_measured(view.step.index):
            return
        squares = torch.zeros(self._workers, dtype=torch.float64)
        found = [norm for norms in self._norms.values() for norm in norms]
        values = iter(self._to_host(torch.stack(found)).tolist() if found else ())
        for worker, norms in self._norms.items():
            squares[worker] = math.fsum(value * value for value in islice(values, len(norms)))
        self._norms = {}
        # Each squared norm is computed by the rank that has the virtual worker, from the same numbers whichever rank
        # that is, and travels as the bits of float64 at an index of its own: every other rank sends zeros there, so a
        # sum of the bits as integers leaves them alone. So the noise scale is the same number on any number of ranks.
        self._sent = pinned(squares.view(torch.int64), self._device).to(self._device, non_blocking=True)
        self._work = self._allreduce.start(self._sent)

    def before_accept(self, view: StepView, control: ControlVector) -> None:
        self._squares = []
        if self._work is not None:
            # Here, and not beside the mean: if a rank is lost meanwhile, this one still holds the last step's scales.
            self._work.wait()
            self._work = None
            self._squares = self._to_host(self._sent).view(torch.float64).tolist()

    def with_mean(self, view: StepView) -> None:
        if not self._squares or view.is_redone or not all(0.0 < each < math.inf for each in self._squares):
            return
        small, factor = math.fsum(self._squares) / self._workers, self._loss_scale() ** 2
        images, batch = view.step.images_per_worker, view.step.batch
        self._estimate.add(small / factor, self._mean_norm() ** 2 / factor, images, batch)

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        if (value := self._estimate.value) is None:
            return found
        if self._is_measured(view.step.index):
            found["noise_scale"] = float(f"{value:.6g}")
        if view.step.index + 1 in self._ends:
            what = f"the gradient noise scale is {value:,.0f} images, the batch {view.step.batch:,}"
            pays = "more images a step would pay up to about the noise scale"
            found["lines"] = [f"stage {view.step.stage + 1} ends: {what}; {pays}"]
        return found

    def state(self) -> Mapping[str, Tensor]:
        return {"averages": torch.tensor([self._estimate.noise, self._estimate.signal], dtype=torch.float64)}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._estimate = NoiseEstimate(*(tensors["averages"].tolist() if "averages" in tensors else ()))


class LostPairsWatch(StepWatch):
    """Counts lost pairs in the passes of virtual worker 0; every rank has one."""

    name, words = "lost pairs", 2

    def __init__(self) -> None:
        self._inside = ExitStack()
        self._pairs = Pairs()

    def due(self, step: int) -> bool:
        # The control vector of a step may leave before its last backward pass has ended: the next one takes the count.
        return step % PAIRS_EVERY in (0, 1)

    def before_worker(self, step: int, worker: int, membership: Membership) -> IntegerHash | None:
        self._inside.close()
        if step % PAIRS_EVERY == 0 and worker == 0:
            self._pairs = self._inside.enter_context(counting())
        return None

    def after_passes(self, view: StepView) -> None:
        self._inside.close()

    def before_send(self, view: StepView) -> Tensor:
        if view.step.index % PAIRS_EVERY != 1:
            return NO_WORDS
        pairs, self._pairs = self._pairs, Pairs()
        return torch.tensor([pairs.lost, pairs.all], dtype=torch.int64)

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        if view.step.index % PAIRS_EVERY != 1 or not (words := control.words(self.name)) or not words[1]:
            return {}
        return {"lost_pairs": words[0] / words[1]}

    def close(self) -> None:
        self._inside.close()
