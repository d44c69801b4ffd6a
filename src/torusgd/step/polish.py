"""Final Polishing, second form: exact batch-norm statistics over un-augmented images, with frozen weights.

Running averages lag behind the weights and come from augmented images. One pass over fixed batches gives every layer
its population mean and variance, equal for any number of ranks. (Fujitsu's name, HPDC 2020; exact sums are ours. The
first form is a last stage with `augment: false`.) Or the averages go on for some forward passes alone, `refresh`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, islice, pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel

from ..comm.allreduce import NativeAllReduce
from ..comm.base import AllReduce
from ..comm.exact_sum import FULL, decode, encode
from ..comm.groups import Group
from ..data.pipeline import Batch, Pipeline
from ..data.to_device import place
from ..precision import Precision
from ..recipe.data_schema import Polish
from ..recipe.schema import Recipe
from ..runtime import loader_threads
from .batchnorm import learning_layers
from .evaluate import Indices, read_ahead

# Torch's, and that of the built-in networks, if the recipe gives none.
_USUAL_MOMENTUM = 0.1


@torch.no_grad()
def polish(
    model: nn.Module, batches: Iterable[Tensor | Mapping[str, Tensor]], allreduce: AllReduce | None = None
) -> int:
    """Sets the running statistics of every batch-norm layer that isn't frozen to those of the given images.

    Each layer normalises with the statistics of its batch, and gets mean = E[x] and variance = E[var] + Var[mean]
    over all batches, weighted by their sizes. Dropout is off; weights, the count of updates and the statistics of a
    layer that the forward pass doesn't use stay.

    Args:
        model: Any model, in DistributedDataParallel or not; its mode stays.
        batches: This rank's batches (n, c, h, w), on the model's device, of at least 2 images; or mappings of the
            model's inputs by name. Cut the images into the same batches on any number of ranks, and share these out in
            any way: the result is the same.
        allreduce: Sums over ranks; by default over all ranks of torch.distributed, if it is initialised.

    Returns:
        The number of images over all ranks.

    Raises:
        ValueError: No rank has an image, as of a generator that is used up; a batch is neither a tensor nor a mapping;
            an instance norm keeps statistics; or a batch norm is scripted or traced.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    >>> polish(model, [torch.ones(4, 1, 5, 5)])
    4
    """
    # DistributedDataParallel's own forward is a collective, and ranks have other numbers of batches.
    model = model.module if isinstance(model, DistributedDataParallel) else model
    for name, module in model.named_modules():
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise ValueError(f"polish: {name} keeps statistics of single images; give it track_running_stats=False")
        if isinstance(module, torch.jit.ScriptModule) and getattr(module, "running_mean", None) is not None:
            raise ValueError(f"polish: {name} is of torch.jit, which shows no batches; polish the model before that")
    layers = [*learning_layers(model).values()]
    device = next(model.parameters(), torch.empty(0)).device
    sums = [torch.zeros(FULL.rows, 3, layer.num_features, dtype=torch.int64, device=device) for layer in layers]
    counts = torch.zeros(len(layers) + 1, dtype=torch.int64, device=device)

    def add(index: int, mean: Tensor, variance: Tensor, number: int) -> None:
        sums[index] += encode(torch.stack([mean * number, mean.square() * number, variance * number]))
        counts[index] += number

    with _watched(model, layers, add):
        for batch in batches:
            counts[-1] += _forward(model, batch)
    message = torch.cat([counts, *(s.reshape(-1) for s in sums)])
    (allreduce or NativeAllReduce()).start(message).wait()
    (*of_layers, images), *parts = message.split([len(counts), *(s.numel() for s in sums)])
    if not images:
        raise ValueError("polish: no images on any rank; give batches, and a new generator in place of one that ended")
    for layer, count, part, own in zip(layers, of_layers, parts, sums, strict=True):
        if count:  # else no image has reached it
            mean, square, variance = decode(part.view_as(own)) / count
            layer.get_buffer("running_mean").copy_(mean)
            layer.get_buffer("running_var").copy_(variance + (square - mean.square()).clamp(min=0))
    return int(images)


def _forward(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> int:
    """Passes a batch forward; the number of its images."""
    if not isinstance(batch, Tensor | Mapping):
        remedy = "give the images alone, as (x for x, y in loader)"
        raise ValueError(f"polish: a batch of type {type(batch).__name__}; {remedy}")
    named = batch if isinstance(batch, Mapping) else None
    number = len(batch if named is None else next(iter(named.values()), ()))
    if number:  # nothing is left of one that can't be decoded, and its mean would be nan
        model(batch) if named is None else model(**named)
    return number


@torch.no_grad()
def refresh(model: nn.Module, steps: Iterable[Sequence[Tensor]], momentum: float, allreduce: AllReduce) -> int:
    """Lets the running statistics go on as in training, over steps of this rank's batches; the images of all ranks."""
    layers, device = [*learning_layers(model).values()], next(model.parameters()).device
    edges = [0, *accumulate(2 * layer.num_features for layer in layers)]
    sums = torch.zeros(FULL.rows, edges[-1] + 2, dtype=torch.int64, device=device)

    def add(index: int, mean: Tensor, variance: Tensor, number: int) -> None:
        unbiased = variance * (number / max(number - 1, 1))
        sums[:, edges[index] : edges[index + 1]] += encode(torch.cat([mean, unbiased]))

    images = 0
    for batches in steps:
        sums.zero_()
        with _watched(model, layers, add):
            for batch in filter(len, batches):
                model(batch)
                sums[:, -2:] += encode(torch.tensor([len(batch), 1.0], dtype=torch.float64, device=device))
        allreduce.start(sums.view(-1)).wait()
        means = decode(sums)
        seen, taken = means[-2:].tolist()
        images += int(seen)
        for layer, low in zip(layers, edges, strict=False) if taken else ():
            for key, first in (("running_mean", low), ("running_var", low + layer.num_features)):
                buffer, mean = layer.get_buffer(key), means[first : first + layer.num_features] / taken
                buffer.mul_(1 - momentum).add_((momentum * mean).to(buffer.dtype))
    return images


