"""Rules against float64: layers forward and backward, free of method, layout, alignment and threads."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

from torusgd.arithmetic import portable
from torusgd.arithmetic.reductions import grid_sum, on_grid
from torusgd.arithmetic.rules import PASSING
from torusgd.comm.groups import group_of
from torusgd.errors import UserError

Function = Callable[..., Tensor]


def draws(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers by numpy: torch's own are others inside of the context."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def images(n: int = 3, c: int = 8, h: int = 11, w: int = 9) -> Tensor:
    return draws(n, c, h, w, seed=n * c)


def gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all inputs by a keyed gradient of it."""
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(draws(*out.shape, seed=9).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def multi_head(x: Tensor, inner: Tensor, outer: Tensor, mask: Tensor | None = None) -> Tensor:
    """As `nn.MultiheadAttention` calls it: torch chooses a kernel of its own."""
    out, _ = F.multi_head_attention_forward(
        x, x, x, x.shape[2], 2, inner, None, None, None, False, 0.0, outer, None, attn_mask=mask, need_weights=False
    )
    return out


QKV = [draws(2, 3, 5, 4, seed=n) for n in range(3)]
MODULE = [draws(5, 2, 8), draws(24, 8, seed=1), draws(8, 8, seed=2)]
MASK = torch.ones(5, 5, dtype=torch.bool).triu(1) | (torch.arange(5) == 2)[:, None]  # row 2 as a whole
LOGITS, LABELS = [draws(5, 9)], torch.tensor([1, 0, -100, 8, 3])
CASES: dict[str, tuple[Function, list[Tensor]]] = {
    "linear": (F.linear, [draws(5, 7), draws(4, 7, seed=1), draws(4, seed=2)]),
    "matmul": (torch.matmul, [draws(2, 3, 5, 7), draws(7, 4, seed=1)]),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [images(), draws(6, 8, 3, 3), draws(6, seed=1)]),
    "conv 1x1": (F.conv2d, [images(), draws(6, 8, 1, 1)]),
    "conv dilated": (lambda x, w: F.conv2d(x, w, None, 1, 4, 2), [images(), draws(4, 8, 5, 5)]),
    "conv grouped": (lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 4), [images(), draws(12, 2, 3, 3)]),
    "conv depthwise": (lambda x, w: F.conv2d(x, w, None, 2, 1, 1, 8), [images(), draws(8, 1, 3, 3)]),
    "conv depthwise by two": (lambda x, w: F.conv2d(x, w, None, 1, 0, 1, 8), [images(), draws(16, 1, 3, 3)]),
    "conv transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2),
                        [images(), draws(8, 3, 3, 3), draws(6, seed=1)]),
    "conv one-dimensional": (lambda x, w: F.conv1d(x, w, None, 2, 1), [draws(3, 4, 10), draws(5, 4, 3)]),
    "batch norm": (batch_norm, [images(), draws(8), draws(8, seed=1)]),
    "batch norm of rows": (batch_norm, [draws(12, 5), draws(5), draws(5, seed=1)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6, 7), w, b),
                   [draws(4, 3, 6, 7), draws(6, 7, seed=1), draws(6, 7, seed=2)]),
    "layer norm of one row": (lambda x, w: F.layer_norm(x, (6,), w, w), [draws(6), draws(6, seed=1)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [images(), draws(8), draws(8, seed=1)]),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), [images()]),
    "max pool, rounded up": (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), [images(h=10, w=8)]),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), [images()]),
    "average pool inside": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), [images(h=10)]),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, (4, 2)), [images()]),
    "global pool": (lambda x: F.adaptive_avg_pool2d(x, 1), [images()]),
    "pools of one image": (
        lambda x: F.max_pool2d(x, 3, 2) + F.avg_pool2d(x, 3, 2) + F.adaptive_avg_pool2d(x, (5, 4)), [images()[0]]),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2), [images()]),
    "upsample by 1.4": (lambda x: F.interpolate(x, scale_factor=1.4), [images()]),
    "pads": (lambda x: F.pad(x, (3, 0, 1, 5), "reflect") + F.pad(x[0], (3, 0, 0, 6), "replicate"), [images()]),
    "pads of rows and blocks": (
        lambda x: F.pad(x, (2, 3), "reflect") + F.pad(x, (1, 4), "replicate")
        + F.pad(x[None], (5, 0, 0, 0, 0, 0), "reflect")[0] * F.pad(x[None], (2, 3, 0, 0, 0, 0), "replicate")[0],
        [draws(3, 4, 7)]),
    "softmax": (lambda x: x.softmax(1), LOGITS),
    "attention": (F.scaled_dot_product_attention, QKV),
    "attention of a module": (multi_head, MODULE),
    "masked attention of a module": (lambda x, inner, outer: multi_head(x, inner, outer, MASK), MODULE),
    "quotient rounded down": (lambda x: x * torch.div(torch.arange(50.0), 0.1, rounding_mode="floor"), [draws(50)]),
    "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), QKV),
    "masked attention": (F.scaled_dot_product_attention, [*QKV, draws(5, 5, seed=7)]),
    "cross-entropy": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), LOGITS),
    "cross-entropy that ignores 156": (lambda x: F.cross_entropy(x, LABELS % 256, ignore_index=156), LOGITS),
    "weighted cross-entropy": (lambda x: F.cross_entropy(x, torch.arange(5), torch.arange(9).to(x.dtype)), LOGITS),
    "soft cross-entropy": (lambda x: F.cross_entropy(x, draws(5, 9, seed=3).to(x.dtype).softmax(1)), LOGITS),
    "binary cross-entropy": (
        lambda x: F.binary_cross_entropy_with_logits(x, (draws(5, 9, seed=3) > 0).to(x.dtype)), LOGITS),
    "gelu": (F.gelu, [draws(4000) * 2]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), [draws(4000) * 2]),
    "silu": (F.silu, [draws(4000) * 4]),
    "hardswish": (F.hardswish, [draws(4000) * 4]),
    "hardsigmoid": (F.hardsigmoid, [draws(4000) * 4]),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.1), [draws(4000)]),
    "elu": (F.elu, [draws(4000)]),
    "softplus": (F.softplus, [draws(4000) * 10]),
    "sigmoid": (torch.sigmoid, [draws(4000) * 4]),
    "tanh": (torch.tanh, [draws(4000) * 2]),
    "power": (lambda x: x.abs().pow(1.5) + x**3, [draws(4000)]),
    "variance": (lambda x: x.var((0, 2)) + x.std((0, 2)), [draws(3, 4, 5)]),
    "mean and sum": (lambda x: x.mean(1) + x.sum(1) / 7 + x[0, 1, 2].sum(), [draws(3, 4, 5)]),
    "sums of a number": (lambda x: x.sum(0) + x.mean(-1) * x.cumsum(0) * x.var(0, False), [draws(1).view(())]),
    "norm": (lambda x: x / x.norm(dim=1, keepdim=True), [draws(6, 8)]),
    "weight normalised": (lambda x: F.normalize(x, dim=1), [draws(6, 8)]),
    "cumsum": (lambda x: x.cumsum(1), [draws(3, 20)]),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 0, 1], [3, 1, 0]]), w), [draws(5, 4)]),
    "gather of rows": (lambda w: w[torch.tensor([1, 0, 1, 3])], [draws(5, 4)]),
    "used three times": (lambda x: x * x.exp() + x, [draws(50)]),
}  # fmt: skip


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shifted(x: Tensor) -> Tensor:
    """The same values 4 bytes off any vector's boundary."""
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_near_float64_and_has_one_result(name: str) -> None:
    """By any method, layout and alignment, with any number of threads."""
    function, inputs = CASES[name]
    exact = gradients(function, [x.double() for x in inputs])
    with portable():
        results = [gradients(function, [change(x) for x in inputs]) for change in (lambda x: x, shifted, last)]
        with threads(2):
            results.append(gradients(function, inputs))
    for method in ("float64", "int8", "float32"):
        with portable([method]):
            results.append(gradients(function, inputs))
    for found, expected in zip(results[0], exact, strict=True):
        assert found.dtype == torch.float32
        error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < 5e-4, error
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_of_equal_values_the_first_in_row_order_is_the_maximum() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 1, 1] = x[0, 0, 1, 0] = x[0, 0, 2, 2] = 1
    x[0, 0, 3, 3] = float("nan")
    with portable():
        values, indices = F.max_pool2d(x, 2, 2, return_indices=True)
        padded = F.max_pool2d(torch.full((1, 1, 3, 3), -torch.inf), 3, 2, 1, return_indices=True)[1]
    assert indices.flatten().tolist() == [4, 2, 8, 15]
    assert values[0, 0, 1, 1].isnan()
    assert padded.min() >= 0


