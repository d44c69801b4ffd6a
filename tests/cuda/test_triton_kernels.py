"""Triton's kernels on the GPU that is here, or else under its interpreter: the integers of torch's own operators."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the extra triton")

from tests.triton_device import ON_TRITON_DEVICE, seeded

from torusgd.cuda import operators, triton_kernels

pytestmark = ON_TRITON_DEVICE

SHAPES = [(5,), (4, 3, 3, 3), (7, 300), (1,)]
LENGTH = sum(torch.Size(shape).numel() for shape in SHAPES)


def gradients(seed: int) -> list[Tensor]:
    """In all dtypes and layouts that autograd leaves, with halves, zeros and elements that vanish."""
    generator = seeded(seed)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    drawn[0] = drawn[0].half()
    drawn[1] = drawn[1].bfloat16().contiguous(memory_format=torch.channels_last)
    drawn[2][0] = torch.arange(300) / 2**11 - 0.07  # halves of a unit among them
    drawn[2][1] = 1e-30
    drawn[2][2] = 0.0
    return drawn


def added(kernels: object, dtype: torch.dtype, bad: float | None) -> tuple[Tensor, Tensor]:
    """Two virtual workers, bounds included; the message, and what was found before the second bounds."""
    scales = torch.tensor([2.0**9, 2.0**12, 2.0**10, 2.0**20])
    message = torch.zeros(LENGTH + 2 * len(SHAPES) + 2, dtype=dtype)
    found = torch.zeros(len(SHAPES) + 1, dtype=torch.int32)
    sizes = torch.tensor([torch.Size(shape).numel() for shape in SHAPES])
    for worker in range(2):
        given = gradients(worker)
        if bad is not None:
            given[2][3, 4] = bad
        kernels.add_gradients(given, sizes, scales, message, found)  # type: ignore[attr-defined]
        before = found.clone()
        kernels.add_bounds(found, scales, message, LENGTH, 8.0, 2.0**27)  # type: ignore[attr-defined]
        assert not found.any()
    return message, before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_integers_are_those_of_torch(dtype: torch.dtype) -> None:
    ours, theirs = (added(kernels, dtype, bad=None) for kernels in (triton_kernels, operators))
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[0], theirs[0])


def test_a_gradient_in_another_layout_is_taken_in_logical_order() -> None:
    """As `torch.autograd.grad` gives those of tensors that a network transposes."""
    scales, sizes = torch.tensor([2.0**12]), torch.tensor([48])
    gradient = torch.randn(6, 8, generator=seeded(0)).t()
    messages = [torch.zeros(52, dtype=torch.int32) for _ in range(2)]
    for kernels, message in zip((triton_kernels, operators), messages, strict=True):
        kernels.add_gradients([gradient], sizes, scales, message, torch.zeros(2, dtype=torch.int32))
    assert messages[1].any()
    assert torch.equal(*messages)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_not_finite_is_counted_once_a_worker(bad: float) -> None:
    ours, theirs = (added(kernels, torch.int32, bad)[0][LENGTH:-2] for kernels in (triton_kernels, operators))
    assert torch.equal(ours, theirs)
    assert ours[len(SHAPES) :].tolist() == [0, 0, 2, 0]
