"""Forward and backward through the column blocks of a network's tail, on the ranks of a group together.

Each rank brings one virtual worker at a time. For each layer the ranks of a group hand each other the inputs, so that
every one has the inputs of all its group's virtual workers; each computes its own column blocks of them. Every tensor
that a kernel sees is that of one virtual worker and one column block, in memory of its own, and the input gradients are
added as a tree over column blocks: so the bits are the same for any number of ranks in a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..precision import Precision
from ..rng import DROPOUT, keyed_hash
from .cross_entropy import NUMBERS, Joined, block_gradient, block_numbers, join
from .layout import OWN, Groups, Layout, Passage, Piece, Pieces, Transfer, joined, sum_in_tree, total
from .tail import ColumnLayer, ColumnTail

Sink = Callable[[int, int, Tensor, Tensor | None], None]
"""takes a layer's number, a column block's, and the gradients of its weight and bias by one virtual worker (float32)"""


@dataclass
class _Kept:
    """What a layer's forward pass keeps for its backward pass."""

    inputs: dict[int, Tensor]
    """by virtual worker: (images, inputs)"""
    weights: dict[int, Tensor]
    """by block, in the dtype of the product"""
    products: Pieces
    outputs: Pieces
    """of the elementwise modules, with their graph back to the products"""


