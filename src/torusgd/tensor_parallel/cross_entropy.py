"""Label-smoothed cross-entropy over classes in column blocks, without bringing the logits together.

Of each block and image four numbers are enough: the largest logit, the sum of exponentials under it, the sum of logits
and the target's logit. The ranks exchange those, join them in float64, and each computes its own columns' gradient.
(torch's `loss_parallel` takes no label smoothing.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUMBERS = 4


@dataclass(frozen=True)
class Joined:
    """What all blocks together say of a virtual worker's images."""

    loss: Tensor
    """float32 []: the mean over images"""
    largest: Tensor
    """float32 (images, 1): the largest logit"""
    exponentials: Tensor
    """float32 (images, 1): the sum of exp(logit - largest) over all classes"""


def block_numbers(logits: Tensor, low: int, targets: Tensor) -> Tensor:
    """The four numbers of one block.

    Args:
        logits: float32 (images, columns), classes low and up.
        low: The block's first class.
        targets: int64 (images).

    Returns:
        float64 (images, 4): the largest logit, the sum of exp(logit - largest), the sum of logits, and the target's
        logit, or 0 where the target is in another block.
    """
    largest = logits.amax(dim=1, keepdim=True)
    exponentials = torch.exp(logits - largest).sum(dim=1, dtype=torch.float64)
    places = (targets - low).clamp(0, logits.shape[1] - 1)
    is_here = (targets >= low) & (targets < low + logits.shape[1])
    found = torch.where(is_here, logits.gather(1, places[:, None])[:, 0], 0.0)
    return torch.stack(
        [largest[:, 0].double(), exponentials, logits.sum(dim=1, dtype=torch.float64), found.double()], dim=1
    )


def join(numbers: Tensor, classes: int, smoothing: float) -> Joined:
    """The loss from the numbers of all blocks.

    Args:
        numbers: float64 (blocks, images, 4), in block order.
        classes: Of all blocks together.
        smoothing: Share of the target spread evenly over all classes.
    """
    largest = numbers[..., 0].amax(dim=0)
    exponentials = (numbers[..., 1] * torch.exp(numbers[..., 0] - largest)).sum(dim=0)
    logits, target = numbers[..., 2].sum(dim=0), numbers[..., 3].sum(dim=0)
    each = largest + exponentials.log() - (1 - smoothing) * target - smoothing / classes * logits
    return Joined(each.mean().float(), largest.float()[:, None], exponentials.float()[:, None])


def block_gradient(
    logits: Tensor, low: int, targets: Tensor, joined: Joined, classes: int, smoothing: float, scale: float
) -> Tensor:
    """The gradient of scale * loss in the logits of one block: float32, of their shape."""
    gradient = torch.exp(logits - joined.largest) / joined.exponentials - smoothing / classes
    is_here = (targets >= low) & (targets < low + logits.shape[1])
    places = (targets - low).clamp(0, logits.shape[1] - 1)
    gradient.scatter_add_(1, places[:, None], torch.where(is_here, smoothing - 1.0, 0.0)[:, None])
    return gradient.mul_(scale / len(targets))
