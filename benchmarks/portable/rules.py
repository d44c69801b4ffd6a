"""Errors of portable products against float64, of operands with an amax/rms from 3 to 1,000, beside other arithmetics.

    python -m benchmarks portable rules

For each kind the output's error and those of both operands' gradients: |found - exact| / |exact| in the Euclidean norm.
`three` leaves out the product of the lower slices; `tensor` has one scale for a whole operand. Nearly no pair of
operands multiplies to nothing; the last column has the share that does.

Needs: nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from torusgd.arithmetic import portable
from torusgd.arithmetic.methods import quantised
from torusgd.arithmetic.passes import slices

from ..record import sample

Case = Callable[..., Tensor]
RATIOS = (3, 10, 30, 100, 300, 1000)
LINEAR = "linear 2048x1024x64"
CASES: dict[str, tuple[Case, tuple[int, ...], tuple[int, ...]]] = {
    LINEAR: (F.linear, (2048, 1024), (64, 1024)),
    "convolution 3x3, 64 to 16": (lambda x, w: F.conv2d(x, w, padding=1), (24, 64, 32, 32), (16, 64, 3, 3)),
    "depthwise 3x3, 64": (lambda x, w: F.conv2d(x, w, padding=1, groups=64), (24, 64, 32, 32), (64, 1, 3, 3)),
}


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def with_ratio(shape: tuple[int, ...], ratio: float, seed: int) -> Tensor:
    """Normal numbers to a power, so that the largest magnitude is `ratio` times the root mean square.

    There is none above the root of the number of values.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    low, high = 0.1, 20.0
    for _ in range(14):
        power = (low + high) / 2
        values = x.abs().pow(power)
        low, high = (power, high) if values.max() / values.square().mean().sqrt() < ratio else (low, power)
    return x.sign() * x.abs().pow(low)


def gradients(case: Case, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The output, and the gradients of both operands."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = case(*leaves)
    out.backward(upstream.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def other_products(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """A @ B by arithmetics that version 1 is not: three products of slices, and one scale for a whole operand."""
    (left, rows), (right, columns) = quantised(a, (1,)), quantised(b, (0,))
    whole = left.double() @ right.double()
    one = torch.ones(1, 1)
    lost = slices(left, one)[1].double() @ slices(right, one)[1].double()
    (coarse, unit), (other, another) = quantised(a, (0, 1)), quantised(b, (0, 1))
    return {
        "three": (whole - lost) * rows * columns,
        "tensor": coarse.double() @ other.double() * unit * another,
    }


def lost_share(a: Tensor, b: Tensor) -> float:
    """The share of pairs in a product of matrices, neither of them zero, that multiply to nothing."""
    left, right = quantised(a, (1,))[0], quantised(b, (0,))[0]
    pairs = ((a != 0).double().sum(0) * (b != 0).double().sum(1)).sum()
    kept = ((left != 0).double().sum(0) * (right != 0).double().sum(1)).sum()
    return (1 - kept / pairs).item()


def main() -> None:
    """Prints a line for each case and ratio."""
    torch.set_num_threads(1)
    for name, (case, left, right) in CASES.items():
        for ratio in RATIOS:
            inputs = [with_ratio(left, ratio, 1), with_ratio(right, min(ratio, 300), 2)]
            upstream = with_ratio(tuple(case(*inputs).shape), ratio, 3)
            exact = gradients(case, [x.double() for x in inputs], upstream)
            with portable():
                found = {"portable": gradients(case, inputs, upstream)}
            found["float32"] = gradients(case, inputs, upstream)
            found["bfloat16"] = gradients(case, [x.bfloat16() for x in inputs], upstream)
            words = ""
            if name == LINEAR:
                three = [other_products(*pair) for pair in _pairs(inputs, upstream)]
                found |= {kind: [each[kind] for each in three] for kind in ("three", "tensor")}
                words = f", pairs lost {max(lost_share(*pair) for pair in _pairs(inputs, upstream)):.1e}"
            cells = []
            for kind, tensors in found.items():
                errors = [error(a, b) for a, b in zip(tensors, exact, strict=True)]
                sample(f"{name}, amax/rms {ratio}, {kind}, error", errors)
                cells.append(f"{kind} {' '.join(f'{value:.1e}' for value in errors)}")
            print(f"{name}, {ratio}: {'; '.join(cells)}{words}", flush=True)


def _pairs(inputs: list[Tensor], upstream: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The matrices of a linear layer's output, its input's gradient and its weights'."""
    x, weight = inputs
    return [(x, weight.T), (upstream, weight), (upstream.T, x)]
