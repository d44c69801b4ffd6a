"""Measures a network with the ranks at hand: links as alpha-beta terms, and the algorithms against each other.

Every rank takes part: times are the slowest rank's, agreed by a MAX all-reduce. What is computed from them is rank
0's, so that all ranks end with the same profile to the last bit, whatever processors they have.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.distributed import ProcessGroup

from ..errors import UserError
from .algorithms import Algorithm
from .connection import Connection, connect, hosts_of
from .contention import crowding, in_step
from .cost import rank_candidates
from .groups import Group, group_of
from .profile import Link, Profile, Timing, expect
from .rounds import Message, Round

_SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24))
_SHORT_SIZES = tuple(1 << power for power in (14, 18, 22))
_LINK_BYTES = (1 << 10, 1 << 15, 1 << 18)
_CHUNKED = 1 << 20
_SIZES_SHARE, _IN_STEPS_SHARE = 0.6, 0.15
"""of the seconds, for all sizes alone and for each among computation; crowding takes what it takes, a few seconds"""
_IN_STEPS = (1 << 14, 1 << 18)
"""bytes of messages that are timed among computation"""
_ROUNDS = 8
"""dependent rounds whose time is that of one chain, so that starting it and the barrier before it cancel out"""
_FAN = 8
_FAN_ROUNDS = 4


def tune(
    seconds: float = 40.0,
    group: Group | ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    streams: int = 1,
) -> Profile:
    """Measures the network between the ranks of `group` (None: all), each of which calls it and gets the profile.

    With several `streams` (see `create`) it is for runs that have as many.
    """
    ranks = group_of(group, device)
    if ranks.size == 1:
        raise UserError("tune: one rank has no network to measure; start it on several ranks, such as with torchrun")
    connection = connect(ranks, streams=streams)
    try:
        return measure(connection, seconds)
    finally:
        connection.close()


def measure(connection: Connection, seconds: float, short: bool = False) -> Profile:
    """A profile in about `seconds`: sizes are tried from small to large until the time is up.

    `short` is the probe before a run without a profile: fewer sizes, rivals and repetitions.
    """
    begin = time.perf_counter()
    hosts = hosts_of(connection.group)
    repetitions, rivals = (2, 3) if short else (4, 5)
    inside, between, message = _links(connection, hosts, repetitions)
    profile = Profile(
        backend="nccl" if connection.group.has_nccl else "gloo",
        hosts=hosts,
        streams=connection.streams,
        message=message,
        inside=inside,
        between=between,
        timings=(),
    )
    profile = _of_rank_0(connection, profile)
    timings: list[Timing] = []
    until = seconds if short else _SIZES_SHARE * seconds
    last, last_size = 0.0, 0
    per_byte = max(link.per_byte for link in (profile.inside, profile.between) if link is not None)
    for size in _SHORT_SIZES if short else _SIZES:
        before = time.perf_counter()
        # It takes what the last size took, and the further bytes, which every run moves about twice.
        ahead = last + repetitions * (1 + 2 * rivals) * 2 * per_byte * (size - last_size)
        if timings and connection.slowest([before - begin + ahead])[0] > until:
            break
        timings += _rivals(connection, profile, size, rivals, repetitions)
        last, last_size = time.perf_counter() - before, size
    profile = profile.model_copy(update={"timings": tuple(timings)})
    sizes, each = (_IN_STEPS[:1], 0.0) if short else (_IN_STEPS, _IN_STEPS_SHARE * seconds)
    points = tuple(in_step(connection, expect(profile, size)[0], size, each) for size in sizes)
    profile = profile.model_copy(update={"in_steps": points})
    if not short:
        turns = max(3, min(9, round(seconds)))
        profile = profile.model_copy(update={"crowding": crowding(connection, turns)})
    return _of_rank_0(connection, profile)


def _of_rank_0(connection: Connection, profile: Profile) -> Profile:
    """Rank 0's profile, on every rank."""
    return Profile.model_validate_json(connection.group.broadcast_text(profile.model_dump_json()))


def _rivals(connection: Connection, profile: Profile, size: int, rivals: int, repetitions: int) -> list[Timing]:
    """Times native and the most promising plans in turn, plans twice as often; the first run of each warms up."""
    effective = connection.engine.effective
    plans = _different(effective(plan) for plan, _ in rank_candidates(size, connection.size, profile.topology))[:rivals]
    # What chunks gain (links that are never idle) is not in the formulas: it is tried.
    chunked = [replace(plan, chunks=4) for plan in plans[:2] if size >= _CHUNKED and plan.chunks == 1]
    plans = _different([*plans, *map(effective, chunked)])
    natives: list[float] = []
    rows: list[list[float]] = []
    for _ in range(repetitions):
        natives.append(_time_sum(connection, size, None))
        for _ in range(2):
            rows.append([_time_sum(connection, size, plan) for plan in plans])
    columns = [natives[1:], *zip(*rows[1:], strict=True)]
    medians = [statistics.median(connection.slowest(column)) for column in columns]
    described = [("native", None, 1), *[(plan.name, plan.grid, plan.chunks) for plan in plans]]
    return [
        Timing(size=size, algorithm=name, grid=grid, chunks=chunks, median=median)
        for (name, grid, chunks), median in zip(described, medians, strict=True)
    ]


