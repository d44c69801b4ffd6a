"""Which classes a network takes for which: counted image by image, summed over ranks as integers."""

import torch
from torch import Tensor

from ..comm.base import AllReduce


class Confusion:
    """Counts of images by their class and by the class with the highest logit.

    Args:
        classes: C.
        device: Of the counts.

    >>> confusion = Confusion(3, torch.device("cpu"))
    >>> confusion.add(torch.tensor([[9.0, 0.0, 1.0], [9.0, 0.0, 1.0]]), torch.tensor([0, 2]))
    >>> confusion.counts.tolist()
    [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    >>> confusion.accuracies()
    [1.0, None, 0.0]
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        """int64 [C, C]: row, the class of the image; column, the class that the network chose"""

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Counts images, by logits [n, C] and targets [n]; of equal logits the lower class wins, as in top-1.

        An image whose logits hold a nan is wrong in top-1, and is counted as the class after its own.
        """
        classes = len(self.counts)
        chosen = torch.where(logits.isnan().any(dim=1), (targets + 1) % classes, logits.argmax(dim=1))
        self.counts += torch.bincount(targets * classes + chosen, minlength=classes**2).view_as(self.counts)

    def sum_over_ranks(self, allreduce: AllReduce) -> None:
        """Adds the counts of all ranks; every rank calls it."""
        flat = self.counts.view(-1)
        allreduce.start(flat).wait()

    def accuracies(self) -> list[float | None]:
        """Of each class the fraction of its images that are right; None without images."""
        rights, images = self.counts.diagonal().tolist(), self.counts.sum(dim=1).tolist()
        return [right / count if count else None for right, count in zip(rights, images, strict=True)]
