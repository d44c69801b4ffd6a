"""What a pass by portable arithmetic costs here, measured on a network of its kind before step 0."""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..arithmetic import fastest_method, portable
from ..data.pipeline import Batch
from ..models.registry import model_of
from ..recipe.schema import Recipe
from ..step.forward_backward import loss_of

# As many as two images of 224 x 224, so that a large network is measured in seconds.
_PIXELS = 2 * 224 * 224
_PASSES = 3


def price(recipe: Recipe, classes: int, device: torch.device) -> str:
    """A line that says by which method products go, and the time of a pass over float32's."""
    height, width = recipe.data.sizes.sides
    count = min(recipe.stages[0].images_per_worker, max(2, _PIXELS // (height * width)))
    with torch.random.fork_rng(devices=[]):  # anew, for the run's own has hooks that send its gradients
        trial = model_of(recipe, classes).to(device).train()
    images = torch.zeros(count, recipe.data.channels, height, width, device=device)
    images.view(count, -1)[:, ::3] = 1.0
    labels = torch.zeros(count, dtype=torch.int64, device=device)
    batch = Batch(images, labels, np.arange(count), 0)

    def one() -> None:
        loss_of(recipe, trial(images), labels, batch).backward()

    with torch.random.fork_rng(devices=[]), _disable_current_modes():
        theirs = _seconds(one, device)
        with portable():
            ours, method = _seconds(one, device), fastest_method(device)
    return (
        f"portable arithmetic: products by {method}; a pass of {count} images takes about {ours / theirs:.1f} times "
        f"float32's ({1e3 * ours:.1f} ms for {1e3 * theirs:.1f})"
    )


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """The shortest of a few times; the first one, which tries methods, is not among them."""
    found = []
    # Processor time, so that other work on the machine counts less; a GPU's own time is that of the clock.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for _ in range(1 + _PASSES):
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(clock() - start)
    return min(found[1:])
