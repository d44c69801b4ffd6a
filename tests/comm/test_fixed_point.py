"""Exact sums: in limbs equal to math.fsum, by exact_all_reduce within the stated bound; the same bits in any order."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.gloo_world import on_ranks
from torch._C._distributed_c10d import HashStore

from torusgd.comm import create, exact_all_reduce, fixed_point
from torusgd.comm.algorithms import NAMES
from torusgd.comm.base import Work
from torusgd.comm.exact_sum import FULL, NARROW, Window, decode, encode
from torusgd.comm.groups import Group, build
from torusgd.comm.groups import alone as rank_alone
from torusgd.errors import UserError

RANKS = 3
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Call = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def by_rank() -> Call:
    """Calls a function with each of 3 Gloo groups that threads of this process joined, at once; the answers by rank."""
    store = HashStore()

    def on_threads(function: Callable[..., Any], *shares: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(RANKS) as pool:
            answers = [pool.submit(function, *(share[rank] for share in shares)) for rank in range(RANKS)]
            return [answer.exception(50) or answer.result() for answer in answers]

    join = partial(build, store, range(RANKS), device=torch.device("cpu"), timeout=40.0)
    groups = on_threads(join, range(RANKS))
    return lambda function, *shares: on_threads(function, *shares, groups)


def same_bits(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have the bits of the first, with one nan for all."""
    rounded = [(t.dtype, t.shape, t.nan_to_num(0.5).tolist(), t.isnan().tolist()) for t in tensors]
    return rounded == [rounded[0]] * len(rounded)


def bound(values: Sequence[float], dtype: torch.dtype, bits: int = 62) -> Fraction:
    """How far the sum may be off, as `exact_all_reduce` says."""
    total, limits = abs(sum(map(Fraction, values), Fraction())), torch.finfo(dtype)
    count_bits = (len(values) - 1).bit_length()
    ulp = max(Fraction(limits.eps) * total, Fraction(limits.smallest_normal) / 2**10)
    if dtype == torch.float64:
        ulp = Fraction(math.ulp(float(total)))
    largest = max(abs(Fraction(value)) for value in values)
    return largest * Fraction(2) ** (2 * count_bits - bits) + ulp * (Fraction(1, 2) + Fraction(1, 2**29))


any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
any_float64 = st.floats(min_value=-1e306, max_value=1e306)


def spread(addends: list[torch.Tensor], places: list[int]) -> list[list[torch.Tensor]]:
    return [[a for a, place in zip(addends, places, strict=True) if place == rank] for rank in range(RANKS)]


@pytest.mark.parametrize(("floats", "dtype"), [(any_float32, torch.float32), (any_float64, torch.float64)])
def test_bits_do_not_depend_on_who_holds_an_addend_and_errors_are_bounded(by_rank, floats, dtype):
    @given(st.lists(floats, min_size=1, max_size=20), st.randoms(use_true_random=False))
    @settings(max_examples=60, deadline=None)
    def check(values: list[float], random: Any) -> None:
        addends = [torch.tensor([value], dtype=dtype) for value in values]
        alone = exact_all_reduce(addends)
        random.shuffle(addends)
        results = by_rank(exact_all_reduce, spread(addends, [random.randrange(RANKS) for _ in addends]))
        assert same_bits([alone, *results])
        exact = sum(map(Fraction, values), Fraction())
        if alone.isfinite():
            assert abs(Fraction(alone.item()) - exact) <= bound(values, dtype)
        else:
            assert abs(exact) >= Fraction(torch.finfo(dtype).max)

    check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (7,), (3, 5000), (4096,), (1, 2, 3, 1, 2, 1, 1, 2)])
def test_every_dtype_and_shape(by_rank, dtype, shape):
    generator = torch.Generator().manual_seed(1)
    scale = 10.0 ** (torch.arange(math.prod(shape)).reshape(shape) % 5 - 2)  # within what float16 holds
    addends = [(torch.randn(shape, generator=generator) * scale).to(dtype) for _ in range(7)]
    results = by_rank(exact_all_reduce, spread(addends, [0, 0, 2, 2, 2, 0, 0]))
    assert same_bits([exact_all_reduce(addends[::-1]), *results])
    assert results[1].shape == shape
    exact = torch.stack(addends).double().sum(0)
    error = (results[0].double() - exact).abs()
    assert bool((error <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-10).all())


