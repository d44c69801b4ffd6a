"""The pass through column blocks: on a group of ranks it has the bits of each virtual worker alone."""

from collections import defaultdict
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.gloo_world import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from torusgd.comm.groups import Group, group_of
from torusgd.comm.groups import alone as rank_alone
from torusgd.precision import Precision
from torusgd.recipe.load import load_recipe
from torusgd.tensor_parallel.column_pass import ColumnPass, block_gradient, block_numbers, join
from torusgd.tensor_parallel.exchange import Layout
from torusgd.tensor_parallel.tail import ColumnTail, ParallelTail, column_tail, cut_columns

BLOCKS, RANKS, SMOOTHING, SEED = 8, 4, 0.1, 5
# 12 and 10 outputs in 8 blocks are uneven.
WIDTHS = (24, 12, 10)
PARTS = [(1, 1, 1), (2, 2, 2), (4, 4, 4), (4, 2, 1), (1, 4, 2), (2, 4, 4)]


def network(front: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten()] if front else [nn.Flatten()]
    inputs = 2 * 5 * 5 if front else 25
    return nn.Sequential(
        *first, nn.Linear(inputs, WIDTHS[0]), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Linear(WIDTHS[0], WIDTHS[1], bias=False), nn.Sigmoid(), nn.Linear(WIDTHS[1], WIDTHS[2]),
    )  # fmt: skip


def images(owner: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + owner)
    return torch.randn(3, 1, 5, 5, generator=draw), torch.randint(WIDTHS[2], (3,), generator=draw)


def precision(name: str) -> Precision:
    recipe = load_recipe("digits").recipe
    return Precision(recipe.model_copy(update={"precision": name, "memory_format": "contiguous"}), torch.device("cpu"))


class Recorded:
    """What a pass gave: the loss, the tail's gradients by (layer, block) in order, and the first weight's gradient."""

    def __init__(
        self, model: nn.Sequential, how: Precision, parts: tuple[int, ...] = (1, 1, 1), world: Group | None = None
    ) -> None:
        self.gradients = defaultdict[tuple[int, int], list[tuple[Tensor, Tensor]]](list)
        self.tail: ColumnTail = column_tail(model, BLOCKS)
        self.columns = ParallelTail(model, self.tail, parts, world or rank_alone())
        self.model, self.how, self.rank = model, how, self.columns.groups.world.rank
        self.passing = ColumnPass(self.columns, how, SMOOTHING, SEED, self._take)

    def _take(self, layer: int, block: int, weight: Tensor, bias: Tensor | None) -> None:
        self.gradients[layer, block].append((weight, torch.empty(0) if bias is None else bias))

    def run(self, worker: int) -> tuple[Tensor, Tensor]:
        """The loss, and the gradient of the convolution in front of the tail; without one an empty tensor."""
        x, targets = images(worker)
        self.passing.begin(targets)
        with self.how.autocast():
            features = self.tail.front(x)
        loss = self.passing.forward(features, step=3, workers=lambda rank: worker - self.rank + rank)
        self.passing.backward()
        first = self.model[0]
        grad = first.weight.grad if isinstance(first, nn.Conv2d) else torch.empty(0)
        assert grad is not None
        first.zero_grad()
        return loss, grad


@on_ranks(RANKS)
def test_groups_of_any_size_have_the_bits_of_one_rank() -> None:
    compare("float32", front=True)
    compare("bfloat16", front=True)
    compare("float32", front=False)


def compare(name: str, front: bool) -> None:
    world, how, model = group_of(), precision(name), network(front)
    rank = world.rank
    alone = []
    for owner in range(RANKS):
        one = Recorded(model, how)
        alone.append((*one.run(owner), one.gradients))
    for parts in PARTS:
        both = Recorded(model, how, parts, world)
        loss, grad = both.run(rank)
        assert torch.equal(loss, alone[rank][0]), (parts, loss, alone[rank][0])
        assert (grad.numel() > 0) == front
        assert torch.equal(grad, alone[rank][1]), parts
        expected = {
            (layer, block): [gradient for owner in layout.owners(rank) for gradient in alone[owner][2][layer, block]]
            for layer, layout in enumerate(Layout(m, BLOCKS) for m in parts)
            for block in layout.held(rank)
        }
        assert both.gradients.keys() == expected.keys()
        for key, found in both.gradients.items():
            for pair, same in zip(found, expected[key], strict=True):
                assert all(map(torch.equal, pair, same)), (parts, key)
        both.columns.close()


def test_the_pass_is_the_network() -> None:
    """Against autograd through the network itself, without dropout."""
    model = network()
    assert isinstance(model[5], nn.Dropout)
    model[5].p = 0.0
    x, targets = images(0)
    F.cross_entropy(model(x), targets, label_smoothing=SMOOTHING).backward()
    want: dict[str, Any] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    one = Recorded(model, precision("float32"))
    _, first = one.run(0)
    torch.testing.assert_close(first, want["0.weight"])
    for number, layer in enumerate(one.tail.layers):
        found = [one.gradients[number, block][0] for block in range(BLOCKS)]
        weight, bias = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        torch.testing.assert_close(weight, want[f"{layer.name}.weight"])
        torch.testing.assert_close(bias, want.get(f"{layer.name}.bias", torch.empty(0)))


def test_dropout_depends_on_worker_layer_and_block() -> None:
    model = network()
    losses = set()
    for worker in (0, 8):  # the same images, of two virtual workers
        one = Recorded(model, precision("float32"))
        x, targets = images(0)
        one.passing.begin(targets)
        losses.add(one.passing.forward(one.tail.front(x), step=3, workers={0: worker}.__getitem__).item())
        dropped = [(output == 0).tolist() for output in one.passing._saved[0].outputs.values()]
        assert any(mask != dropped[0] for mask in dropped)
    assert len(losses) == 2


@settings(deadline=None, max_examples=40)
@given(
    images=st.integers(1, 5), classes=st.integers(2, 40), blocks=st.integers(1, 8), seed=st.integers(0, 9),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]), size=st.sampled_from([0.1, 10.0, 1e4]),
)  # fmt: skip
def test_loss_and_gradient_are_those_of_the_whole(
    images: int, classes: int, blocks: int, smoothing: float, size: float, seed: int
) -> None:
    blocks = min(blocks, classes)
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, classes, generator=draw) * size
    targets = torch.randint(classes, (images,), generator=draw)
    spans = cut_columns(classes, blocks)
    cut = [logits[:, low:high].contiguous() for low, high in spans]
    numbers = torch.stack([block_numbers(part, low, targets) for part, (low, _) in zip(cut, spans, strict=True)])
    joined = join(numbers, classes, smoothing)
    blocks_of_gradient = [
        block_gradient(part, low, targets, joined, classes, smoothing, scale=4.0)
        for part, (low, _) in zip(cut, spans, strict=True)
    ]
    whole = logits.double().requires_grad_()
    want = F.cross_entropy(whole, targets, label_smoothing=smoothing)
    want.backward()
    assert whole.grad is not None
    assert joined.loss.dtype == torch.float32
    torch.testing.assert_close(joined.loss.double(), want.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.cat(blocks_of_gradient, dim=1).double(), 4.0 * whole.grad, rtol=1e-5, atol=1e-6)


def test_a_logit_that_is_not_finite_shows_in_the_loss() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    assert join(block_numbers(logits, 0, torch.tensor([0, 1]))[None], 2, 0.0).loss.isnan()