@contextmanager
def _watched(
    model: nn.Module, layers: Sequence[_BatchNorm], add: Callable[[int, Tensor, Tensor, int], None]
) -> Iterator[None]:
    """Each layer normalises with its batch; `add` takes its index, mean, population variance, values a channel."""
    was_training = {module: module.training for module in model.modules()}
    momenta = [layer.momentum for layer in layers]
    tracked = [layer.num_batches_tracked.clone() if layer.num_batches_tracked is not None else None for layer in layers]

    def take(index: int, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        x = inputs[0] if inputs else named["input"]
        x = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        add(index, mean.double(), variance.double(), x.numel() // x.shape[1])

    handles = [layer.register_forward_pre_hook(partial(take, i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        model.eval()
        for layer in layers:
            layer.train()
            layer.momentum = 0.0
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, momentum, count in zip(layers, momenta, tracked, strict=True):
            layer.momentum = momentum
            if count is not None and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(count)
        for module, mode in was_training.items():
            module.training = mode


def polish_by_recipe(
    model: nn.Module,
    pipeline: Pipeline,
    recipe: Recipe,
    world: Group,
    allreduce: AllReduce,
    precision: Precision,
    progress: Callable[[int], object] = lambda batch: None,
) -> int:
    """Polishes over the images that a recipe names, in index order, batch i on rank i mod N; their number."""
    settings = recipe.polish or Polish()
    count = min(settings.images or len(pipeline.source), len(pipeline.source))
    size = settings.images_per_batch or recipe.stages[-1].images_per_worker

    def prepare(chunk: Indices) -> Batch:
        if settings.augment:
            return pipeline.training_batch(chunk, np.zeros_like(chunk), augment=True)
        return pipeline.validation_batch(chunk)

    def batches(chunks: Iterable[Indices]) -> Iterator[Tensor]:
        for batch in read_ahead(prepare, chunks, loader_threads(world.device), progress):
            yield place(batch, world.device, precision.memory_format)

    with precision.autocast():
        if settings.steps is None:
            cuts = [*range(0, count, size), count]
            # An image alone has no variance where a layer sees one pixel: the last one joins the batch before.
            if count - cuts[-2] == 1 and len(cuts) > 2:
                del cuts[-2]
            chunks = [np.arange(start, stop) for start, stop in pairwise(cuts)]
            return polish(model, batches(chunks[world.rank :: world.size]), allreduce)
        # Virtual worker w of step s takes the (s * V + w)-th batch of the images in index order, again and again. If
        # each has an average of its own, only the first one's is wanted.
        workers = recipe.virtual_workers if recipe.model.batch_norm_workers == "all" else 1
        mine = range(world.rank, workers, world.size)
        firsts = ((step * recipe.virtual_workers + worker) * size for step in range(settings.steps) for worker in mine)
        images = batches((first + np.arange(size)) % count for first in firsts)
        steps = (list(islice(images, len(mine))) for _ in range(settings.steps))
        return refresh(model, steps, recipe.model.batch_norm_momentum or _USUAL_MOMENTUM, allreduce)
