"""Forward and backward through the column blocks of a network's tail, on the ranks of a group together.

Each rank brings one virtual worker at a time. For each layer the ranks of a group exchange the inputs, so that every
one has the inputs of all its group's virtual workers; each computes its own column blocks of them. Every tensor that a
kernel sees is that of one virtual worker and one column block, in memory of its own, and the input gradients are added
as a tree over column blocks: so the bits are the same for any number of ranks in a group.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..precision import Precision
from ..rng import DROPOUT, seed_torch
from .exchange import OWN, ActivationBlock, ActivationBlocks, Exchange, Transfer, join_columns, sum_addends, sum_in_tree
from .tail import ColumnLayer, ParallelTail

NUMBERS = 4
# Function of a layer, a column block, and the gradients of its weight and bias by one virtual worker (float32)
Sink = Callable[[int, int, Tensor, Tensor | None], None]


class Joined(NamedTuple):
    """The loss of a virtual worker, and the sums over all blocks that gradients need."""

    loss: Tensor  # float32 []: the mean over images
    largest: Tensor  # float32 (images, 1): the largest logit
    exponentials: Tensor  # float32 (images, 1): the sum of exp(logit - largest) over all classes


def block_numbers(logits: Tensor, low: int, targets: Tensor) -> Tensor:
    """The four numbers of one block: float64 (images, 4)."""
    # The loss is a label-smoothed cross-entropy over classes in column blocks, without bringing the logits together
    # (torch's `loss_parallel` takes no label smoothing). Of each block and image four numbers are enough, which the
    # ranks exchange and join in float64: the largest logit, the sum of exp(logit - largest), the sum of logits, and the
    # target's logit, or 0 if the target is in another block. `logits` are float32 (images, columns) of the classes
    # `low` and up, `targets` int64 (images).
    largest = logits.amax(dim=1, keepdim=True)
    # Under the block's own largest logit, so that no exponential overflows; `join` scales it to the largest of all.
    exponentials = torch.exp(logits - largest).sum(dim=1, dtype=torch.float64)
    columns, is_here = _target_columns(logits, low, targets)
    found = torch.where(is_here, logits.gather(1, columns[:, None])[:, 0], 0.0)
    return torch.stack(
        [largest[:, 0].double(), exponentials, logits.sum(dim=1, dtype=torch.float64), found.double()], dim=1
    )


def _target_columns(logits: Tensor, low: int, targets: Tensor) -> tuple[Tensor, Tensor]:
    # The column of each image's target, clamped into the block, and whether it is in the block.
    width = logits.shape[1]
    return (targets - low).clamp(0, width - 1), (targets >= low) & (targets < low + width)


def join(numbers: Tensor, classes: int, smoothing: float) -> Joined:
    """The loss from the numbers of all blocks, float64 (blocks, images, 4) in block order."""
    # `classes` is the number in all blocks; `smoothing` is the fraction of the target that all classes divide evenly.
    # The same values in the same order on every rank: so all ranks of a group compute the same loss to the last bit.
    largest = numbers[..., 0].amax(dim=0)
    exponentials = (numbers[..., 1] * torch.exp(numbers[..., 0] - largest)).sum(dim=0)
    logits, target = numbers[..., 2].sum(dim=0), numbers[..., 3].sum(dim=0)
    each = largest + exponentials.log() - (1 - smoothing) * target - smoothing / classes * logits
    return Joined(each.mean().float(), largest.float()[:, None], exponentials.float()[:, None])


def block_gradient(
    logits: Tensor, low: int, targets: Tensor, joined: Joined, classes: int, smoothing: float, scale: float
) -> Tensor:
    """The gradient of scale * loss in the logits of one block: float32, of their shape."""
    # softmax - smoothed one-hot target; a target in another block adds zero.
    gradient = torch.exp(logits - joined.largest) / joined.exponentials - smoothing / classes
    columns, is_here = _target_columns(logits, low, targets)
    gradient.scatter_add_(1, columns[:, None], torch.where(is_here, smoothing - 1.0, 0.0)[:, None])
    return gradient.mul_(scale / len(targets))


class _Saved(NamedTuple):
    """The tensors of a layer's forward pass that its backward pass needs."""

    # by virtual worker; by block, in the dtype of the product
    inputs: dict[int, Tensor]
    weights: dict[int, Tensor]
    products: ActivationBlocks
    # of the elementwise modules, with their graph back to the products
    outputs: ActivationBlocks


