"""The rounds, run by a simulator: every rank ends with the sum, every message is received, none is in excess."""

import math
from operator import add
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import refuses

from torusgd.comm.algorithms import FLAT, METHODS, Algorithm, Round, cut, mirror, parse_algorithm, squarest

GRIDDED = [f"torus:{v}/{h}" for v in METHODS for h in METHODS]
GRIDDED += [f"hierarchical:{v}/{h}" for v in METHODS for h in METHODS if h != "doubling"]
PLANS = st.integers(1, 13).flatmap(
    lambda ranks: (
        st.builds(parse_algorithm, st.sampled_from(list(FLAT)), st.just(ranks), chunks=st.integers(1, 3))
        | st.builds(
            parse_algorithm, st.sampled_from(GRIDDED), st.just(ranks),
            st.sampled_from([(y, ranks // y) for y in range(1, ranks + 1) if ranks % y == 0]), st.integers(1, 3),
        )
    )
)  # fmt: skip


def numbered(how: Algorithm, length: int) -> tuple[list[list[Any]], list[int]]:
    """A tensor for each rank, and their sum."""
    inputs = [[(rank + 1) * 1000 + i for i in range(length)] for rank in range(math.prod(how.grid))]
    return inputs, [sum(column) for column in zip(*inputs, strict=True)]


def carry_out(routes: list[list[list[Round]]], tensors: list[list]) -> None:
    """The routes of all ranks in step, chunk by chunk, on their tensors; fails on a message without a partner."""
    for chunk in range(len(routes[0])):
        for step, parts in enumerate(zip(*[route[chunk] for route in routes], strict=True)):
            wire: dict[tuple[int, int], list] = {}
            for rank, part in enumerate(parts):
                for peer, low, high in part.sends:
                    wire.setdefault((rank, peer), []).append(tensors[rank][low:high])
            for rank, part in enumerate(parts):
                for number, (peer, low, high) in enumerate((*part.adds, *part.copies)):
                    values, own = wire[peer, rank].pop(0), tensors[rank][low:high]
                    assert len(values) == high - low > 0
                    is_added = number < len(part.adds)
                    tensors[rank][low:high] = list(map(add, own, values)) if is_added else values
            assert not any(wire.values()), f"step {step}: a message that nobody receives"


def elements_sent(rounds: list[Round]) -> int:
    return sum(m.high - m.low for turn in rounds for m in turn.sends)


@settings(deadline=None, max_examples=300)
@given(PLANS, st.integers(0, 40), st.randoms(use_true_random=True))  # others draw NaN, which is not equal to itself
def test_every_rank_ends_with_the_sum_and_of_floats_with_the_same_bits(how, length, random):
    integers, total = numbered(how, length)
    floats = [[random.gauss(0, 1) for _ in range(length)] for _ in integers]
    for tensors in (integers, floats):
        carry_out([how.rounds(rank, length) for rank in range(len(tensors))], tensors)
    assert integers == [total] * len(integers)
    assert floats == [floats[0]] * len(floats)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 12, 16, 17])
@pytest.mark.parametrize("name", ["ring", "halving-doubling", "direct", "torus", "torus:halving/direct"])
def test_algorithms_move_no_more_than_the_least_possible_and_a_reduce_scatter_half_of_it(name, ranks):
    how = parse_algorithm(name, ranks)
    for rank in range(ranks):
        (whole,), (half, (low, high)) = how.rounds(rank, 1000 * ranks), how.scatter(rank, 1000 * ranks, None)
        assert (elements_sent(whole), elements_sent(half)) == (2 * (ranks - 1) * 1000, (ranks - 1) * 1000)
        assert high - low == 1000


@pytest.mark.parametrize(("name", "rounds"), [("binomial-tree", 2 * 4), ("double-tree", 2 * 4), ("chain", 2 * 12)])
def test_a_tree_moves_the_whole_over_each_of_its_edges_up_and_down(name, rounds):
    found = [parse_algorithm(name, 13).rounds(rank, 10)[0] for rank in range(13)]
    assert {len(each) for each in found} == {rounds}
    assert sum(map(elements_sent, found)) == 2 * 12 * 10


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (4, 4), (5, 2), (3, 7)])
def test_a_torus_moves_a_shard_on_its_vertical_axis(rows, columns):
    how, length = parse_algorithm("torus", rows * columns, (rows, columns)), 100 * rows * columns
    for rank in range(rows * columns):
        sends = [m for turn in how.rounds(rank, length)[0] for m in turn.sends]
        across, down = (sum(m.high - m.low for m in sends if m.peer in axis.members) for axis in how.axes(rank))
        assert across == 2 * (columns - 1) * length // columns
        assert down == 2 * (rows - 1) * length // (columns * rows)


def test_grids():
    assert [squarest(n) for n in (1, 7, 12, 16)] == [(1, 1), (1, 7), (3, 4), (4, 4)]
    refuses("a grid of fewer ranks", parse_algorithm, "torus", 16, (3, 5), about="grid 3x5")
    refuses("an all-reduce of no name", parse_algorithm, "tree", 16, about="allreduce tree")
    for name in ("torus:tree", "torus:ring/", "torus:ring/tree"):
        refuses("methods that an axis does not have", parse_algorithm, name, 16, about=f"allreduce {name}", NAME=name)
    refuses("a leader's row without shards", parse_algorithm, "hierarchical:ring/doubling", 16, about="allreduce hier")
    for name in ("torus:halving/ring", "torus:direct", "torus", "hierarchical:halving"):
        assert parse_algorithm(name, 12).name == name
    assert str(parse_algorithm("torus", 12, (4, 3), chunks=2)) == "torus 4x3 in 2 chunks"


@settings(deadline=None, max_examples=300)
@given(PLANS, st.integers(0, 40), st.none() | st.lists(st.integers(0, 40), unique=True).map(sorted))
def test_a_reduce_scatter_leaves_each_rank_its_span_and_its_mirror_gathers_them(how, length, stops):
    tensors, total = numbered(how, length)
    scatters = [how.scatter(rank, length, stops) for rank in range(len(tensors))]
    spans = [span for _, span in scatters]
    assert sorted(i for low, high in spans for i in range(low, high)) == list(range(length))
    if stops is not None:
        assert {edge for span in spans for edge in span} <= {0, length, *stops}
    carry_out([[rounds] for rounds, _ in scatters], tensors)
    for (low, high), values in zip(spans, tensors, strict=True):
        assert values[low:high] == total[low:high]
        values[:low], values[high:] = [None] * low, [None] * (length - high)
    carry_out([[mirror(rounds)] for rounds, _ in scatters], tensors)
    assert tensors == [total] * len(tensors)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 9), st.lists(st.integers(0, 300), unique=True))
def test_edges_go_to_the_nearest_stop(low, width, parts, stops):
    high = low + width
    allowed = sorted(stops)
    free, edges = cut(low, high, parts), cut(low, high, parts, allowed)
    inside = [low, *(stop for stop in allowed if low <= stop <= high), high]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1], len(edges)) == (low, high, parts + 1)
    for ideal, edge in zip(free, edges, strict=True):
        assert edge in inside
        assert abs(edge - ideal) == min(abs(stop - ideal) for stop in inside)
