"""What a plan costs on a network: rounds times latency, messages times overhead, bytes times seconds a byte.

The counts are read off the plan's own routes, so that a formula can't differ from what runs; docs/methods/all-reduce.md
gives them in closed form. All of it follows the usual alpha-beta model (Hockney 1994).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from .algorithms import Algorithm
from .rounds import Round

_UNIT = 1 << 20
"""length at which routes are counted"""


class Terms(NamedTuple):
    """One kind of link: `latency` seconds a round and `per_byte` seconds a byte, with their standard errors."""

    latency: float
    per_byte: float
    latency_error: float = 0.0
    per_byte_error: float = 0.0


class Network(NamedTuple):
    """What messages cost between the ranks: `hosts` names the host of each rank, `message` is seconds of work each."""

    hosts: tuple[int, ...]
    inside: Terms | None
    between: Terms | None
    message: float


class Load(NamedTuple):
    """What a chunk asks of the busiest rank and host: rounds, messages and shares of the chunk's bytes."""

    rounds_inside: int
    rounds_between: int
    messages: int
    share_inside: float
    share_between: float
    """through a host's link, all of its ranks together"""


def seconds(plan: Algorithm, size: int, network: Network) -> float:
    """Predicted time of the plan for `size` bytes.

    The first round waits for its receiver's announcement, one more latency. Chunks overlap: after the first, each takes
    as long as the busier kind of link.
    """
    load = _load(replace(plan, chunks=1), network.hosts)
    inside, between = network.inside or Terms(0, 0), network.between or Terms(0, 0)
    latency = load.rounds_inside * inside.latency + load.rounds_between * between.latency
    first = between.latency if load.rounds_between else inside.latency
    chunk = size / plan.chunks
    transfers = chunk * load.share_inside * inside.per_byte, chunk * load.share_between * between.per_byte
    work = load.messages * plan.chunks * network.message
    return first + latency + work + sum(transfers) + (plan.chunks - 1) * max(transfers)


@lru_cache(maxsize=1024)
def _load(plan: Algorithm, hosts: tuple[int, ...]) -> Load:
    """Counts over a few hosts, since all do alike: the first two, the middle and the last."""
    named = sorted(set(hosts))
    counted = {*named[:2], named[len(named) // 2], named[-1]}
    ranks = [rank for rank, host in enumerate(hosts) if host in counted]
    routes = [plan.rounds(rank, _UNIT)[0] for rank in ranks]
    loads = [_round(ranks, turns, hosts) for turns in zip(*routes, strict=True)]
    return Load(
        sum(1 for load in loads if load.rounds_inside),
        sum(1 for load in loads if load.rounds_between),
        sum(load.messages for load in loads),
        sum(load.share_inside for load in loads),
        sum(load.share_between for load in loads),
    )


def _round(ranks: Sequence[int], turns: Sequence[Round], hosts: tuple[int, ...]) -> Load:
    """The load of one round; a round that crosses hosts costs their latency alone."""
    messages, within = 0, 0
    links: dict[int, list[int]] = {}
    for rank, turn in zip(ranks, turns, strict=True):
        messages = max(messages, len(turn.sends), len(turn.adds) + len(turn.copies))
        own, link = [0, 0], links.setdefault(hosts[rank], [0, 0])
        for way, group in ((0, turn.sends), (1, turn.adds + turn.copies)):
            for message in group:
                if hosts[message.peer] == hosts[rank]:
                    own[way] += message.high - message.low
                else:
                    link[way] += message.high - message.low
        within = max(within, *own)
    across = max(max(link) for link in links.values())
    return Load(int(messages > 0 and not across), int(across > 0), messages, within / _UNIT, across / _UNIT)