def test_a_tensor_alone_is_its_own_sum_and_stays_as_it_was():
    values = torch.randn(100, 90)
    transposed = values.t()
    result = exact_all_reduce(transposed)
    assert result.equal(transposed)
    assert result.data_ptr() != values.data_ptr()
    needs_gradient = torch.ones(2, requires_grad=True)
    assert not exact_all_reduce([needs_gradient]).requires_grad


def test_blocks_have_scales_of_their_own_and_sums_beyond_the_dtype_are_infinite_unless_they_come_back():
    values = torch.ones(3 * fixed_point.BLOCK + 1, dtype=torch.float64)
    for block, scale in enumerate((1e300, 1e-300, 5e-324, 1.0)):
        values[block * fixed_point.BLOCK :] = scale
    assert exact_all_reduce([values, values]).equal(2 * values)
    assert exact_all_reduce([values, -values]).equal(torch.zeros_like(values))
    large = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert exact_all_reduce([large, large]).item() == math.inf
    assert exact_all_reduce([large, large, -large]).equal(large)
    assert exact_all_reduce([torch.tensor([60000.0], dtype=torch.float16)] * 2).item() == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_follows_ieee_and_harms_no_neighbour(by_rank, dtype):
    inf, nan = math.inf, math.nan
    rows = [
        [inf, 1.0, inf, nan, -inf, 0.1, inf, 1000.0],
        [1.0, -inf, -inf, 1.0, -inf, 0.2, 1.0, 3.0],
        [inf, 2.0, 0.0, 2.0, 1.0, 0.3, nan, -1000.0],
        [2.0, 3.0, 1.0, 3.0, 2.0, 0.4, -inf, 0.25],
    ]
    addends = [torch.tensor(row, dtype=dtype) for row in rows]
    expected = torch.tensor([inf, -inf, nan, nan, -inf, 0.0, nan, 0.0])
    results = [exact_all_reduce(addends)]
    for places in ([0, 0, 0, 0], [0, 1, 2, 0], [2, 1, 2, 1]):
        results += by_rank(exact_all_reduce, spread(addends, places))
    assert same_bits(results)
    special = ~expected.isfinite()
    assert same_bits([results[0][special].float(), expected[special]])
    for place in (5, 7):
        values = [float(addend[place]) for addend in addends]
        off = abs(Fraction(results[0][place].item()) - sum(map(Fraction, values), Fraction()))
        assert off <= bound([1000.0, *values[1:]], dtype, bits=32) + bound(values, dtype)


def test_a_million_addends(by_rank):
    pair = [torch.tensor([0.1, 1e-3, 2.0**-100]), torch.tensor([0.1, -7.0, 1.0])]
    half = 2**19
    results = by_rank(exact_all_reduce, [[pair[0]] * half, [], [pair[1]] * half])
    assert same_bits(results)
    for place in range(3):
        one, other = (float(addend[place]) for addend in pair)
        exact = half * (Fraction(one) + Fraction(other))
        allowed = max(abs(one), abs(other), 7.0) * 2.0**-22 + 2.0**-24 * abs(float(exact))
        assert abs(Fraction(results[1][place].item()) - exact) <= allowed


def test_eight_bytes_an_element_whatever_the_number_of_addends(by_rank):
    class CountingGroup(Group):
        nbytes = 0

        def start_all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Work:
            self.nbytes += tensor.nbytes
            return super().start_all_reduce(tensor, maximum)

    def counted(addends: list[torch.Tensor], group: Group) -> int:
        counting = CountingGroup(group.process_group, group.ranks, group.rank, group.device, None, group.timeout)
        exact_all_reduce(addends, counting)
        return counting.nbytes

    values = torch.randn(10 * fixed_point.BLOCK)
    values[5] = math.inf
    for count in (1, 50):
        for nbytes in by_rank(counted, [[values] * count, [values], []]):
            assert 8 * values.numel() < nbytes <= 8 * values.numel() + 8 * 10 + 200


