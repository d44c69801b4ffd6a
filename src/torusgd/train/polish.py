"""Final Polishing, second form: exact batch-norm statistics over un-augmented images, with frozen weights.

Running averages lag behind the weights and come from augmented images. One pass over fixed batches gives every
batch-norm layer its population mean and variance, equal for any number of ranks. (Fujitsu's name, HPDC 2020; this
form, with exact sums, is ours. The first form is a last stage with `augment: false`.)
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm.allreduce import native
from ..comm.base import AllReduce
from ..comm.exact_sum import FULL, decode, encode
from ..comm.groups import Group
from ..data.pipeline import Pipeline
from ..models.freeze import is_frozen
from ..precision import Precision
from ..recipe.schema import Recipe
from .evaluate import read_ahead


@torch.no_grad()
def polish(model: nn.Module, batches: Iterable[Tensor], allreduce: AllReduce | None = None) -> int:
    """Sets the running statistics of every batch-norm layer that isn't frozen to those of the given images.

    Each layer normalises with the statistics of its batch, and gets mean = E[x] and variance = E[var] + Var[mean]
    over all batches, weighted by their sizes. Dropout is off; weights and the count of updates stay.

    Args:
        model: Any model; its mode is kept.
        batches: This rank's batches (n, c, h, w), on the model's device, of at least 2 images. Cut the images into
            the same batches on any number of ranks, and share these out in any way: the result is the same.
        allreduce: Sums over ranks; by default over all ranks of torch.distributed, if it is initialised.

    Returns:
        The number of images over all ranks.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    >>> polish(model, [torch.ones(4, 1, 5, 5)])
    4
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and not is_frozen(module)]
    layers = [layer for layer in norms if isinstance(layer.running_mean, Tensor)]
    was_training = {module: module.training for module in model.modules()}
    momenta = [layer.momentum for layer in layers]
    tracked = [layer.num_batches_tracked.clone() if layer.num_batches_tracked is not None else None for layer in layers]
    device = next(model.parameters()).device
    sums = [torch.zeros(FULL.rows, 3, layer.num_features, dtype=torch.int64, device=device) for layer in layers]
    counts = torch.zeros(len(layers) + 1, dtype=torch.int64, device=device)

    def add(index: int, module: nn.Module, inputs: tuple[Tensor]) -> None:
        x = inputs[0].float()
        dims = [0, *range(2, x.dim())]
        variance, mean = torch.var_mean(x, dims, correction=0)
        number = x.numel() // x.shape[1]
        mean, variance = mean.double(), variance.double()
        sums[index] += encode(torch.stack([mean * number, mean.square() * number, variance * number]))
        counts[index] += number

    handles = [layer.register_forward_pre_hook(partial(add, i)) for i, layer in enumerate(layers)]
    try:
        model.eval()
        for layer in layers:
            layer.train()
            layer.momentum = 0.0
        for batch in batches:
            model(batch)
            counts[-1] += len(batch)
    finally:
        for handle in handles:
            handle.remove()
        for layer, momentum, count in zip(layers, momenta, tracked, strict=True):
            layer.momentum = momentum
            if count is not None and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(count)
        for module, mode in was_training.items():
            module.training = mode
    message = torch.cat([counts, *(s.reshape(-1) for s in sums)])
    (allreduce or native()).start(message).wait()
    offset = len(counts)
    for index, layer in enumerate(layers):
        part = message[offset : offset + sums[index].numel()].view_as(sums[index])
        offset += part.numel()
        mean, square, variance = decode(part) / message[index]
        assert isinstance(layer.running_mean, Tensor)
        assert isinstance(layer.running_var, Tensor)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance + (square - mean.square()).clamp(min=0))
    return int(message[len(counts) - 1])


def polish_by_recipe(
    model: nn.Module,
    pipeline: Pipeline,
    recipe: Recipe,
    world: Group,
    allreduce: AllReduce,
    precision: Precision,
    progress: Callable[[int], object] = lambda batch: None,
) -> int:
    """Polishes over the training images that a recipe names, in index order, batch i on rank i mod N.

    Args:
        model: As for `polish`.
        pipeline: Of the training images.
        recipe: Its `polish` section says how many images, and how many in a batch; without one, all images in
            batches of the last stage's images per worker.
        world: All ranks.
        allreduce: Sums over ranks.
        precision: As in training.
        progress: Called before every batch with its place among this rank's.

    Returns:
        The number of images over all ranks.
    """
    settings = recipe.polish
    count = min((settings and settings.images) or len(pipeline.source), len(pipeline.source))
    size = (settings and settings.images_per_batch) or recipe.stages[-1].images_per_worker
    cuts = [*range(0, count, size), count]
    # An image alone has no variance where a layer sees one pixel: the last one joins the batch before.
    if count - cuts[-2] == 1 and len(cuts) > 2:
        del cuts[-2]
    chunks = [np.arange(start, stop) for start, stop in pairwise(cuts)]
    batches = read_ahead(pipeline, chunks[world.rank :: world.size], progress)
    with precision.autocast():
        return polish(model, (precision.place(batch.images, world.device) for batch in batches), allreduce)