def _different(plans: Iterable[Algorithm]) -> list[Algorithm]:
    """Each once: several may come to the same with an engine (`Engine.effective`)."""
    return list(dict.fromkeys(plans))


def _time_sum(connection: Connection, size: int, algorithm: Algorithm | None) -> float:
    """Seconds on this rank of an all-reduce of `size` bytes; None: the backend's own."""
    tensor = connection.zeros(size)
    return connection.stopwatch(lambda: connection.engine.run(tensor, algorithm).wait())


def _links(connection: Connection, hosts: tuple[int, ...], repetitions: int) -> tuple[Link | None, Link | None, float]:
    """The link within hosts, the link between them (one rank of each host at work), and the cost of a message."""
    rank, size = connection.rank, connection.size
    host = [r for r in range(size) if hosts[r] == hosts[rank]]
    leaders = [r for r in range(size) if hosts.index(hosts[r]) == r]
    inside = _link(connection, host, repetitions) if len(leaders) < size else None
    between = _link(connection, leaders, repetitions) if len(leaders) > 1 else None
    fan = min(_FAN, size - 1)
    few, many = (connection.slowest([_fan(connection, n, repetitions)])[0] for n in (1, fan))
    return inside, between, max(0.0, many - few) / _FAN_ROUNDS / max(1, fan - 1)


def _link(connection: Connection, members: list[int], repetitions: int) -> Link:
    """Times chains of rounds around the members; ranks outside look on."""
    points = []
    for size in _LINK_BYTES:
        for _ in range(repetitions):
            one, chain = (
                connection.stopwatch(partial(_shift, connection, members, size, turns)) for turns in (1, 1 + _ROUNDS)
            )
            points.append((size, one, chain))
    flat = connection.slowest([value for _, one, chain in points for value in (one, chain)])
    each = [(chain - one) / _ROUNDS for one, chain in zip(flat[::2], flat[1::2], strict=True)]
    return fit([size for size, _, _ in points], each)


def _shift(connection: Connection, members: list[int], size: int, turns: int) -> None:
    """Every member sends `size` bytes to the next and waits for the one before, `turns` times; one alone looks on."""
    tensor = connection.zeros(2 * size * turns)
    rounds = [Round()] * turns
    if connection.rank in members and len(members) > 1:
        place, half = members.index(connection.rank), tensor.numel() // 2
        after, before = members[(place + 1) % len(members)], members[place - 1]
        step = half // turns
        rounds = [
            Round(
                (Message(after, i * step, (i + 1) * step),),
                copies=(Message(before, half + i * step, half + (i + 1) * step),),
            )
            for i in range(turns)
        ]
    connection.engine.run_rounds(tensor, [rounds]).wait()


def _fan(connection: Connection, peers: int, repetitions: int) -> float:
    """Median seconds of a chain of rounds with a small message to each of several ranks."""
    rank, size = connection.rank, connection.size
    rounds = [
        Round(
            tuple(Message((rank + i) % size, 0, 1) for i in range(1, peers + 1)),
            copies=tuple(Message((rank - i) % size, i + turn * size, i + 1 + turn * size) for i in range(1, peers + 1)),
        )
        for turn in range(_FAN_ROUNDS)
    ]
    tensor = connection.zeros(4 * size * _FAN_ROUNDS)
    return statistics.median(
        connection.stopwatch(lambda: connection.engine.run_rounds(tensor, [rounds]).wait())
        for _ in range(repetitions + 1)
    )


def fit(sizes: Sequence[int], times: Sequence[float]) -> Link:
    """Least squares of time = latency + per_byte * size, with standard errors.

    Errors are weighed against the median at their size. A negative term becomes zero and the other is fitted alone.
    """
    x, y = np.asarray(sizes, float), np.asarray(times, float)
    scale = np.array([max(float(np.median(y[x == size])), 1e-9) for size in x])
    columns, y = np.stack([1 / scale, x / scale], axis=1), y / scale
    terms, errors = _solve(columns, y)
    for kept, other in ((0, 1), (1, 0)):
        if terms[other] < 0:
            alone, error = _solve(columns[:, [kept]], y)
            terms[kept], terms[other], errors[kept] = alone[0], 0.0, error[0]
    return Link(
        latency=max(0.0, float(terms[0])),
        latency_error=float(errors[0]),
        per_byte=max(0.0, float(terms[1])),
        per_byte_error=float(errors[1]),
    )


def _solve(columns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and their standard errors."""
    terms = np.linalg.lstsq(columns, values, rcond=None)[0]
    freedom = max(1, len(columns) - columns.shape[1])
    variance = float(((columns @ terms - values) ** 2).sum()) / freedom
    return terms, np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)) * variance)
