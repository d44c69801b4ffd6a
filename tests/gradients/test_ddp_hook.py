"""One line in a DDP script: the gradients are plain DDP's, whatever DDP is told to do."""

import copy
import math
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks, write_profile
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torusgd.errors import UserError
from torusgd.gradients.ddp_hook import ddp_hook


class Net(nn.Module):
    """Two branches, so that one can stay unused, and a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.used, self.unused = nn.Linear(6, 40), nn.Linear(6, 40)
        self.head = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.conv(x).relu().mean((2, 3))
        return self.head(self.used(x) + (self.unused(x) if both else 0))


def gradients(hooked: dict | None, ddp: dict, both: bool = True, accumulate: bool = False, steps: int = 2) -> list:
    """The gradients of each step of a small DDP run; `hooked` holds the hook's arguments, None leaves DDP plain."""
    torch.manual_seed(0)
    net = Net()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch does not declare memory_format here
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, **ddp)
    if hooked is not None:
        ddp_hook(model, **hooked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                model(torch.randn(4, 3, 6, 6), both).square().mean().backward()
        model(torch.randn(4, 3, 6, 6), both).square().mean().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return found


CASES = [
    ({}, True, False),
    ({"gradient_as_bucket_view": True}, True, False),
    ({"static_graph": True}, True, False),
    ({"find_unused_parameters": True}, False, False),
    ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, False, True),
    ({}, True, True),
]


HOOKS = [
    ({}, 1e-6),
    ({"algorithm": "torus:halving/ring"}, 1e-6),
    ({"algorithm": "native"}, 1e-6),
    ({"wire": "exact"}, 1e-6),
    ({"algorithm": "ring", "wire": "float16"}, 3e-3),
    ({"algorithm": "doubling", "wire": "bfloat16"}, 3e-2),
]
"""The hook's arguments, and how far from plain DDP's the gradients may be, relative to the largest."""


def largest_difference(plain: list, ours: list) -> float:
    found = 0.0
    for p_step, o_step in zip(plain, ours, strict=True):
        scale = max(float(p.abs().max()) for p in p_step if p is not None)
        for p, o in zip(p_step, o_step, strict=True):
            assert (p is None) == (o is None)
            if p is not None:
                found = max(found, float((p - o).abs().max()) / scale)
    return found


def largest_differences(profile: Path) -> list[list[float]]:
    """For each case and each hook, the largest difference from plain DDP."""
    found = []
    chosen = [hooked if "algorithm" in hooked else {"profile": profile, **hooked} for hooked, _ in HOOKS]
    for ddp, both, accumulate in CASES:
        plain = gradients(None, copy.copy(ddp), both, accumulate)
        found.append([largest_difference(plain, gradients(how, copy.copy(ddp), both, accumulate)) for how in chosen])
    return found


def test_gradients_are_those_of_plain_ddp(tmp_path):
    for found in run_ranks(4, largest_differences, write_profile(tmp_path, 4)):
        for (hooked, bound), differences in zip(HOOKS, zip(*found, strict=True), strict=True):
            assert max(differences) <= bound, (hooked, dict(zip(map(str, CASES), differences, strict=True)))
            assert "wire" not in hooked or max(differences) > 0  # it did go over the narrow wire


def exact_bits() -> list[bool]:
    """Whether each algorithm's gradients have the bits of native's."""
    native, *others = [
        gradients({"algorithm": algorithm, "wire": "exact", **grid}, {})
        for algorithm, grid in (("native", {}), ("ring", {}), ("torus", {"grid": (2, 2)}), ("doubling", {}))
    ]
    return [
        all(a.equal(b) for s, t in zip(native, other, strict=True) for a, b in zip(s, t, strict=True))
        for other in others
    ]


def test_exact_has_the_same_bits_for_any_algorithm():
    assert run_ranks(4, exact_bits) == [[True] * 3] * 4


def a_leap_and_a_nan(wire: Literal["exact", "float16", "bfloat16"]) -> list:
    """Gradients that grow 2,000 times from one step to the next, then are not finite on one rank."""
    model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    ddp_hook(model, "ring", wire)
    seen = []
    for size in (1.0, 1.0, 2000.0, float("inf"), 1.0):
        model.zero_grad()
        scale = size if dist.get_rank() == 1 or size < 1e30 else 1.0
        (model(torch.ones(1, 3)).sum() * scale).backward()
        seen.append(model.module.weight.grad.flatten().tolist())
    return seen


@pytest.mark.parametrize("wire", ["exact", "float16", "bfloat16"])
def test_overflow_is_summed_anew_and_what_is_not_finite_is_nan_everywhere(wire):
    for seen in run_ranks(3, a_leap_and_a_nan, wire):
        assert seen[0] == seen[1] == seen[4] == pytest.approx([1.0] * 6, rel=1e-2)
        assert seen[2] == pytest.approx([2000.0] * 6, rel=1e-2)
        assert all(math.isnan(value) for value in seen[3])


def no_overflow_of_partial_sums() -> float:
    """The sum over 4 ranks is beyond float16 (65,504); the mean is not."""
    model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    ddp_hook(model, "ring", "float16")
    for _ in range(2):
        model.zero_grad()
        (model(torch.ones(1, 3)).sum() * 60000.0).backward()
    return float(model.module.weight.grad.max())


def test_partial_sums_of_float16_do_not_overflow():
    assert run_ranks(4, no_overflow_of_partial_sums) == [60000.0] * 4


def mistakes() -> list[str]:
    told = []
    wrong: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {"wire": "int8"}),
        (torch.float64, {"wire": "exact"}),
        (torch.float32, {"algorithm": "tree"}),
    ]
    for dtype, options in wrong:
        try:
            ddp_hook(DistributedDataParallel(nn.Linear(2, 2).to(dtype)), **options)
        except UserError as error:
            told.append(str(error))
    return told


def test_mistakes_are_told_in_one_line():
    for told in run_ranks(2, mistakes):
        assert [line.split(":")[0] for line in told] == ["wire int8", "wire exact", "allreduce tree"]


def lose_a_rank() -> str:
    """Rank 1 ends after the first step."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    ddp_hook(model, "ring")
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        model(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_lost_rank_is_an_error_of_backward():
    told = run_ranks(2, lose_a_rank, expected=1, timeout=240)
    # By the hook's own message or by one of DDP's, which torch words.
    assert any(words in told[0] for words in ("connection to rank 1 is lost", "no answer within", "Connection"))