def test_running_statistics_move_as_torchs_do() -> None:
    plain, own = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    x = images() + 3
    plain(x)
    with portable():
        own(x)
        evaluated = own.eval()(x)
    for (name, found), expected in zip(own.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(expected, found, rtol=1e-6), name
    assert torch.allclose(plain.eval()(x), evaluated, rtol=1e-5, atol=1e-5)


def trained(make: Callable[..., Any], inside: Any) -> Tensor:
    """Weights after three steps of an optimizer."""
    with inside:
        weight = draws(40).requires_grad_()
        optimizer = make([weight])
        for number in range(3):
            weight.grad = draws(40, seed=number + 1)
            optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.5, "maximize": True}], ids=str)
def test_optimizers_are_near_torchs_and_the_fused_sgd_has_the_bits_of_the_plain_one(options: dict[str, Any]) -> None:
    def sgd(weights: list[Tensor], fused: bool = False) -> Any:
        return torch.optim.SGD(weights, 0.1, 0.9, weight_decay=0.1, fused=fused, foreach=False, **options)

    assert torch.equal(trained(sgd, portable()), trained(partial(sgd, fused=True), portable()))
    for make in (sgd, lambda weights: torch.optim.AdamW(weights, 0.1, foreach=False)):
        assert torch.allclose(trained(make, threads(1)), trained(make, portable()), rtol=1e-5, atol=1e-6)


