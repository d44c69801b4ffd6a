"""Passes in C give what torch's operators give, in any layout and by any number of threads, or they aren't used."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.arithmetic.test_machines import GOLDEN, run
from torch import Tensor
from torch.nn import functional as F

from torusgd.arithmetic import functions, passes, portable
from torusgd.arithmetic.methods import _is_exact
from torusgd.arithmetic.scales import grid_offset

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many for C, of tensors of any size; torch's own forms are the standard."""
    monkeypatch.setattr(passes, "LEAST", 1)
    monkeypatch.setattr(passes, "_LEAST_VALUES", 1)
    monkeypatch.setattr(passes, "_A_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    assert not isinstance(passes.compiled(), str)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1000


def are_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.nan_to_num(7e37), b.nan_to_num(7e37)) and a.dtype == b.dtype for a, b in pairs)


IMAGES = normal(3, 5, 7, 16)
SLICED = {
    "row": (normal(37, 19), torch.rand(37, 1)),
    "column": (normal(37, 19), torch.rand(1, 19)),
    "transposed": (normal(37, 19).mT, torch.rand(1, 37)),
    "image": (IMAGES, torch.rand(3, 1, 1, 1)),
    "channel": (IMAGES, torch.rand(1, 1, 1, 16)),
    "image and channel": (IMAGES, torch.rand(3, 1, 1, 16)),
    "batch": (normal(3, 7, 16), torch.rand(3, 1, 16)),
    "with gaps": (normal(37, 40)[:, ::2], torch.rand(37, 1)),
    "a scale for each": (normal(3, 7, 16), torch.rand(1, 7, 16)),
    "ties and ends": (torch.tensor([[0.5, -0.5, 1.5, 127.5, -128.5, 16256, -16256, 1e-45]]), torch.ones(1, 1)),
}


@needs_compiler
@pytest.mark.parametrize("name", SLICED)
def test_slices(name: str, threads: int) -> None:
    x, scale = SLICED[name]
    upper, lower = passes.slices(x, scale)
    assert are_equal((upper, lower), passes._slices_in_torch(x, scale))
    assert torch.equal(upper.int() * 256 + lower, (x * scale).round().int())
    assert upper.stride() == lower.stride()


@needs_compiler
@pytest.mark.parametrize("layout", ["rows", "channels last", "every second pixel", "channels first"])
def test_sums_are_scaled_and_rounded_once(layout: str, threads: int) -> None:
    draw = torch.Generator().manual_seed(1)
    terms = tuple(torch.randint(-(2**30), 2**30, (4 * 6 * 5, 8), generator=draw, dtype=torch.int32) for _ in range(4))
    down = torch.tensor([2.0**-30, 2.0**-149, math.nan, 2.0**90], dtype=torch.float64)
    across = torch.full((8,), 2.0**-20, dtype=torch.float64)

    def out() -> Tensor:
        if layout == "every second pixel":
            return torch.zeros(4, 12, 15, 8)[:, ::2, ::3]
        if layout == "channels first":
            return torch.zeros(4, 8, 6, 5).permute(0, 2, 3, 1)
        return torch.zeros(4, 6, 5, 8)

    expected, found = out(), out()
    if layout == "rows":
        down, expected, found = down.repeat_interleave(30), expected.view(120, 1, 1, 8), found.view(120, 1, 1, 8)
    passes._scaled_in_torch(terms, down, across, expected)
    passes.scaled(terms, down, across, found)
    assert are_equal((found,), (expected,))
    assert found.isnan().sum() == 240
    more = torch.ones(120, 8, dtype=torch.float64)
    assert are_equal((passes.joined(terms, more.clone()),), (passes._added_in_torch(terms, more),))


@needs_compiler
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_polynomials(count: int, threads: int) -> None:
    x = normal(count).double()
    x[-1] = math.nan if count == 63 else -math.inf
    for coefficients in (functions.ERF, functions.EXP2, (0.5, -2.0)):
        expected = passes._polynomial_in_torch(x, coefficients)
        assert are_equal((passes.polynomial(x, coefficients),), (expected,))


@needs_compiler
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dims", [(0, 2, 3), (1, 2, 3), (2, 3), (-2, -1), (0,), (3,), (1,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("special", [0.0, math.inf, -math.nan, math.nan])
def test_extremes_and_grid_sums(dims: tuple[int, ...], last: bool, special: float, threads: int) -> None:
    x = normal(2, 6, 300, 4, seed=2).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    x[1, 2, 150, 3] = special
    least, most = x.amin(dims, True), x.amax(dims, True)
    found = passes.extremes(x, dims)
    assert torch.maximum(*found).isnan().equal(most.isnan())
    assert are_equal(tuple(each[~most.isnan()] for each in found), (least[~most.isnan()], most[~most.isnan()]))
    amax = torch.maximum(most, -least)
    center = torch.where(amax.isfinite(), (least + most) / 2, 0.0)
    for middle, offset in ((None, grid_offset(amax)), (center, grid_offset(amax * amax * 4))):
        ours = passes.multiples(x, offset, dims, middle)
        values = x if middle is None else (x - middle) * (x - middle)
        counts = ((values + offset).view(torch.int32) - offset.view(torch.int32)).sum(dims, True)
        assert (ours is None) == (dims == (0, 2, 3) and not last), "what lies side by side is read in C"
        assert ours is None or torch.equal(ours[offset.isfinite()], counts[offset.isfinite()])


