"""Layouts of column blocks over ranks, and the sum whose branches are sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.recipe.compatibility import allowed_parallel
from torusgd.tensor_parallel.exchange import Layout, sum_in_tree


@settings(deadline=None, max_examples=100)
@given(blocks=st.integers(1, 48), seed=st.integers(0, 99), data=st.data())
def test_the_sum_has_the_same_bits_for_every_allowed_number_of_parts(
    blocks: int, seed: int, data: st.DataObject
) -> None:
    addends = torch.randn(blocks, 5, generator=torch.Generator().manual_seed(seed))
    ranks = blocks * data.draw(st.integers(1, 3))
    want = sum_in_tree(addends)
    for parts in allowed_parallel(ranks, blocks):
        layout = Layout(parts, blocks)
        of_ranks = [sum_in_tree(addends[block] for block in layout.held(rank)) for rank in range(parts)]
        assert torch.equal(sum_in_tree(of_ranks), want)
    torch.testing.assert_close(want, addends.sum(dim=0))


@pytest.mark.parametrize(("parts", "blocks"), [(1, 8), (2, 8), (8, 8), (3, 6), (1, 1)])
def test_every_piece_is_held_once(parts: int, blocks: int) -> None:
    layout = Layout(parts, blocks)
    ranks = 2 * parts
    held = [piece for rank in range(ranks) for piece in layout.activations(rank)]
    assert len(held) == len(set(held)) == ranks * blocks
    for rank in range(ranks):
        assert {piece.owner for piece in layout.activations(rank)} == set(layout.owners(rank))
        assert rank in layout.owners(rank)