class ColumnPass:
    """The tail's passes of a step on this rank: for each virtual worker `begin`, `forward`, `backward`.

    `sink` takes the gradients of this rank's column blocks, by the virtual workers of the whole group. `smoothing` is
    that of the labels, `seed` the recipe's.
    """

    def __init__(self, tail: ParallelTail, precision: Precision, smoothing: float, seed: int, sink: Sink) -> None:
        self._layers, self._layouts, self._rank = tail.tail.layers, tail.layouts, tail.groups.world.rank
        self._precision, self._smoothing, self._seed, self._sink = precision, smoothing, seed, sink
        self._exchanges = [Exchange(before, layout, tail.groups) for before, layout in pairwise([OWN, *tail.layouts])]
        self._to_targets = Exchange(OWN, tail.layouts[-1], tail.groups)
        self._to_numbers = Exchange(tail.layouts[-1], tail.layouts[-1], tail.groups)

    def begin(self, targets: Tensor) -> None:
        """Sends the labels of this rank's virtual worker (int64, (images)) ahead."""
        self._targets = self._to_targets.forward({ActivationBlock(self._rank, 0): targets[:, None]}, [1])

    def forward(self, inputs: Tensor, step: int, workers: Callable[[int], int]) -> Tensor:
        """The loss of this rank's virtual worker, from the front's outputs; `workers` are those of ranks."""
        assert inputs.dim() == 2, inputs.shape
        self._inputs, self._saved = inputs, list[_Saved]()
        dtype = self._precision.dtype
        held: ActivationBlocks = {ActivationBlock(self._rank, 0): inputs.detach().to(dtype)}
        widths = [inputs.shape[1]]
        for number, layer in enumerate(self._layers):
            arrived = join_columns(self._exchanges[number].forward(held, widths).wait())
            blocks = {block: layer.blocks[block] for block in self._layouts[number].held(self._rank)}
            weights = {index: block.weight.to(dtype) for index, block in blocks.items()}
            biases = {index: None if b.bias is None else b.bias.to(dtype) for index, b in blocks.items()}
            # One product a virtual worker and block, never one for several: its bits may follow the operands' shapes.
            products = {
                ActivationBlock(owner, index): F.linear(x, weights[index], biases[index])
                for owner, x in arrived.items()
                for index in blocks
            }
            # Dropout's key names the virtual worker, the layer and the block, never a rank: the same mask anywhere.
            outputs = {
                key: self._elementwise(layer, product, (step, workers(key.owner), number, key.block))
                for key, product in products.items()
            }
            self._saved.append(_Saved(arrived, weights, products, outputs))
            held = {key: output.detach().to(dtype) for key, output in outputs.items()}
            widths = [block.high - block.low for block in layer.blocks]
        self._labels = {owner: labels[:, 0] for owner, labels in join_columns(self._targets.wait()).items()}
        return self._losses()

    def _elementwise(self, layer: ColumnLayer, product: Tensor, key: tuple[int, ...]) -> Tensor:
        if any(isinstance(module, nn.Dropout) for module in layer.after):
            seed_torch(product.device, DROPOUT, self._seed, *key)
        with torch.enable_grad(), self._precision.autocast():
            output: Tensor = layer.after(product.requires_grad_())
        return output

    def _losses(self) -> Tensor:
        # Joins the blocks' numbers; the loss of this rank's own virtual worker.
        layer, saved = self._layers[-1], self._saved[-1]
        numbers = {
            key: block_numbers(logits.detach().float(), layer.blocks[key.block].low, self._labels[key.owner])
            for key, logits in saved.outputs.items()
        }
        arrived = join_columns(self._to_numbers.forward(numbers, [NUMBERS] * len(layer.blocks)).wait())
        by_block = {owner: rows.view(len(rows), -1, NUMBERS).transpose(0, 1) for owner, rows in arrived.items()}
        self._joined = {o: join(rows.contiguous(), layer.outputs, self._smoothing) for o, rows in by_block.items()}
        return self._joined[self._rank].loss

    def backward(self) -> None:
        """Gives the gradients to the sink, and goes back through the front's graph."""
        layer, scale = self._layers[-1], self._precision.loss_scale
        gradients = {
            key: block_gradient(
                logits.detach().float(), layer.blocks[key.block].low, self._labels[key.owner], self._joined[key.owner],
                layer.outputs, self._smoothing, scale,
            )
            for key, logits in self._saved[-1].outputs.items()
        }  # fmt: skip
        for number in reversed(range(len(self._layers))):
            layer, saved = self._layers[number], self._saved.pop()
            through = {key: self._before(layer, saved, key, g) for key, g in gradients.items()}
            transfer = None
            if number or self._inputs.requires_grad:
                transfer = self._send_back(number, saved, through)
            # The input gradients left first; the weights' gradients are computed while they travel.
            for key, gradient in through.items():
                weight = torch.mm(gradient.t(), saved.inputs[key.owner]).float()
                bias = gradient.sum(dim=0).float() if layer.blocks[key.block].bias is not None else None
                self._sink(number, key.block, weight, bias)
            gradients = sum_addends(transfer.wait()) if transfer is not None else {}
        if gradients:
            self._inputs.backward(gradients[ActivationBlock(self._rank, 0)].to(self._inputs.dtype))
        del self._inputs  # with the front's graph

    def _before(self, layer: ColumnLayer, saved: _Saved, key: ActivationBlock, gradient: Tensor) -> Tensor:
        # Back through the elementwise modules, to the product.
        output, product = saved.outputs.pop(key), saved.products.pop(key)
        gradient = gradient.to(output.dtype)
        if len(layer.after):
            (gradient,) = torch.autograd.grad(output, product, gradient)
        return gradient

    def _send_back(self, number: int, saved: _Saved, through: ActivationBlocks) -> Transfer:
        # This rank's addend of the input gradients: the tree over its own blocks, cut as the layer before is.
        exchange, inputs = self._exchanges[number], self._layers[number].inputs
        spans = [(b.low, b.high) for b in self._layers[number - 1].blocks] if number else [(0, inputs)]
        partials = {}
        for owner in saved.inputs:
            blocks = self._layouts[number].held(self._rank)
            own = sum_in_tree(torch.mm(through[ActivationBlock(owner, b)], saved.weights[b]).float() for b in blocks)
            for block, (low, high) in enumerate(spans):
                partials[ActivationBlock(owner, block)] = own[:, low:high]
        return exchange.backward(partials, [high - low for low, high in spans])