@pytest.fixture
def without_verdict() -> Iterator[None]:
    passes.compiled.cache_clear()
    yield
    passes.compiled.cache_clear()


CHANGES = [
    ("+ 128) >> 8", "+ 127) >> 8"), ("12582912.0f", "12582913.0f"), ("256.0 *", "255.0 *"), ("65536.0", "65535.0"),
    ("row / width % height", "row / height % width"), ("total[i] +=", "total[i] ="), ("key > largest", "key < largest"),
    ("key < low[i]", "key > low[i]"), ("0x7fffffff", "0x3fffffff"), ("distance * distance", "distance * middles[i]"),
    ("block += ROWS", "block += 1 + ROWS"), ("first += TILE", "first += TILE + 1"), ("sum * by", "(float)sum * by"),
    ("int32_t bits;", "int32_t bits"), ("sum[i] * at[i]", "sum[i] * sum[i]"),
    ("terms - 2; term >= 0", "terms - 2; term > 0"),
]  # fmt: skip


@needs_compiler
@pytest.mark.usefixtures("without_verdict")
@pytest.mark.parametrize("change", CHANGES, ids=" to ".join)
def test_c_that_gives_anything_else_is_not_used(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = passes._SOURCE.read_text()
    assert change[0] in source
    (tmp_path / "passes.c").write_text(source.replace(*change))
    monkeypatch.setattr(passes, "_SOURCE", tmp_path / "passes.c")
    assert isinstance(passes.compiled(), str)


@pytest.mark.usefixtures("without_verdict")
@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", "no C compiler (no-such-compiler; CC names another)"),
        ("false", "the C compiler failed (exit code 1)"),
        ("sh -c 'echo no header >&2; exit 3'", "the C compiler failed (no header)"),
        ("true", "what the C compiler gives can't be used"),
        ("cc 'not closed", "what the C compiler gives can't be used (No closing quotation)"),
    ],
)
def test_without_a_compiler_torch_does_it(compiler: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert str(passes.compiled()).startswith(why)
    assert passes.extremes(torch.arange(40000.0), (0,))[1].item() == 39999


@needs_compiler
@pytest.mark.usefixtures("without_verdict")
def test_a_command_with_options_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -g0")
    assert not isinstance(passes.compiled(), str)


@needs_compiler
@pytest.mark.usefixtures("without_verdict")
def test_other_defaults_of_torch_are_no_matter() -> None:
    a, b, x, weight = normal(300, 200), normal(200, 400), normal(8, 16, 32, 32), normal(32, 16, 3, 3)
    with portable(["int8"]):
        expected = a @ b, F.conv2d(x, weight), x.amax()
        passes.compiled.cache_clear()
        _is_exact.clear()
        torch.set_default_dtype(torch.float64)
        try:
            found = a @ b, F.conv2d(x, weight), x.amax()
        finally:
            torch.set_default_dtype(torch.float32)
    assert are_equal(found, expected)


POOLS = {
    "average": lambda x: F.avg_pool2d(x, 2), "maximum": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (5, 7)), "upsampling": lambda x: F.interpolate(x, scale_factor=2),
    "mean": lambda x: x.mean((-2, -1)), "softmax": lambda x: x.softmax(-1), "last norm": lambda x: x.norm(dim=-1),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", POOLS)
def test_rules_of_pixels_have_the_same_bits_with_and_without_c(
    name: str, last: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some count their dimensions from the end."""
    x = normal(4, 16, 24, 32).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    def results() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        with portable():
            out = POOLS[name](leaf)
            out.backward(normal(*out.shape, seed=3))
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    found = results()
    monkeypatch.setattr(passes, "compiled", lambda: "not asked for")
    assert are_equal(found, results())


@needs_compiler
def test_sums_lie_side_by_side_as_torchs_do() -> None:
    """Else a network's `view` would fail where there is a compiler."""
    x = normal(16, 8, 32, 32).contiguous(memory_format=torch.channels_last)
    with portable():
        assert x.mean(3).stride() == (256, 32, 1)
        x.mean(3).view(16, -1)


def test_the_hash_is_the_golden_one_without_a_compiler() -> None:
    assert run({"CC": "no-such-compiler"}, "portable") == GOLDEN
