"""Pieces of a step, claimed by their owners and by others: each is taken exactly once, with few queries."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore

from torusgd.comm.base import ConnectionLost
from torusgd.comm.groups import Group
from torusgd.rng import keyed_uniform
from torusgd.step.work_stealing import Claims


def members(size: int) -> list[Claims]:
    """Claims of all members of a group, in this process."""
    group = {"size": size, "store": HashStore(), "barrier": lambda: None, "broadcast_text": lambda text: "1"}
    return [Claims(cast(Group, SimpleNamespace(rank=rank, **group))) for rank in range(size)]


def take_all(claims: list[Claims], counts: list[int], seed: int) -> Counter[tuple[int, int]]:
    """The pieces, as (row, index in it), that all members take in a round, in an order drawn from the seed."""
    taken: Counter[tuple[int, int]] = Counter()
    for each in claims:
        each.begin(counts)
    busy, turn = set(range(len(claims))), 0
    while busy:
        me = sorted(busy)[int(len(busy) * keyed_uniform(seed, turn, np.arange(1))[0])]
        turn += 1
        own = claims[me].claim_own()
        if own is not None:
            taken[me, own] += 1
            continue
        looks = claims[me].looks()
        row = max(looks, key=lambda member: looks[member])
        if not looks[row]:
            busy.remove(me)
        elif (piece := claims[me].claim_of(row)) is not None:
            taken[row, piece] += 1
    return taken


@pytest.mark.parametrize("counts", [[8, 8, 8, 8], [1, 1, 1], [1, 40, 3], [5, 5, 2], [2, 64]])
def test_each_piece_is_taken_once_in_whatever_order_members_claim(counts: list[int]) -> None:
    claims = members(len(counts))
    expected = {(row, piece) for row, count in enumerate(counts) for piece in range(count)}
    for seed in range(20):
        taken = take_all(claims, counts, seed)
        assert set(taken) == expected
        assert set(taken.values()) == {1}
        counts = counts[1:] + counts[:1]
        expected = {(row, piece) for row, count in enumerate(counts) for piece in range(count)}


def test_who_is_late_loses_from_the_back_what_it_has_not_claimed() -> None:
    late, idle, other = members(3)
    for each in (late, idle, other):
        each.begin([8, 1, 1])
    assert [late.claim_own() for _ in range(3)] == [0, 1, 2]  # a quarter without a claim, and one claim
    assert idle.looks() == {2: 0, 0: 5}
    assert [idle.claim_of(0), other.claim_of(0), idle.claim_of(0)] == [7, 6, 5]
    assert late.may_have_own
    assert [late.claim_own(), late.claim_own(), late.claim_own()] == [3, 4, None]
    assert not late.may_have_own
    assert idle.claim_of(0) is None
    assert idle.looks() == {2: 0, 0: 0}


def test_a_member_that_leaves_takes_its_pieces_along() -> None:
    leaving, idle = members(2)
    for each in (leaving, idle):
        each.begin([8, 2])
    assert leaving.claim_own() == 0
    leaving.claim_rest()
    assert (leaving.claim_own(), idle.looks(), idle.claim_of(0)) == (None, {0: 0}, None)


def test_a_round_of_many_pieces_takes_few_queries() -> None:
    claims, queries = members(1)[0], dict[int, int]()
    for pieces in (8, 64, 512):
        with patch.object(claims._store, "query", wraps=claims._store.query) as query:
            claims.begin([pieces])
            assert [claims.claim_own() for _ in range(pieces + 1)] == [*range(pieces), None]
        queries[pieces] = query.call_count
    assert queries == {8: 7, 64: 15, 512: 23}


def test_a_store_out_of_reach_is_a_lost_connection() -> None:
    claims = members(2)[0]
    claims.begin([1, 1])
    claims._store._store = cast(Any, SimpleNamespace(multi_get=broken))
    with pytest.raises(ConnectionLost):
        claims.looks()


def broken(keys: list[str]) -> None:
    raise RuntimeError("gone")
