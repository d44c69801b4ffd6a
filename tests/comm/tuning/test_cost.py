"""The price of an all-reduce: its closed formulas against the real schedule, counted message by message."""

import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.comm.algorithms import FLAT, TREES, Algorithm, parse_algorithm, squarest
from torusgd.comm.tuning.cost import AlphaBeta, Topology, candidates, price, rank_candidates, seconds, total

A, B = 5e-3, 8e-9
SIZE = 1 << 22
INSIDE, BETWEEN = AlphaBeta(1.0, 1.0), AlphaBeta(10.0, 3.0)


class Counted(NamedTuple):
    """The schedule's own figures, with the links above."""

    chain: float  # alphas of the longest chain of messages, each of which must have arrived before the next one leaves
    lockstep: float  # alphas if every round began when the slowest message of the one before was there
    peers: int  # of the rank that has most of them, over all rounds
    per_byte: float  # seconds a byte of the busiest rank's or host's link, over all rounds


def counted(algorithm: Algorithm, per_host: int) -> Counted:
    """Walks through the rounds of all ranks at once."""
    ranks = algorithm.grid[0] * algorithm.grid[1]
    elements = 4 * ranks
    rounds = zip(*(algorithm.rounds(rank, elements)[0] for rank in range(ranks)), strict=True)
    there = [0.0] * ranks
    lockstep, peers, per_byte = 0.0, 0, 0.0
    for turns in rounds:
        before, alphas, most = list(there), [0.0], 0
        within, across = [0], [[0, 0] for _ in range(-(-ranks // per_host))]
        for rank, turn in enumerate(turns):
            for way, messages in enumerate((turn.sends, turn.adds + turn.copies)):
                near = [m for m in messages if m.peer // per_host == rank // per_host]
                within.append(sum(m.high - m.low for m in near))
                across[rank // per_host][way] += sum(m.high - m.low for m in messages) - within[-1]
                most = max(most, len({m.peer for m in messages}))
                links = [INSIDE if m in near else BETWEEN for m in messages]
                alphas += [link.alpha for link in links]
                if way == 1:
                    arrivals = [before[m.peer] + link.alpha for m, link in zip(messages, links, strict=True)]
                    there[rank] = max(there[rank], *arrivals, 0.0)
        lockstep += max(alphas)
        peers += most
        per_byte += max(max(within) * INSIDE.beta, max(map(max, across)) * BETWEEN.beta) / elements
    return Counted(max(there), lockstep, peers, per_byte)


def grids_of(ranks: int) -> tuple[tuple[int, int], ...]:
    return tuple((rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0)


def is_aligned(algorithm: Algorithm, per_host: int) -> bool:
    """Rows lie within hosts or fill them, and pairs of doubling lie within hosts or in two."""
    columns = algorithm.grid[1]
    fits = per_host % columns == 0 or columns % per_host == 0
    return fits and ("doubling" not in (algorithm.vertical, algorithm.horizontal) or per_host.bit_count() == 1)


ALONE = st.tuples(st.integers(2, 40), st.just(1))


@settings(deadline=None, max_examples=250)
@given(st.data(), ALONE | st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_every_algorithm_costs_what_its_schedule_does(data, network):
    per_host, ranks = network[1], math.prod(network)
    listed = list(candidates(ranks, per_host, grids_of(ranks))) if ranks > 1 else [parse_algorithm("ring", 1)]
    trees = [parse_algorithm(name, ranks) for name in TREES] if per_host.bit_count() == 1 else []
    algorithm = data.draw(st.sampled_from([*listed, *trees]))
    want, phases = counted(algorithm, per_host), price(algorithm, Topology(per_host, INSIDE, BETWEEN, message=1.0))
    cost = total(cost for _, cost in phases)
    assert cost.work == pytest.approx(want.peers)
    if per_host == 1 or algorithm in trees:  # with one kind of link the chain is as long as the rounds
        assert cost.latency == pytest.approx(want.lockstep)
    # Nothing is quicker than its longest chain, but for where on its way the chain begins: a few hops a phase.
    assert want.chain - 2.5 * len(phases) * (BETWEEN.alpha - INSIDE.alpha) <= cost.latency <= want.lockstep + 1e-9
    if is_aligned(algorithm, per_host):
        assert cost.per_byte == pytest.approx(want.per_byte)
    else:  # hosts are not alike then: the formula takes the worst that there can be for all of them
        assert 0.8 < cost.per_byte / want.per_byte < 2.6


def one_rank_a_host(message: float = 0.0) -> Topology:
    return Topology(1, AlphaBeta(A, B), AlphaBeta(A, B), message)


def took(name: str, ranks: int, topology: Topology | None = None, size: float = SIZE, **how: Any) -> float:
    return seconds(parse_algorithm(name, ranks, **how), size, topology or one_rank_a_host())


FORMULAS = ("ring", "halving-doubling", "direct", "doubling", "binomial-tree", "chain")


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 40))
def test_flat_algorithms_cost_what_the_literature_says(ranks):
    transfer = 2 * (ranks - 1) / ranks * SIZE * B
    log = math.ceil(math.log2(ranks))
    odd = 0 if ranks.bit_count() == 1 else 2
    assert {name: took(name, ranks, chunks=4 if name == "chain" else 1) for name in FORMULAS} == pytest.approx({
        "ring": 2 * (ranks - 1) * A + transfer,
        "halving-doubling": 2 * log * A + transfer,
        "direct": 2 * A + transfer,
        "doubling": (ranks.bit_length() - 1 + odd) * (A + SIZE * B),
        "binomial-tree": 2 * log * (A + SIZE * B),
        "chain": 2 * (ranks - 1) * A + 2 * (ranks - 1 + 3) * SIZE / 4 * B,
    })  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(FLAT)), st.integers(2, 1000), st.floats(1, 1e9))
def test_nothing_is_below_the_lower_bounds_and_no_tree_below_halving(name, ranks, size):
    """max(log2 P a, 2 (P - 1) / P n b): Ben-Nun and Hoefler (arXiv 1802.09941), table of all-reduces."""
    alone = one_rank_a_host()
    took = seconds(parse_algorithm(name, ranks), size, alone)
    if name != "direct":  # which sends to many at once, and the bound lets a rank send one message at a time
        assert took >= 0.999999 * (math.log2(ranks) * A)
    assert took >= 0.999999 * (2 * (ranks - 1) / ranks * size * B)
    if name in TREES:
        assert took >= 0.999999 * seconds(parse_algorithm("halving-doubling", ranks), size, alone)


@pytest.mark.parametrize(("y", "x"), [(2, 3), (4, 4), (8, 2), (5, 7)])
def test_torus_of_sony(y, x):
    """T = 2(X-1) a + 2(Y-1) a + 2 (X-1)/X n b + 2 (Y-1)/Y n/X b (arXiv 1811.05233, section 2)."""
    got = took("torus", x * y, grid=(y, x))
    moved = 2 * (x - 1) / x * SIZE + 2 * (y - 1) / y * SIZE / x
    assert got == pytest.approx((2 * (x - 1) + 2 * (y - 1)) * A + moved * B)


@pytest.mark.parametrize(("hosts", "each"), [(4, 4), (3, 2), (8, 8)])
def test_ranks_of_a_host_share_its_link(hosts, each):
    shared = Topology(each, AlphaBeta(1e-6, 1e-10), AlphaBeta(A, B))
    torus = took("torus", hosts * each, shared, grid=(hosts, each))
    across = 2 * (hosts - 1) * A + 2 * (hosts - 1) / hosts * SIZE * B
    within = 2 * (each - 1) * 1e-6 + 2 * (each - 1) / each * SIZE * 1e-10
    assert torus == pytest.approx(across + within)
    leader = took("hierarchical", hosts * each, shared, grid=(hosts, each))
    assert leader == pytest.approx(across + within + 2e-6 + 2 * (each - 1) / each * SIZE * 1e-10)


def test_what_holds_messages_back_or_lets_them_pass():
    # Fewer ranks than a host holds are near each other.
    wide, alone = (Topology(each, AlphaBeta(1e-6, 1e-10), AlphaBeta(A, B)) for each in (8, 3))
    for algorithm in candidates(3, 3):
        assert seconds(algorithm, SIZE, wide) == seconds(algorithm, SIZE, alone) < A
    # Racks and single connections hold back what leaves.
    free = Topology(4, AlphaBeta(1e-6, 1e-10), AlphaBeta(5e-6, 5e-11))
    racks, tcp = free._replace(rack_hosts=8, taper=0.25), free._replace(stream=1e-9)
    # One flow in eight hosts leaves its rack with a ring; of halving's first round all do, and a quarter fits.
    assert took("ring", 512, racks) == took("ring", 512, free)
    assert took("halving-doubling", 512, racks) > 2 * took("halving-doubling", 512, free)
    # One connection a host can't fill the card; the four of a torus with a row a host can.
    assert took("ring", 512, tcp, 1e9) > 2 * took("torus", 512, tcp, 1e9, grid=(128, 4))
    # Chunks hide the faster axis behind the slower.
    topology = Topology(4, AlphaBeta(0, 1e-9), AlphaBeta(0, 4e-9))
    one, four = (took("torus", 16, topology, grid=(4, 4), chunks=chunks) for chunks in (1, 4))
    slower = 2 * 3 / 4 * SIZE * 4e-9
    assert slower < four < one
    # Messages have a price of their own, and an axis of one is free.
    busy = one_rank_a_host(message=1e-3)
    assert took("direct", 16, busy, 4096) > took("doubling", 16, busy, 4096)
    assert took("ring", 1, size=1e9) == 0


@pytest.mark.parametrize(("ranks", "per_host"), [(2, 1), (7, 1), (16, 4), (24, 8), (3456, 4)])
def test_the_candidates_are_all_names_and_no_schedule_twice(ranks, per_host):
    listed = candidates(ranks, per_host)
    assert len(set(listed)) == len(listed)
    names = {algorithm.algorithm for algorithm in listed}
    assert names >= {"ring", "doubling"}
    assert ({"halving-doubling", "direct"} <= names) == (ranks > 2), "between two ranks they are the ring's exchange"
    if squarest(ranks)[0] > 1:
        assert {a.name for a in listed if a.algorithm == "torus"} >= {"torus", "torus:doubling/direct"}
    assert ("hierarchical" in names) == (1 < per_host < ranks)


def test_small_messages_take_few_rounds_and_large_ones_few_bytes():
    """16 hosts, 5 ms and 1 Gb/s: what was fastest there by measurement (docs/methods/all-reduce.md)."""
    far = one_rank_a_host(message=1e-4)
    small, large = (rank_candidates(size, 16, far)[0][0] for size in (64, 1 << 26))
    assert small.name in ("direct", "doubling")
    assert total(cost for _, cost in price(large, far)).per_byte == pytest.approx(2 * 15 / 16 * B)
