"""Products over integers: every method gives the exact integer, scales fit, and a method that is wrong is left out."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from torusgd.arithmetic import METHODS, counting, methods, portable
from torusgd.arithmetic.methods import Operand, is_product, matmul, only_methods, quantised
from torusgd.arithmetic.scales import LARGEST, grid_offset, scales
from torusgd.errors import RunError, UserError

floats, sides = st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 9)


def by_every_method(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The product by each method that a CPU has."""
    for name in ("float64", "int8", "float32"):
        with only_methods([name]):
            product = matmul(a, b)
        yield product


@pytest.fixture
def fresh() -> Iterator[None]:
    """No method has been tried yet, and none that a test adds stays."""
    with patch.dict(METHODS), patch.dict(methods._is_exact, clear=True):
        yield


@given(st.lists(floats, min_size=1, max_size=20))
@settings(max_examples=300)
def test_scale_is_the_largest_power_of_two_that_fits(values: list[float]) -> None:
    amax = float(np.abs(np.array(values, np.float32)).max())
    scale, inverse = (number.item() for number in scales(torch.tensor(amax)))
    assert scale * inverse == 1
    assert round(amax * scale) <= LARGEST  # Python rounds half to even, too
    assert scale == 2.0**127 or round(amax * scale * 2) > LARGEST


def test_scale_at_the_edges() -> None:
    # 16256.5 is a tie, and goes to the even 16256.
    edges = {0.0: 2.0**127, 1e-45: 2.0**127, 1.0: 2.0**13, 16256.0: 1.0, 16256.5: 1.0, 16256.501: 0.5}
    for amax, scale in {**edges, float(np.finfo(np.float32).max): 2.0**-115}.items():
        assert scales(torch.tensor(amax))[0].item() == scale
    for bad in (float("inf"), float("nan"), -float("nan")):
        assert scales(torch.tensor(bad))[1].isnan(), "what is not finite has no inverse scale"


@given(st.lists(floats, min_size=1, max_size=30))
@settings(max_examples=200)
def test_grid_rounds_half_to_even_22_bits_below_the_largest(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    amax = x.abs().max()
    offset, unit = grid_offset(amax), 2.0 ** (max(int(np.frexp(amax.item())[1]), -126) - 22)
    if amax >= 2.0**126:
        assert offset.isnan()
    else:
        assert ((x + offset) - offset).tolist() == [round(value / unit) * unit for value in x.tolist()]


@given(sides, st.integers(1, 40), sides, st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 40, 100]))
@settings(max_examples=60)
def test_every_method_gives_the_exact_integer_rounded_once(m: int, k: int, n: int, seed: int, spread: int) -> None:
    draws = np.random.default_rng(seed)
    a, b = (
        torch.from_numpy((draws.standard_normal(s) * 2.0 ** draws.integers(-spread, spread + 1, s)).astype(np.float32))
        for s in ((m, k), (k, n))
    )
    (left, rows), (right, columns) = quantised(a, (-1,)), quantised(b, (-2,))
    exact = left.numpy().astype(np.int64) @ right.numpy().astype(np.int64)
    expected = torch.from_numpy(exact * (rows * columns).numpy()).float()
    assert all(torch.equal(product, expected) for product in by_every_method(a, b))


@pytest.mark.parametrize("terms", [1024, 1025, 4097, (1 << 17) + 1])
def test_sums_at_the_bound_are_exact_in_pieces(terms: int) -> None:
    a, b = torch.full((2, terms), 127.0 * 128), torch.full((terms, 3), -127.0 * 128)
    b[:, 1] = 16192.0  # both slices are large
    assert methods._INT_TERMS % 8 == 0, "CUDA's product takes no other widths"
    for product in by_every_method(a, b):
        assert product[0, 0].item() == np.float32(-terms * LARGEST**2)
        assert product[1, 1].item() == np.float32(terms * LARGEST * 16192)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_value_that_is_not_finite_makes_its_row_nan(bad: float) -> None:
    a, b = torch.ones(3, 4), torch.ones(4, 2)
    a[1, 2] = bad
    for product in by_every_method(a, b):
        assert product[1].isnan().all()
        assert product[[0, 2]].eq(4).all()