def test_mistakes_are_told_on_every_rank(by_rank):
    float_, double, pair = torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(2)
    for shares, words in (
        ([[float_], [double], []], ["among the ranks"] * 3),
        ([[float_], [pair], [float_]], ["among the ranks"] * 3),
        ([[], [], []], ["no rank has an addend"] * 3),
        ([[float_], [float_, pair], []], ["another rank", "make them equal", "another rank"]),
        ([[torch.ones(1, dtype=torch.int64)], [float_], []], ["give float16", "another rank", "another rank"]),
        ([1.5, [float_], [None]], ["of type float; give a tensor", "another rank", "of type list; give a tensor"]),
        ([{"a": float_}, [torch.eye(2).to_sparse()], []], ["of type dict; ", "tensor.to_dense()", "another rank"]),
    ):
        for error, expected in zip(by_rank(exact_all_reduce, shares), words, strict=True):
            assert isinstance(error, UserError)
            assert expected in str(error)


@on_ranks(4)
def test_the_same_bits_by_every_algorithm_and_group():
    """Of 6 addends, of which the ranks hold 0, 1, 2 and 3."""
    generator = torch.Generator().manual_seed(0)
    addends = [torch.randn(5000, generator=generator) * 10.0**i for i in range(6)]
    alone, fourfold = (exact_all_reduce(some, rank_alone()) for some in (addends, addends * 4))
    mine = addends[(rank := dist.get_rank()) * (rank - 1) // 2 :][:rank]
    assert exact_all_reduce(mine).equal(alone)
    assert exact_all_reduce(mine, dist.new_group()).equal(alone)
    with pytest.raises(UserError, match="this rank is not one of it" if rank else "no rank has an addend"):
        exact_all_reduce(mine, dist.new_group([0]))
    assert exact_all_reduce(addends).equal(fourfold)
    for name in (*NAMES[1:], "torus:halving/direct"):
        allreduce = create(name)
        assert exact_all_reduce(mine, allreduce=allreduce).equal(alone)
        allreduce.close()


moderate = st.floats(min_value=-1e15, max_value=1e15, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-30)


def limb_sum(values: torch.Tensor, window: Window = FULL) -> Any:
    return decode(encode(values, window).sum(dim=1), window).tolist()


def tensors(floats: st.SearchStrategy[float], dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(floats, min_size=1, max_size=40).map(partial(torch.tensor, dtype=dtype))


@given(tensors(any_float32, torch.float32) | tensors(moderate, torch.float64), st.data(), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_limbs_have_the_rounded_exact_sum_whatever_the_order_and_the_ranks(values, data, ranks) -> None:
    expected, found = math.fsum(values.tolist()), limb_sum(values)
    assert abs(found - expected) <= math.ulp(expected)
    shuffled = values[torch.tensor(data.draw(st.permutations(range(len(values)))))]
    parts = [encode(shuffled[rank::ranks]).sum(dim=1) for rank in range(ranks)]
    assert decode(torch.stack(parts).sum(dim=0)).item() == found


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 2.0**58])
def test_what_does_not_fit_is_nan_and_touches_no_neighbour(bad: float) -> None:
    first, second = limb_sum(torch.tensor([[1.0, 2.0], [bad, 3.0]]), NARROW)
    assert (math.isnan(first), second) == (True, 5.0)


def test_a_narrow_window_drops_bits_of_each_value_alone_and_a_full_one_holds_a_million_of_the_largest() -> None:
    assert limb_sum(torch.tensor([1.0, 2.0**-60, 2.0**-70, -1.0]), NARROW) == 2.0**-60
    largest = torch.finfo(torch.float32).max
    assert decode(encode(torch.tensor([largest])) * 2**20).item() == largest * 2**20