def test_integers_go_by_torchs_own_operators_and_float64_in_row_order_with_ieee_roots() -> None:
    a, b, index = torch.arange(6).view(2, 3), torch.arange(6).view(3, 2), torch.tensor([0, 0])

    def results() -> tuple[Tensor, ...]:
        return a @ b, torch.dot(a[0], a[1]), a.index_add(0, index, a), a.scatter_add(0, a % 2, a)

    with portable():
        found = results()
    assert all(torch.equal(x, y) for x, y in zip(found, results(), strict=True))
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((7, 3))) ** 2
    with portable():
        assert torch.equal(x.sum(0), reduce(torch.add, x))
        assert np.array_equal(x.sqrt().numpy(), np.sqrt(x.numpy()))


def test_powers_and_elu_of_float64_leave_their_input_as_it_is() -> None:
    x = draws(5).double()
    before = x.clone()
    with portable():
        power, bent = 2.0**x, torch.ops.aten.elu(x, 1.0, 1.0, 0.5)
    assert torch.equal(x, before)
    torch.testing.assert_close(power, before.exp2(), rtol=1e-7, atol=0)
    torch.testing.assert_close(bent, torch.where(x > 0, x, (x / 2).expm1()), rtol=1e-7, atol=0)


def test_a_sum_of_floats_over_ranks_is_refused_and_messages_that_move_pass() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with portable():
            values = torch.ones(3)
            dist.broadcast(values, 0)
            group_of().start_backend_all_reduce(values, maximum=True).wait()
            if torch.__version__ >= "2.13":  # an older torch doesn't say which reduction it is: all are refused
                dist.all_reduce(values, op=dist.ReduceOp.MAX)
            dist.all_reduce(torch.ones(3, dtype=torch.int32))
            with pytest.raises(UserError, match="a sum of floats over ranks"):
                dist.all_reduce(values)
    finally:
        dist.destroy_process_group()


def test_clipping_takes_lists_of_tensors_in_a_context_within_the_context_too() -> None:
    weights = [draws(7, seed=1).requires_grad_(), draws(3, 5, seed=2).requires_grad_()]
    with portable(["float32"]), portable():
        for weight in weights:
            weight.grad = weight.detach() * 10
        norm = nn.utils.clip_grad_norm_(weights, 1.0)
        rest = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    assert torch.allclose(norm, torch.cat([w.detach().flatten() for w in weights]).norm() * 10)
    assert abs(rest.item() - 1) < 1e-5
    with portable():
        assert torch._foreach_norm([w.detach().double().float() for w in weights], 2, dtype=torch.float32)[0] > 0
        raised = torch._foreach_maximum([torch.tensor([1.0, -2.0]), torch.tensor([math.nan])], 0.5)
        torch._foreach_maximum_(raised, [2.0, 0.0])
    assert raised[0].tolist() == [2.0, 2.0]
    assert raised[1].isnan()


def test_what_depends_on_the_machine_is_refused_by_name_and_module(monkeypatch: pytest.MonkeyPatch) -> None:
    with portable(), pytest.raises(UserError, match=r"aten\._ctc_loss\.\w+ in CTCLoss has no rule.*float32"):
        nn.CTCLoss()(draws(5, 2, 4), torch.ones(2, 3, dtype=torch.long), torch.full((2,), 5), torch.full((2,), 3))
    with portable(), pytest.raises(UserError, match=r"aten\.randperm\.default has no rule.*draw on the CPU"):
        torch.randperm(len(torch.randperm(5)), device="meta")  # as on a GPU, whose generator is another than a CPU's
    assert torch.ops.aten.record_stream.default in PASSING, "which no CPU has"
    with portable(), pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        F.cross_entropy(LOGITS[0], torch.tensor([1, 0, -1, 8, 3]))
    scaled: Any = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], 0.1, fused=True)
    scaled.grad_scale = weight.grad = torch.ones(1)
    with portable(), pytest.raises(UserError, match="leave the scaler out"):
        scaled.step()
    convolution = nn.Conv2d(1, 2, 3)
    with portable(), torch.inference_mode(), pytest.raises(UserError, match=r"Conv2d has no rule.*torch\.no_grad"):
        convolution(draws(1, 1, 4, 4))
    with portable(), torch.no_grad():
        assert convolution(draws(1, 1, 4, 4)).shape == (1, 2, 2, 2)
    right = math.erf
    monkeypatch.setattr(math, "erf", lambda x: math.nextafter(right(x), 0.0))
    with portable(), pytest.raises(UserError, match=r"math\.erf of this machine's library is off"):
        torch.empty(3).uniform_(-0.95, 0.95).erfinv_()  # as timm does


