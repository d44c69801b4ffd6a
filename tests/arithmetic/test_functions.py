"""Functions by polynomials: within a unit of float32, and right at the edges."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from torusgd.arithmetic import functions, portable
from torusgd.arithmetic.reductions import square_root


def float32_of_all_kinds(count: int = 300_000) -> Tensor:
    values = np.random.default_rng(1).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ordinary = (np.random.default_rng(2).standard_normal(count) * 4).astype(np.float32)
    return torch.from_numpy(np.concatenate([values[np.isfinite(values)], ordinary]))


INF = math.inf
EDGES: dict[str, dict[float, float]] = {
    "exp": {0.0: 1.0, INF: INF, -INF: 0.0, 89.0: INF, -104.0: 0.0},
    "log": {0.0: -INF, 1.0: 0.0, INF: INF, -1.0: math.nan, -INF: math.nan},
    "erf": {0.0: 0.0, 5.0: 1.0, -INF: -1.0},
    "tanh": {0.0: 0.0, 20.0: 1.0, -INF: -1.0, 1e-30: 1e-30},
    "sigmoid": {0.0: 0.5, INF: 1.0, -INF: 0.0},
}


@pytest.mark.parametrize("name", EDGES)
def test_functions_are_within_a_unit_of_float32_and_right_at_the_edges(name: str) -> None:
    function, reference, x = getattr(functions, name), getattr(torch, name), float32_of_all_kinds()
    x = x.abs() if name == "log" else x[x.abs() < {"exp": 88.0, "sigmoid": 87.0}.get(name, INF)]
    found, exact = function(x).double().numpy(), reference(x.double()).numpy()
    finite = np.isfinite(exact)
    unit = np.spacing(np.abs(exact[finite]).astype(np.float32)).astype(np.float64)
    assert (np.abs(found[finite] - exact[finite]) / unit).max() < 0.51
    assert (found[~finite] == exact[~finite]).all()
    for edge, expected in {**EDGES[name], math.nan: math.nan}.items():
        np.testing.assert_equal(function(torch.tensor([edge])).item(), np.float32(expected))


def test_sine_cosine_and_square_roots() -> None:
    x = torch.from_numpy(np.random.default_rng(3).uniform(-1000, 1000, 100_000).astype(np.float32)).double()
    for found, exact in zip(functions.sine_and_cosine64(x), (x.sin(), x.cos()), strict=True):
        assert (found - exact).abs().max() < 2.0**-33
    assert torch.stack(functions.sine_and_cosine64(torch.tensor([-(2.0**20) - 1, 1e30, INF]))).isnan().all()
    with portable():
        assert torch.tensor(1e-10).expm1() == torch.tensor(1e-10)
    x = float32_of_all_kinds().abs()
    assert np.array_equal(square_root(x).numpy(), np.sqrt(x.numpy())), "correctly rounded"


def test_layouts_and_blocks_change_no_bit() -> None:
    x = torch.randn(4, 30, 20, 17, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([functions.exp(part) for part in x.reshape(-1).split(1000)])
    last = functions.exp(x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(functions.exp(x).reshape(-1), rows)
    assert torch.equal(last.reshape(-1), rows)
    assert last.is_contiguous(memory_format=torch.channels_last)