def test_batches_strange_strides_zeros_denormals_and_nothing() -> None:
    draws = torch.Generator().manual_seed(3)
    a, b = torch.randn(5, 4, 7, generator=draws), torch.randn(5, 7, 3, generator=draws)
    expected = torch.stack([matmul(x, y) for x, y in zip(a, b, strict=True)])
    odd = torch.empty(5 * 4 * 7 + 1)[1:].view(7, 5, 4).permute(1, 2, 0).copy_(a)
    assert all(torch.equal(product, expected) for product in (*by_every_method(a, b), *by_every_method(odd, b)))
    assert matmul(torch.zeros(2, 3), torch.ones(3, 2)).eq(0).all()
    # The largest scale is 2**127: below 2**-128 an operand is zero, while a product may well be that small.
    assert matmul(torch.full((1, 1), 1e-40), torch.full((1, 1), 2.0)).item() == 0
    assert matmul(torch.full((1, 1), 2.0**-100), torch.full((1, 1), 2.0**-45)).item() == 2.0**-145
    assert matmul(torch.ones(2, 0), torch.ones(0, 3)).eq(0).all()
    assert matmul(torch.ones(0, 2), torch.ones(2, 3)).shape == (0, 3)
    assert matmul(torch.full((1, 1), 3e38), torch.full((1, 1), 10.0)).isinf().all()


def exact_but(name: str, spoil: Callable[[Operand, Tensor], Tensor]) -> None:
    """A method that is right but for what is done to its products; it stands among METHODS from now on."""
    right = METHODS["float64"]
    METHODS[name] = replace(right, name=name, product=lambda a, b: (spoil(a, *right.product(a, b)),))


@pytest.mark.usefixtures("fresh")
def test_a_method_off_by_one_in_one_element_of_one_shape_is_left_out_there() -> None:
    calls = list[Tensor]()

    def off_by_one(a: Operand, product: Tensor) -> Tensor:
        calls.append(product)
        if product.shape == (3, 5):
            product[1, 2] += 1
        return product

    exact_but("off", off_by_one)
    draws = torch.Generator().manual_seed(4)
    a, b = torch.randn(3, 7, generator=draws), torch.randn(7, 5, generator=draws)
    with only_methods(["float64"]):
        right = matmul(a, b)
    with only_methods(["off", "float64"]):
        assert torch.equal(matmul(a, b), right)
        tries = len(calls)
        assert torch.equal(matmul(a, b), right)
        assert len(calls) == tries  # the verdict is remembered
        matmul(a, torch.cat([b, b], 1))
        assert len(calls) > tries  # another shape has its own
    with only_methods(["off"]), pytest.raises(RunError, match="no product of off is exact"):
        matmul(a, b)
    with pytest.raises(UserError, match="float16"), only_methods(["float16"]):
        pass


@pytest.mark.usefixtures("fresh")
def test_a_method_is_tried_on_the_runs_own_operands_too() -> None:
    # Right at the bound, wrong where an operand is small.
    exact_but("own", lambda a, product: product + (a[0].abs().max() < 16000))
    with only_methods(["own"]), pytest.raises(RunError):
        matmul(torch.full((2, 2), 1.0), torch.ones(2, 2))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("text", ["CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_a_lack_of_memory_is_an_error_and_no_verdict(text: str) -> None:
    def short(a: Operand, product: Tensor) -> Tensor:
        raise RuntimeError(text)

    exact_but("short", short)
    with only_methods(["short"]), pytest.raises(RuntimeError, match=text):
        matmul(torch.ones(2, 2), torch.ones(2, 2))
    assert not methods._is_exact


@given(st.integers(0, 2**32 - 1), st.integers(0, 11), st.sampled_from([1, -1, 2**20, 2**40]))
@settings(max_examples=50)
def test_freivalds_check_finds_any_single_error(seed: int, place: int, error: int) -> None:
    draws = np.random.default_rng(seed)
    a, b = ((torch.from_numpy(draws.integers(-LARGEST, LARGEST + 1, s)).double(),) for s in ((3, 6), (6, 4)))
    product = a[0] @ b[0]
    assert is_product(a, b, product)
    product.view(-1)[place] += error
    assert not is_product(a, b, product)


def test_pairs_that_multiply_to_nothing_are_counted() -> None:
    """Of each row and column the last value is below half a unit of its scale; a zero is no number that is lost."""
    a = torch.tensor([[1.0, 0.5, 0.0, 1e-5], [2.0, 0.0, 1.0, 1e-5]], requires_grad=True)
    b = torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    with portable(), counting() as pairs:
        a @ b
        assert (pairs.lost, pairs.all) == (2, 6)
        (a @ b).sum().backward()
        assert pairs.all == 2 * 6 + 2 * 4, "and those of the gradient"
    with portable():
        a @ b
    assert pairs.all == 20, "outside nothing is counted"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_pairs_of_a_convolution_are_counted_by_channel(groups: int) -> None:
    x, per_value = torch.ones(1, 4, 3, 3), 4 // groups
    x[:, 1, 0, 0] = 1e-6
    with portable(), counting() as pairs:
        F.conv2d(x, torch.ones(4, per_value, 1, 1, requires_grad=True), None, 1, 0, 1, groups).sum().backward()
    assert pairs.all == 36 * per_value + 36 * 36, "of the output and of the weights"
    assert per_value <= pairs.lost