NUMBERS, WAVES = torch.arange(1, 4), torch.complex(draws(3), draws(3, seed=1))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "product": (lambda: WAVES * WAVES, "aten.mul.Tensor of complex numbers"),
    "product with a number": (lambda: draws(3) * 1j, "aten.mul.Tensor of complex numbers"),
    "quotient": (lambda: WAVES / WAVES, "of complex numbers"),
    "magnitude": (WAVES.abs, "of complex numbers"),
    "sum": (WAVES.sum, "of complex numbers"),
    "list": (lambda: torch._foreach_mul([WAVES], [WAVES]), "of complex numbers"),
    "variance": (draws(3).double().var, r"of torch\.float64; it takes torch\.float32 alone"),
    "norm": (lambda: torch.linalg.vector_norm(draws(3), dtype=torch.float64), r"of torch\.float64"),
    "softmax": (lambda: torch.softmax(draws(3), 0, dtype=torch.float64), r"of torch\.float64"),
    "root of 16 bits": (lambda: draws(3).bfloat16().sqrt(), r"a root of torch\.bfloat16"),
    "integers in place": (lambda: NUMBERS.clone().div_(2), r"a result of torch\.float32 in the place of torch\.int64"),
    "two masks": (
        lambda: F.scaled_dot_product_attention(QKV[0], QKV[1], QKV[2], torch.ones(5, 5), is_causal=True), "not both"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_a_part_of_its_numbers_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with portable(), pytest.raises(UserError, match=message):
        function()


def test_dtypes_and_numbers_beside_lists_are_those_of_torch() -> None:
    x, several = draws(40).double(), torch.tensor([1.0, 2.0])
    for function in (
        x.mean,
        lambda: x.view(8, 5).mean(0),
        NUMBERS.sqrt,
        lambda: NUMBERS**0.5,
        lambda: torch._foreach_addcmul([x, x], [x, x], [x, x], several)[1],
    ):
        with portable():
            found = function()
        torch.testing.assert_close(found, function(), rtol=1e-12 if found.dtype == x.dtype else 1e-6, atol=0)
    with portable():
        assert x.float().cumsum(0, dtype=torch.float64).dtype == torch.float64


def test_draws_follow_torchs_generator_and_know_no_layout() -> None:
    with portable():
        torch.manual_seed(7)
        first = [torch.randn(3, 4, 5, 6), torch.rand(9), nn.init.trunc_normal_(torch.empty(2, 3, 4, 5))]
        state = torch.get_rng_state()
        dropped = F.dropout(torch.ones(4, 8, 3, 3), 0.5)
        torch.set_rng_state(state)
        again = F.dropout(last(torch.ones(4, 8, 3, 3)), 0.5)
        whole = torch.ones(64, requires_grad=True)
        by_default, nothing = (torch.ops.aten.native_dropout(whole, *how)[0] for how in ((0.5, None), (1.0, True)))
        (gradient,) = torch.autograd.grad(nothing.sum(), whole)
        torch.manual_seed(7)
        strided = torch.empty(3, 4, 5, 6, memory_format=torch.channels_last).normal_()
    assert torch.equal(first[0], strided)
    assert torch.equal(dropped, again)
    assert set(dropped.unique().tolist()) == set(by_default.tolist()) == {0.0, 2.0}
    assert not torch.cat([nothing, gradient]).any()
    assert first[2].abs().max() <= 2


@pytest.mark.parametrize("shape", [(3, 9, 40, 250), (5, 4, 300, 41), (1500, 700), (2, 3, 1031, 67), (70001, 3)])
@pytest.mark.parametrize("last_channels", [False, True])
def test_large_sums_by_integers_are_those_of_float64(shape: tuple[int, ...], last_channels: bool) -> None:
    x = draws(*shape, seed=5) * 3 + 1
    x = last(x) if last_channels else x
    for dims in [(0, *range(2, x.dim())), (x.dim() - 1,), tuple(range(x.dim()))]:
        exact = on_grid(x, dims).sum(dims)
        assert torch.equal(grid_sum(x, dims), exact)
        assert torch.equal(grid_sum(x[..., ::2], dims), on_grid(x[..., ::2], dims).sum(dims))
    x[1, 2] = float("nan")
    assert grid_sum(x, tuple(range(x.dim()))).isnan()
