"""Exact sums: equal to math.fsum, free of order, honest about what is not finite."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.comm.exact_sum import FULL, NARROW, decode, encode

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(min_value=-1e15, max_value=1e15, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-30)


def exact_sum(values: torch.Tensor) -> torch.Tensor:
    return decode(encode(values).sum(dim=1))


def tensors(floats: st.SearchStrategy[float], dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(floats, min_size=1, max_size=40).map(partial(torch.tensor, dtype=dtype))


@given(tensors(floats32, torch.float32) | tensors(moderate, torch.float64))
@settings(max_examples=300, deadline=None)
def test_the_sum_is_the_rounded_exact_sum(values: torch.Tensor) -> None:
    expected = math.fsum(values.tolist())
    assert abs(exact_sum(values).item() - expected) <= math.ulp(expected)


@given(st.lists(floats32, min_size=2, max_size=30), st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_bits_do_not_depend_on_order_or_on_how_ranks_share(values: list[float], random, ranks: int) -> None:
    shuffled = values.copy()
    random.shuffle(shuffled)
    parts = [torch.tensor(shuffled[r::ranks], dtype=torch.float32) for r in range(ranks)]
    shared = decode(torch.stack([encode(part).sum(dim=1) for part in parts]).sum(dim=0))
    assert shared.item() == exact_sum(torch.tensor(values, dtype=torch.float32)).item()


def test_narrow_window_drops_bits_of_each_value_alone() -> None:
    small = decode(encode(torch.tensor([1.0, 2.0**-60, 2.0**-70, -1.0]), NARROW).sum(dim=1), NARROW).item()
    assert small == 2.0**-60


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 2.0**58])
def test_what_does_not_fit_is_nan_and_touches_no_neighbour(bad: float) -> None:
    values = torch.tensor([[1.0, 2.0], [bad, 3.0]])
    assert decode(encode(values, NARROW).sum(dim=1), NARROW).tolist()[1] == 5.0
    assert math.isnan(decode(encode(values, NARROW).sum(dim=1), NARROW).tolist()[0])


def test_largest_float32_a_million_times() -> None:
    largest = float(np.finfo(np.float32).max)
    limbs = encode(torch.tensor([largest], dtype=torch.float32)) * 2**20
    assert decode(limbs, FULL).item() == largest * 2**20
