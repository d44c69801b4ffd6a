import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arithmetic.test_rules import threads

from torusgd.optim import BLOCK, layer_norms, norms, norms_from_blocks
from torusgd.optim import block_norms as block_norms_of
from torusgd.optim.norms import norms_by_lanes

SIZES = st.one_of(st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]), st.integers(1, 40 * BLOCK))


def block_norms(tensor: torch.Tensor) -> torch.Tensor:
    return block_norms_of([tensor])[0]


def random_tensor(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(SIZES, st.lists(st.integers(0, 40), max_size=4), st.integers(0, 31), st.integers(0, 2**31))
def test_shards_at_block_edges_have_the_bits_of_the_whole(size: int, cuts: list[int], offset: int, seed: int) -> None:
    whole = random_tensor(size, seed)
    # The shards lie at another alignment in memory.
    moved = torch.empty(size + offset)[offset:].copy_(whole)
    edges = sorted({0, size, *(min(cut * BLOCK, size) for cut in cuts)})
    joined = torch.cat([block_norms(moved[start:stop]) for start, stop in itertools.pairwise(edges)])
    assert torch.equal(joined, block_norms(whole))
    assert torch.equal(norms_from_blocks([joined])[0], layer_norms([whole])[0])


@settings(deadline=None, max_examples=40)
@given(SIZES, st.integers(0, 2**31))
def test_norm_is_that_of_float64_within_rounding(size: int, seed: int) -> None:
    tensor = random_tensor(size, seed)
    expected = math.sqrt(math.fsum(x * x for x in tensor.tolist()))
    assert layer_norms([tensor])[0].item() == pytest.approx(expected, rel=2e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(0, 2**31))
def test_a_norm_does_not_depend_on_the_tensors_beside_it(sizes: list[int], seed: int) -> None:
    tensors = [random_tensor(size, seed + i) for i, size in enumerate(sizes)]
    together = layer_norms(tensors)
    assert together.dtype == torch.float64
    assert torch.equal(together, torch.stack([norms_from_blocks([block_norms(t)])[0] for t in tensors]))


def test_threads_and_memory_formats_change_nothing() -> None:
    tensor = random_tensor(300 * BLOCK + 5, 0)
    one = block_norms(tensor)
    with threads(2):
        assert torch.equal(block_norms(tensor), one)
    tensor = random_tensor(64 * 32 * 9, 1).view(64, 32, 3, 3)
    assert torch.equal(block_norms(tensor.contiguous(memory_format=torch.channels_last)), block_norms(tensor))


@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_value_that_is_not_finite_shows_in_its_block_and_in_the_norm(size: int, value: float) -> None:
    for position in {0, size // 2, size - 1}:
        tensor = torch.ones(size)
        tensor[position] = value
        blocks = block_norms(tensor)
        assert (~blocks.isfinite()).nonzero().flatten().tolist() == [position // BLOCK]
        assert not norms_from_blocks([blocks])[0].isfinite()


def test_small_shapes() -> None:
    assert block_norms(torch.tensor(-3.0)).tolist() == [3.0]
    assert block_norms(torch.zeros(0)).shape == (0,)
    assert layer_norms([torch.zeros(0), torch.ones(2, 2), torch.zeros(5)]).tolist() == [0.0, 2.0, 0.0]
    assert (norms_from_blocks([]).shape, norms_from_blocks([torch.zeros(0)]).tolist()) == ((0,), [0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_measured_in_float32(dtype: torch.dtype) -> None:
    tensor = random_tensor(2 * BLOCK, 3).to(dtype)
    assert torch.equal(block_norms(tensor), block_norms(tensor.float()))


def test_the_norms_of_a_gpu_are_those_of_their_definition_in_shards_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(BLOCK + 77, generator=torch.Generator().manual_seed(5))
    ours = norms_by_lanes([tensor])
    torch.testing.assert_close(ours, block_norms(tensor), rtol=1e-6, atol=0)
    padded = np.zeros(2 * BLOCK)
    padded[: len(tensor)] = tensor.numpy()
    lanes = np.zeros((2, 256))
    for chunk in range(0, BLOCK, 256):
        lanes += padded.reshape(2, BLOCK)[:, chunk : chunk + 256] ** 2
    while lanes.shape[1] > 1:
        low, high = np.split(lanes, 2, axis=1)
        lanes = low + high
    assert np.array_equal(ours.numpy(), np.sqrt(lanes[:, 0]).astype(np.float32))
    # Shards have the norms of the whole.
    tensor, other = torch.randn(2 * BLOCK + 9), torch.randn(45)
    whole = norms_by_lanes([other, tensor])
    monkeypatch.setattr(norms, "_BLOCKS_AT_A_TIME", 2)
    assert torch.equal(whole, norms_by_lanes([other, tensor[:BLOCK], tensor[:0], tensor[BLOCK:]]))
    assert norms_by_lanes([tensor[:0]]).shape == (0,)
    assert norms_by_lanes([torch.tensor([1.0, torch.nan])]).isnan().all()
