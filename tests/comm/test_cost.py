"""The price of a plan, counted off its routes, against the formulas of the literature."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.comm.algorithms import parse_algorithm
from torusgd.comm.cost import Network, Terms, seconds

A, B = 5e-3, 8e-9
SIZE = 1 << 22


def one_rank_a_host(ranks: int) -> Network:
    return Network(tuple(range(ranks)), None, Terms(A, B), 0.0)


def halves(ranks: int) -> float:
    """Share of the bytes that a flat reduce-scatter moves."""
    return (ranks - 1) / ranks


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 40))
def test_flat_algorithms_cost_what_the_formulas_say(ranks):
    network = one_rank_a_host(ranks)
    transfer = 2 * halves(ranks) * SIZE * B
    # A is added once in each: the first round waits for the receivers' announcement.
    assert seconds(parse_algorithm("ring", ranks), SIZE, network) == pytest.approx(
        (2 * (ranks - 1) + 1) * A + transfer, rel=1e-3
    )
    log = math.ceil(math.log2(ranks))
    want = (2 * log + 1) * A + transfer
    assert seconds(parse_algorithm("halving-doubling", ranks), SIZE, network) == pytest.approx(want, rel=1e-3)
    assert seconds(parse_algorithm("direct", ranks), SIZE, network) == pytest.approx(3 * A + transfer, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_doubling(ranks):
    log = round(math.log2(ranks))
    got = seconds(parse_algorithm("doubling", ranks), SIZE, one_rank_a_host(ranks))
    assert got == pytest.approx((log + 1) * A + log * SIZE * B)


@pytest.mark.parametrize(("y", "x"), [(2, 3), (4, 4), (8, 2), (5, 7)])
def test_torus_of_sony(y, x):
    got = seconds(parse_algorithm("torus", x * y, (y, x)), SIZE, one_rank_a_host(x * y))
    steps = 2 * (x - 1) + 2 * (y - 1)
    bytes_moved = 2 * halves(x) * SIZE + 2 * halves(y) * SIZE / x
    assert got == pytest.approx((steps + 1) * A + bytes_moved * B, rel=1e-3)


@pytest.mark.parametrize(("hosts", "each"), [(4, 4), (3, 2), (8, 8)])
def test_ranks_of_a_host_share_its_link(hosts, each):
    inside, between = Terms(1e-6, 1e-10), Terms(A, B)
    network = Network(tuple(rank // each for rank in range(hosts * each)), inside, between, 0.0)
    torus = seconds(parse_algorithm("torus", hosts * each, (hosts, each)), SIZE, network)
    across = 2 * (hosts - 1) * A + A + 2 * halves(hosts) * SIZE * B
    within = 2 * (each - 1) * 1e-6 + 2 * halves(each) * SIZE * 1e-10
    assert torus == pytest.approx(across + within, rel=1e-3)
    leader = seconds(parse_algorithm("hierarchical", hosts * each, (hosts, each)), SIZE, network)
    assert leader == pytest.approx(across + within + 2e-6 + 2 * halves(each) * SIZE * 1e-10, rel=1e-3)


def test_chunks_hide_the_faster_axis_behind_the_slower():
    network = Network(tuple(rank // 4 for rank in range(16)), Terms(0, 1e-9), Terms(0, 4e-9), 0.0)
    one, four = (seconds(parse_algorithm("torus", 16, (4, 4), chunks), SIZE, network) for chunks in (1, 4))
    slower = 2 * halves(4) * SIZE * 4e-9
    assert slower < four < one


def test_messages_have_a_price_of_their_own():
    network = one_rank_a_host(16)._replace(message=1e-3)
    assert seconds(parse_algorithm("direct", 16), 4096, network) > seconds(
        parse_algorithm("doubling", 16), 4096, network
    )
