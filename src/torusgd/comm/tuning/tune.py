"""Measures a network with the ranks at hand: links as alpha-beta terms, the algorithms against each other, contention.

Every rank takes part: times are from the last rank's begin to the last one's end, by `Clock`. Rank 0 computes the
profile from them and sends it, so that all ranks end with the same one to the last bit, whatever processors they have.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from ...errors import UserError
from ..algorithms import Algorithm, Message, Round, cut, usual_chunks
from ..connection import Connection, Elapsed, Span, connect, hosts_of, ranks_a_core, shuffled, typical
from ..groups import AnyGroup, group_of
from .cost import rank_candidates
from .profile import Crowd, InStep, Link, Profile, Timing, expect

Plan = Algorithm | None  # None: the backend's own
_SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24))
# The sizes that matter most come first: buckets have up to 4 MiB, and the first size foretells what they take.
_SHORT_SIZES = tuple(1 << power for power in (18, 22, 20, 16, 14))
_LINK_BYTES = (1 << 10, 1 << 15, 1 << 18)
_CHUNKED = 1 << 20
# fractions of the time for all sizes alone, for each size among computation, and for crowding, which may take more
_SIZES_FRACTION, _IN_STEPS_FRACTION, _CROWDING_FRACTION = 0.6, 0.15, 0.5
# bytes of messages that are timed among computation
_IN_STEPS = (1 << 14, 1 << 18, 1 << 22)
# number of dependent rounds of a chain
_ROUNDS = 8
# factor of the quickest rival's best time beyond which a rival drops out of the timings of a size
_BEHIND = 1.25
_MOST_TURNS = 9
_FAN, _FAN_ROUNDS = 8, 4


def tune(
    seconds: float = 40.0,
    group: AnyGroup | None = None,
    device: torch.device | str = "cpu",
    streams: int = 1,
    one_pass: Callable[[], object] | None = None,
) -> Profile:
    """Measures the network between the ranks of `group` (None: all), for runs with as many `streams`; how much ranks
    slow each other by `one_pass`, forward and backward of the network that will train, or by a small one.
    """
    ranks = group_of(group, device)
    if ranks.size == 1:
        raise UserError("tune: one rank has no network to measure; start it on several ranks, such as with torchrun")
    with closing(connect(ranks, streams=streams)) as connection:
        return measure(connection, seconds, one_pass=one_pass)


def measure(
    connection: Connection, seconds: float, short: bool = False, one_pass: Callable[[], object] | None = None
) -> Profile:
    """A profile in about `seconds`; `short` is the probe before a run: fewer sizes, rivals and repetitions."""
    begin = time.perf_counter()
    hosts = hosts_of(connection.group)
    repetitions, rivals = (3, 5) if short else (4, 7)
    inside, between, message = _links(connection, hosts, repetitions)
    how = {"backend": "nccl" if connection.group.has_nccl else "gloo", "hosts": hosts, "streams": connection.streams}
    links = {"message": message, "inside": inside, "between": between}
    profile = _of_rank_0(connection, Profile.model_validate({**how, **links, "timings": ()}))
    timings, known, took = list[Timing](), set[Plan](), dict[int, float]()
    sizes, until = (_SHORT_SIZES, seconds) if short else (_SIZES, _SIZES_FRACTION * seconds)
    for size in sizes:
        before = time.perf_counter()
        ahead = _foreseen(profile, size, 2 + rivals + 2 * repetitions, took)
        # The slowest rank's clock decides for all: a rank alone in a timing would wait for the others for ever.
        spent, ahead = connection.slowest([before - begin, ahead])
        if took and spent + ahead > until:
            continue
        timings += _rivals(connection, profile, size, rivals, repetitions, (until - spent) / 2, known)
        took[size] = time.perf_counter() - before
    profile = profile.model_copy(update={"timings": tuple(sorted(timings, key=lambda timing: timing.size))})

    def left() -> float:  # seconds, by the slowest rank's clock: one rank alone that does less would be waited for
        return seconds - connection.slowest([time.perf_counter() - begin])[0]

    each = 0.0 if short else _IN_STEPS_FRACTION * seconds
    # The largest, a bucket's, where the network is fast enough for it.
    fits = [size for size in _IN_STEPS if size < _CHUNKED or _ROW * expect(profile, size)[1] < 2 * each]
    among = fits[:1] if short else fits
    in_steps = list[InStep]()
    for size in among:
        if (most := min(each, left())) > 0 or not in_steps:  # a row takes seconds on a loaded machine
            in_steps.append(in_step(connection, expect(profile, size)[0], size, most))
    crowds: tuple[Crowd, ...] = ()
    if not short:
        task = one_pass or _Task(connection.engine.device, images=32)
        crowds = crowding(connection, min(_CROWDING_FRACTION * seconds, left()), task)
    return _of_rank_0(connection, profile.model_copy(update={"in_steps": tuple(in_steps), "crowding": crowds}))


def _foreseen(profile: Profile, size: int, runs: int, took: Mapping[int, float]) -> float:
    # About the seconds that so many runs at a size take on this rank, from the times of other sizes.
    if not took:
        return 0.0
    smaller, larger = [known for known in took if known < size], [known for known in took if known > size]
    if larger:
        return math.sqrt(took[max(smaller)] * took[min(larger)]) if smaller else took[min(larger)]
    # The time of the largest, and the further bytes, which every run moves about twice.
    per_byte = max(link.per_byte for link in (profile.inside, profile.between) if link is not None)
    return took[max(took)] + runs * 2 * per_byte * (size - max(took))


def _of_rank_0(connection: Connection, profile: Profile) -> Profile:
    return Profile.model_validate_json(connection.group.broadcast_text(profile.model_dump_json()))


def _rivals(
    connection: Connection, profile: Profile, size: int, rivals: int, repetitions: int, seconds: float, known: set[Plan]
) -> list[Timing]:
    # Times native and the most promising plans in turn: all of them once, and then those that are not far behind.
    # A plan that stays to the end has `repetitions` timings, of large messages, whose times vary most, as many more as
    # `seconds` allow. Plans that run for the first time are added to `known`.
    effective = connection.engine.effective
    # The formulas ignore what ranks or packets share, so that many plans enter, and most leave early. They also ignore
    # what chunks gain (links that are never idle), so that large messages enter in at least their usual chunks.
    ranked = (plan for plan, _ in rank_candidates(size, connection.group.size, profile.topology))
    # An engine may run several alike (`Engine.effective`).
    plans = [*dict.fromkeys(effective(replace(plan, chunks=max(plan.chunks, usual_chunks(size)))) for plan in ranked)]
    # In a ring alone no two flows meet in a link, which costs more than the formulas say once links are full.
    ring = [plan for plan in plans[rivals:] if plan.algorithm == "ring" and size >= _CHUNKED]
    left: list[Plan] = [None, *plans[:rivals], *ring]
    times = defaultdict[Plan, list[Elapsed]](list)
    begun = 0.0
    for plan in left:
        # The first run of an algorithm opens connections between its peers, which would count against it.
        if (whole := plan and replace(plan, chunks=1)) not in known:
            known.add(whole)
            _time_sum(connection, size, plan)
    for turn in range(1, 1 + (_MOST_TURNS if size >= _CHUNKED else repetitions)):
        left = shuffled(left, turn)  # not always after the same one, see `shuffled`
        # All ranks have the same times on one clock, so that they drop the same plans and end at the same turn.
        taken = connection.clock.elapsed([_time_sum(connection, size, plan) for plan in left])
        begun = begun or min(each.end - each.seconds for each in taken)
        for plan, each in zip(left, taken, strict=True):
            times[plan].append(each)
        # By the best time, which a pause of the machine does not touch. A plan that leaves keeps its timings.
        best = {plan: min(times[plan]).seconds for plan in left}
        left = [plan for plan in left if best[plan] <= _BEHIND * min(best.values())]
        quickest = min(best, key=best.__getitem__)
        # The number of chunks is tried for the first turn's winner only: for all plans it would triple the turns.
        if turn == 1 and quickest is not None and size >= _CHUNKED:
            others = dict.fromkeys(effective(replace(quickest, chunks=chunks)) for chunks in (1, 2, 4))
            left += [plan for plan in others if plan not in times]
        if turn >= repetitions and max(each.end for each in taken) - begun > seconds:
            break
    return [Timing.of(size, plan, typical(taken)) for plan, taken in times.items()]


def _time_sum(connection: Connection, size: int, algorithm: Plan) -> Span:
    tensor = connection.zeros(size)
    return connection.clock.span(lambda: connection.engine.run(tensor, algorithm).wait())


def _links(connection: Connection, hosts: tuple[int, ...], repetitions: int) -> tuple[Link | None, Link | None, float]:
    # The link within hosts, the link between them (one rank of each host at work), and the cost of a message.
    rank, size = connection.group.rank, connection.group.size
    host = [r for r in range(size) if hosts[r] == hosts[rank]]
    leaders = [r for r in range(size) if hosts.index(hosts[r]) == r]
    inside = _link(connection, host, repetitions) if len(leaders) < size else None
    between = _link(connection, leaders, repetitions) if len(leaders) > 1 else None
    fan = min(_FAN, size - 1)
    few, many = (_fan(connection, n, repetitions) for n in (1, fan))
    return inside, between, max(0.0, many - few) / _FAN_ROUNDS / max(1, fan - 1)


def _link(connection: Connection, members: list[int], repetitions: int) -> Link:
    # The link around the members, by chains of dependent rounds; other ranks send nothing.
    sizes = [size for size in _LINK_BYTES for _ in range(repetitions)]
    shifts = [partial(_shift, connection, members, size, turns) for size in sizes for turns in (1, 1 + _ROUNDS)]
    taken = connection.clock.elapsed([connection.clock.span(shift) for shift in shifts])
    # The difference of a long chain and of one round: the start cancels out.
    pairs = zip(taken[::2], taken[1::2], strict=True)
    return fit(sizes, [(chain.seconds - one.seconds) / _ROUNDS for one, chain in pairs])


def _shift(connection: Connection, members: list[int], size: int, turns: int) -> None:
    # Every member sends `size` bytes to the next and waits for the one before, `turns` times; one alone is idle.
    tensor, rounds = connection.zeros(2 * size * turns), [Round()] * turns
    if connection.group.rank in members and len(members) > 1:
        index = members.index(connection.group.rank)
        after, before = members[(index + 1) % len(members)], members[index - 1]
        # Elements of their own in each round: no round overwrites what another still sends.
        runs = list(pairwise(cut(0, tensor.numel(), 2 * turns)))
        pairs = zip(runs[:turns], runs[turns:], strict=True)
        rounds = [Round((Message(after, *out),), copies=(Message(before, *back),)) for out, back in pairs]
    connection.engine.run_rounds(tensor, rounds).wait()


def _fan(connection: Connection, peers: int, repetitions: int) -> float:
    # Median seconds of a chain of rounds with a small message to each of several ranks, the same number everywhere.
    rank, size, hops = connection.group.rank, connection.group.size, range(1, peers + 1)
    sends = tuple(Message((rank + i) % size, 0, 1) for i in hops)
    rounds = [
        Round(sends, copies=tuple(Message((rank - i) % size, first + i, first + i + 1) for i in hops))
        for first in range(0, size * _FAN_ROUNDS, size)
    ]
    tensor = connection.zeros(4 * size * _FAN_ROUNDS)
    clock, engine = connection.clock, connection.engine
    spans = [clock.span(lambda: engine.run_rounds(tensor, rounds).wait()) for _ in range(repetitions + 1)]
    return typical(clock.elapsed(spans)).seconds


def fit(sizes: Sequence[int], times: Sequence[float]) -> Link:
    """Least squares of time = latency + per_byte * size, with standard errors; no term is negative."""
    x, y = np.asarray(sizes, float), np.asarray(times, float)
    # Errors relative to the median at their size, or the largest messages alone would decide about the latency.
    scale = np.array([max(float(np.median(y[x == size])), 1e-9) for size in x])
    columns, y = np.stack([1 / scale, x / scale], axis=1), y / scale
    terms, errors = _solve(columns, y)
    for one, other in ((0, 1), (1, 0)):
        if terms[other] < 0:  # zero, and the rest is fitted alone
            alone, error = _solve(columns[:, [one]], y)
            terms[one], terms[other], errors[one] = alone[0], 0.0, error[0]
    (latency, per_byte), (latency_error, per_byte_error) = terms.clip(min=0.0).tolist(), errors.tolist()
    return Link(latency=latency, latency_error=latency_error, per_byte=per_byte, per_byte_error=per_byte_error)


def _solve(columns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # Coefficients and their standard errors.
    terms = np.linalg.lstsq(columns, values, rcond=None)[0]
    variance = float(((columns @ terms - values) ** 2).sum()) / max(1, len(columns) - columns.shape[1])
    return terms, np.sqrt(np.diag(np.linalg.inv(columns.T @ columns)) * variance)


# seconds of a rank alone in a timing of crowding
_CROWDED = 0.1
# number of all-reduces among a computation, so that their cost stands out from the noise; of so many all-reduces is
# about the time in which `in_step` takes each way once
_MESSAGES, _ROW = 16, 112


class _Task:
    """Forward and backward of a few convolutions with batch norm, as records are made of."""

    def __init__(self, device: torch.device, images: int) -> None:
        self._images = torch.rand(images, 3, 32, 32, device=device)
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            for inputs, outputs in ((3, 32), (32, 32), (32, 64)):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self._network = nn.Sequential(*layers).to(device)

    def __call__(self) -> None:
        self._network(self._images).sum().backward()


def _repeat(task: Callable[[], object], times: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker of a CPU recipe
    for _ in range(times):
        task()
    torch.set_num_threads(before)


def _slowest(connection: Connection, run: Callable[[int], object], tasks: int) -> float:
    # Seconds of the slowest rank for so many tasks on this one, the same number everywhere.
    return connection.clock.elapsed([connection.clock.span(partial(run, tasks))])[0].seconds


def crowding(connection: Connection, seconds: float, task: Callable[[], object]) -> tuple[Crowd, ...]:
    """How many times longer the slowest of the first n ranks takes than one alone, for n = 2, 4, 8 ... and all."""
    # They share cores, memory and power; the figure holds for whatever it is, so that a plan need not know it.
    # If n ranks have fewer cores it is at least their number over that of the cores, whatever was measured.
    group, device = connection.group, connection.engine.device
    counts = sorted({*(1 << power for power in range(group.size.bit_length())), group.size})
    run = partial(_repeat, task)
    run(1)  # warms up
    # As many as make a timing of a rank alone stand out from the clock's errors.
    each = max(1, round(_CROWDED / _slowest(connection, run, 1 if group.rank == 0 else 0)))
    tasks = [each if group.rank < count else 0 for count in counts]
    turns: list[list[float]] = []
    # Ratios within a turn, and then their median: what slows the machine for a while slows all counts of a turn.
    while len(turns) < 3 or (len(turns) < 9 and sum(map(sum, turns)) < seconds):
        turns.append([_slowest(connection, run, mine) for mine in tasks])
    ratios = [statistics.median(turn[i] / turn[0] for turn in turns) for i in range(len(counts))]
    least = [max(1.0, ranks_a_core(group, count) if device.type == "cpu" else 0.0) for count in counts]
    pairs = zip(counts[1:], ratios[1:], least[1:], strict=True)
    return tuple(Crowd(ranks=count, slowdown=max(ratio, bound)) for count, ratio, bound in pairs)


def in_step(connection: Connection, algorithm: Plan, size: int, seconds: float) -> InStep:
    """What an all-reduce of `size` bytes adds to a computation that hides it, and to one that it follows."""
    # Every rank computes and starts an all-reduce now and then, as backward does with buckets; they end while it still
    # computes. The time that they add is divided among them. It is little if cores are free, or a GPU sends; if ranks
    # share cores it may be more than the all-reduce takes alone, for each message interrupts each rank. Then the same
    # with ranks that wait for each message, at which they arrive one later than the other. `seconds` is the time for
    # computations without, with and between all-reduces in turn, 1 to 9 of each.
    compute = partial(_repeat, _Task(connection.engine.device, images=4))
    tensors = [connection.zeros(size) for _ in range(_MESSAGES)]
    start, slowest = partial(connection.engine.run, algorithm=algorithm), partial(_slowest, connection)

    def beside(tasks: int) -> None:
        # All-reduces begin during the first half of the tasks.
        sent, before_each = [], tasks // 2 // _MESSAGES
        for tensor in tensors:
            compute(before_each)
            sent.append(start(tensor))
        compute(tasks - _MESSAGES * before_each)
        for message in sent:
            message.wait()

    def between(tasks: int) -> None:
        for tensor in tensors:
            compute(tasks // _MESSAGES)
            start(tensor).wait()

    slowest(between, _MESSAGES)  # warms up
    # The least of three: a pause of the machine in the only one would make all that follows as much longer.
    at_once = min(slowest(beside, 0) for _ in range(3))
    one = slowest(compute, _MESSAGES) / _MESSAGES
    # Twice as long as the messages take at once, so that the second half of the computation still hides the last one.
    tasks = _MESSAGES * max(2, math.ceil(2 * at_once / one / _MESSAGES))
    rows: list[list[float]] = []
    while not rows or (len(rows) < 9 and sum(map(sum, rows)) < seconds):
        rows.append([slowest(run, tasks) for run in (compute, beside, between)])
    # Differences within a turn, as in `crowding`.
    hidden, waited = (max(0.0, statistics.median(row[at] - row[0] for row in rows)) / _MESSAGES for at in (1, 2))
    return InStep(size=size, hidden=hidden, waited=waited)
