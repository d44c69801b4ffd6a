"""Das et al.'s volumes and groups against the figures that the paper gives, and against brute force."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.tensor_parallel.tail import best_groups, hybrid_volume, optimal_groups


@pytest.mark.parametrize(
    ("nodes", "batch", "ofm", "none", "full"),
    [(64, 256, 4096, 2.0, 2.83), (128, 512, 4096, 4.0, 5.66), (16, 1024, 2048, 2.83, 4.0)],
)
def test_optimal_groups_of_the_paper(nodes: int, batch: int, ofm: int, none: float, full: float) -> None:
    layer = (4096, 4096 * ofm)
    assert optimal_groups(*layer, nodes, batch, overlap=0) == pytest.approx(none, abs=0.005)
    assert optimal_groups(*layer, nodes, batch, overlap=1) == pytest.approx(full, abs=0.005)


@settings(deadline=None, max_examples=60)
@given(
    ifm=st.integers(16, 30_000),
    ofm=st.integers(16, 10_000),
    nodes=st.integers(2, 256),
    batch=st.integers(16, 4096),
    overlap=st.floats(0, 1),
)
def test_the_formula_is_the_minimum_of_the_volume(ifm: int, ofm: int, nodes: int, batch: int, overlap: float) -> None:
    layer = (ifm, ifm * ofm)

    def volume(groups: float) -> float:
        """As in the paper, a node's own part included."""
        return 2 * 4 * ifm * batch / groups + 4 * ifm * ofm * groups / nodes * (2 - overlap)

    best = optimal_groups(*layer, nodes, batch, overlap)
    scale = 1 + 1e-9
    assert 1 <= best <= nodes
    assert volume(best) <= volume(max(1.0, best * 0.9)) * scale
    assert volume(best) <= volume(min(nodes, best * 1.1)) * scale
    found = best_groups(*layer, nodes, batch, overlap)
    assert nodes % found == 0
    exact = [sum(hybrid_volume(*layer, nodes, batch, g, overlap)) for g in (1, nodes, found)]
    assert exact[2] <= min(exact[:2])


def test_the_ends_of_hybrid_parallelism() -> None:
    layer = (4096, 4096 * 4096)
    # G = 1 sends activations alone, G = N weights alone.
    assert hybrid_volume(*layer, 8, 256, 1) == (2 * 4 * 4096 * 256 * 7 / 8, 0)
    assert hybrid_volume(*layer, 8, 256, 8) == (0, 4 * 4096 * 4096 * 2 * 7 / 8)