class ColumnPass:
    """The tail's part of a step on this rank: for each virtual worker `begin`, `forward`, `backward`.

    Args:
        tail: The layers.
        parts: Model-parallel ranks of each layer.
        rank: This one.
        groups: For these parts.
        precision: Of the products.
        smoothing: Of the labels.
        seed: The recipe's.
        sink: Takes the gradients of this rank's column blocks, those of the whole group's virtual workers.
    """

    def __init__(
        self,
        tail: ColumnTail,
        parts: Sequence[int],
        rank: int,
        groups: Groups,
        precision: Precision,
        smoothing: float,
        seed: int,
        sink: Sink,
    ) -> None:
        self._layers, self._rank, self._precision = tail.layers, rank, precision
        self._smoothing, self._seed, self._sink = smoothing, seed, sink
        blocks = len(tail.layers[0].blocks)
        self.layouts = [Layout(m, blocks) for m in parts]
        before = [OWN, *self.layouts[:-1]]
        self._passages = [Passage(a, b, rank, groups) for a, b in zip(before, self.layouts, strict=True)]
        last = self.layouts[-1]
        self._to_targets = Passage(OWN, last, rank, groups)
        self._to_numbers = Passage(last, last, rank, groups)
        self._kept: list[_Kept] = []
        self._targets: Transfer | None = None
        self._labels: dict[int, Tensor] = {}
        self._joined: dict[int, Joined] = {}
        self._inputs: Tensor | None = None

    def begin(self, targets: Tensor) -> None:
        """Sends the labels of this rank's virtual worker (int64, (images)) ahead."""
        self._targets = self._to_targets.spread({Piece(self._rank, 0): targets[:, None]}, [1])

    def forward(self, inputs: Tensor, step: int, workers: Callable[[int], int]) -> Tensor:
        """The loss of this rank's virtual worker, float32 [].

        Args:
            inputs: What the front gives for it, (images, features), with its graph.
            step: Number of the step.
            workers: From a rank to the number of its virtual worker in this pass, for dropout's keys.
        """
        assert inputs.dim() == 2, inputs.shape
        self._inputs = inputs
        self._kept = []
        dtype = self._precision.dtype
        held: Pieces = {Piece(self._rank, 0): inputs.detach().to(dtype)}
        widths = [inputs.shape[1]]
        for number, layer in enumerate(self._layers):
            arrived = joined(self._passages[number].spread(held, widths).wait())
            kept = self._products(layer, self.layouts[number], arrived, dtype)
            self._kept.append(kept)
            for piece, product in kept.products.items():
                kept.outputs[piece] = self._elementwise(
                    layer, product, (step, workers(piece.owner), number, piece.block)
                )
            held = {piece: output.detach().to(dtype) for piece, output in kept.outputs.items()}
            widths = [block.high - block.low for block in layer.blocks]
        assert self._targets is not None
        self._labels = {owner: labels[:, 0] for owner, labels in joined(self._targets.wait()).items()}
        return self._losses()

    def _products(self, layer: ColumnLayer, layout: Layout, inputs: dict[int, Tensor], dtype: torch.dtype) -> _Kept:
        blocks = {block: layer.blocks[block] for block in layout.held(self._rank)}
        weights = {number: block.weight.to(dtype) for number, block in blocks.items()}
        biases = {number: None if b.bias is None else b.bias.to(dtype) for number, b in blocks.items()}
        products = {
            Piece(owner, block): F.linear(x, weights[block], biases[block])
            for owner, x in inputs.items()
            for block in blocks
        }
        return _Kept(inputs, weights, products, {})

    def _elementwise(self, layer: ColumnLayer, product: Tensor, key: tuple[int, ...]) -> Tensor:
        if any(isinstance(module, nn.Dropout) for module in layer.after):
            torch.manual_seed(int(keyed_hash(DROPOUT, self._seed, *key)) >> 1)
        with torch.enable_grad(), self._precision.autocast():
            output: Tensor = layer.after(product.requires_grad_())
        return output

    def _losses(self) -> Tensor:
        """Joins the blocks' numbers; the loss of this rank's own virtual worker."""
        layer, kept = self._layers[-1], self._kept[-1]
        numbers = {
            piece: block_numbers(logits.detach().float(), layer.blocks[piece.block].low, self._labels[piece.owner])
            for piece, logits in kept.outputs.items()
        }
        arrived = joined(self._to_numbers.spread(numbers, [NUMBERS] * len(layer.blocks)).wait())
        self._joined = {}
        for owner, rows in arrived.items():
            by_block = rows.view(len(rows), -1, NUMBERS).transpose(0, 1).contiguous()
            self._joined[owner] = join(by_block, layer.outputs, self._smoothing)
        return self._joined[self._rank].loss

    def backward(self) -> None:
        """Hands the gradients to the sink, and goes back through the front's graph."""
        gradients = self._loss_gradients()
        assert self._inputs is not None
        for number in reversed(range(len(self._layers))):
            layer, kept = self._layers[number], self._kept.pop()
            through = {piece: self._before(layer, kept, piece, g) for piece, g in gradients.items()}
            transfer = None
            if number or self._inputs.requires_grad:
                transfer = self._send_back(number, kept, through)
            # While those travel: the weights' gradients.
            for piece, gradient in through.items():
                weight = torch.mm(gradient.t(), kept.inputs[piece.owner]).float()
                bias = gradient.sum(dim=0).float() if layer.blocks[piece.block].bias is not None else None
                self._sink(number, piece.block, weight, bias)
            gradients = total(transfer.wait()) if transfer is not None else {}
        if gradients:
            self._inputs.backward(gradients[Piece(self._rank, 0)].to(self._inputs.dtype))
        self._inputs = None

    def _loss_gradients(self) -> Pieces:
        layer, scale = self._layers[-1], self._precision.loss_scale
        return {
            piece: block_gradient(
                logits.detach().float(),
                layer.blocks[piece.block].low,
                self._labels[piece.owner],
                self._joined[piece.owner],
                layer.outputs,
                self._smoothing,
                scale,
            )
            for piece, logits in self._kept[-1].outputs.items()
        }

    def _before(self, layer: ColumnLayer, kept: _Kept, piece: Piece, gradient: Tensor) -> Tensor:
        """Back through the elementwise modules, to the product."""
        output, product = kept.outputs.pop(piece), kept.products.pop(piece)
        gradient = gradient.to(output.dtype)
        if len(layer.after):
            (gradient,) = torch.autograd.grad(output, product, gradient)
        return gradient

    def _send_back(self, number: int, kept: _Kept, through: Pieces) -> Transfer:
        """This rank's part of the input gradients: the tree over its own blocks, cut as the layer before is."""
        passage, inputs = self._passages[number], self._layers[number].inputs
        spans = [(b.low, b.high) for b in self._layers[number - 1].blocks] if number else [(0, inputs)]
        partials = {}
        for owner in kept.inputs:
            blocks = self.layouts[number].held(self._rank)
            part = sum_in_tree(torch.mm(through[Piece(owner, b)], kept.weights[b]).float() for b in blocks)
            for block, (low, high) in enumerate(spans):
                partials[Piece(owner, block)] = part[:, low:high]
        return passage.collect(partials, [high - low for low, high in spans])
