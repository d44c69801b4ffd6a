"""The gradient noise scale in anyone's loop, by the norms of its micro-batches' gradients and of their mean."""

import math

import torch
from torch import Tensor, nn

from ..comm.fixed_point import exact_all_reduce
from ..comm.groups import AnyGroup, group_of
from ..errors import UserError
from ..step.measures import EVERY, NoiseEstimate


class NoiseScale:
    """Measures up to which batch more samples make a step better in proportion (arXiv 1812.06162, appendix A.1).

    Every rank makes one, and calls `step` when `.grad` holds the step's mean. The number is the same on any number of
    ranks where the gradients are. It costs a norm of each pass's gradient, in every tenth step.

    Args:
        model: Whose backward passes are watched, in DistributedDataParallel or not.
        samples: Of a micro-batch, all of one size.
        micro_batches: Backward passes of a step over all ranks, at least 2, of losses that are means over one.
        loss_factor: By which the losses are multiplied, such as 1 / passes of a rank, if the loop accumulates so.
        every: Steps from one measurement to the next.
        group: The ranks; None: all ranks, or this process alone.

    Raises:
        UserError: Fewer than 2 micro-batches, or a number that can't be.

    >>> weights = nn.Linear(1, 1, bias=False)
    >>> noise = NoiseScale(weights, samples=4, micro_batches=2, loss_factor=0.5, every=1)
    >>> for inputs in (1.0, 1.5):
    ...     (weights(torch.tensor([inputs])).sum() / 2).backward()  # .grad becomes the mean of both
    >>> noise.step(), round(noise.value, 3)
    (True, 0.333)
    """

    def __init__(
        self,
        model: nn.Module,
        samples: int,
        micro_batches: int,
        *,
        loss_factor: float = 1.0,
        every: int = EVERY,
        group: AnyGroup | None = None,
    ) -> None:
        if micro_batches < 2:
            raise UserError(
                f"micro_batches: the noise is a difference between at least 2 of a step, got {micro_batches}"
            )
        if min(samples, every) < 1 or not loss_factor > 0:
            wanted = "samples and every are 1 at least, loss_factor is above 0"
            raise UserError(f"NoiseScale: {wanted}; got {samples}, {every} and {loss_factor}")
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._samples, self._micro_batches, self._loss_factor = samples, micro_batches, loss_factor
        self._every, self._steps = every, 0
        self._ranks = group_of(group, self._parameters[0].device)
        self._squares: list[Tensor] = []
        self._estimate = NoiseEstimate()
        for parameter in self._parameters:
            parameter.register_hook(self._take)

    @property
    def value(self) -> float | None:
        """Samples; None if nothing has been measured, or the noise hides the gradient."""
        return self._estimate.value

    @torch.no_grad()
    def step(self) -> bool:
        """Counts a step, and measures if it is time; returns whether. Before the optimizer's step and any clipping."""
        is_measured = self._is_measured()
        self._steps += 1
        if not is_measured:
            return False
        small = float(exact_all_reduce(self._squares, self._ranks)) / self._micro_batches / self._loss_factor**2
        self._squares = []
        mean = math.fsum(float(_square(p.grad)) for p in self._parameters if p.grad is not None)
        if not 0.0 < small < math.inf or not mean < math.inf:
            return False
        self._estimate.add(small, mean, self._samples, self._samples * self._micro_batches)
        return True

    def _is_measured(self) -> bool:
        return self._steps % self._every == self._every // 2

    @torch.no_grad()
    def _take(self, gradient: Tensor) -> None:
        # A hook of the tensor is given this pass's gradient, before autograd adds it to `.grad`.
        if self._is_measured():
            self._squares.append(_square(gradient))


def _square(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient.detach().float()).double().square()
