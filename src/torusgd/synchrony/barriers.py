"""Barriers in virtual time: when each worker may begin its next step, if steps take keyed times.

Bulk-synchronous (BSP), stale-synchronous (SSP), asynchronous (ASP), and the sampled barriers of Probabilistic
Synchronous Parallel (pBSP, pSSP; Wang, Catterall and Mortier, arXiv 1709.07772), which are one rule:

    a worker that has completed k steps draws `sample` of the P workers, without repeats, maybe itself among them;
    it passes if each of them has completed at least k - staleness steps;
    otherwise it tries again at each end of any worker's step, with a fresh draw

A sample of all workers is BSP or SSP, a sample of none ASP.
"""

import heapq
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from ..rng import BARRIER, keyed_uniform
from .delays import F64, DelayModel, Ints


class Barrier(NamedTuple):
    """The rule by which a worker waits for others."""

    staleness: float  # number of steps by which it may be ahead of the workers in its sample; may be infinite
    sample: float = math.inf  # number of workers in its sample; infinite: all

    def pass_chances(self, workers: int) -> F64:
        """The chance to pass for 0, 1, 2, ... workers that are too far behind: float64 [workers + 1]."""
        if math.isinf(self.staleness):
            return np.ones(workers + 1)
        # A draw passes if it hits none of the m that are behind: C(workers - m, sample) / C(workers, sample). One
        # uniform number against that chance has the same distribution as a draw of the workers themselves.
        behind = np.arange(workers + 1)
        chances = np.ones(workers + 1)
        for drawn in range(int(min(self.sample, workers))):
            chances *= np.maximum(workers - drawn - behind, 0) / (workers - drawn)
        return chances


def barrier(text: str) -> Barrier:
    """Reads `bsp`, `asp`, `ssp:S`, `pbsp:B` or `pssp:BxS`, with a staleness S and a sample B; UserError if it can't."""
    if text in ("bsp", "asp"):
        return Barrier(0 if text == "bsp" else math.inf)
    match = re.fullmatch(r"ssp:(?P<s>\d+)|pbsp:(?P<b>\d+)|pssp:(?P<both>\d+)x(?P<stale>\d+)", text)
    if match is None:
        forms = "bsp, asp, ssp:STALENESS, pbsp:SAMPLE or pssp:SAMPLExSTALENESS"
        raise UserError(f"barrier: {text!r} is none; write {forms}")
    staleness, sample = match["s"] or match["stale"] or 0, match["b"] or match["both"] or math.inf
    return Barrier(float(staleness), float(sample))


class Passage(NamedTuple):
    """Workers, ascending, that pass their barriers at one virtual time, each with the steps that it has completed."""

    time: float
    workers: tuple[int, ...]
    steps: tuple[int, ...]


def passages(workers: int, rule: Barrier, delays: DelayModel, compute: float, seed: int) -> Iterator[Passage]:
    """All passages in order of time, without end; the first is at 0, when all workers begin their first step.

    A step takes `compute` seconds and the delay of its part 0; a draw's key is `seed` and (worker, steps, attempt).
    """
    chances = rule.pass_chances(workers)
    # Chances of 0 and 1 need no draw.
    is_drawn = bool(((chances > 0) & (chances < 1)).any())
    everyone = np.arange(workers)

    @cache
    def seconds(step: int) -> list[float]:
        return (compute + delays.at(everyone, step, 0)).tolist()

    completed, attempts = np.zeros(workers, dtype=np.int64), np.zeros(workers, dtype=np.int64)
    waits = np.zeros(workers, dtype=bool)
    # behind[k] is the number of workers that have completed fewer than k steps: one lookup for each waiting worker
    # instead of a comparison with all others.
    behind = np.array([0, workers])
    # Ends of steps in the total order (time, worker), so that equal times leave nothing open.
    ends = [(first, worker) for worker, first in enumerate(seconds(0))]
    heapq.heapify(ends)
    yield Passage(0.0, tuple(range(workers)), (0,) * workers)
    while True:
        now, worker = heapq.heappop(ends)
        completed[worker] += 1
        steps = int(completed[worker])
        behind[steps] -= 1
        if steps + 1 == len(behind):
            behind = np.append(behind, workers)
        waits[worker], attempts[worker] = True, 0
        # The end of any step lets every waiting worker try again, the one that has just ended among them. The fresh
        # draw matters: if one draw held until it passes, progress would be about a third slower.
        waiting = np.flatnonzero(waits)
        needed = np.maximum(completed[waiting] - min(rule.staleness, steps + 1), 0).astype(np.int64)
        chance = chances[behind[needed]]
        drawn = keyed_uniform(BARRIER, seed, waiting, completed[waiting], attempts[waiting]) if is_drawn else 0.5
        passing = waiting[drawn < chance]
        attempts[waiting] += 1
        waits[passing] = False
        for each in passing.tolist():
            heapq.heappush(ends, (now + seconds(int(completed[each]))[each], each))
        if len(passing):
            yield Passage(now, tuple(passing.tolist()), tuple(completed[passing].tolist()))


def steps_begun(workers: int, rule: Barrier, delays: DelayModel, compute: float, seed: int, until: float) -> Ints:
    """Steps that each worker has begun by a virtual time: int64 [workers]. Arguments as in `passages`.

    The one under way counts, as in the paper's figure of progress: 200 workers whose steps take 1 + Exp(1) s complete
    29 bulk-synchronous steps in 200 s, and are in their 30th.
    """
    steps = np.zeros(workers, dtype=np.int64)
    for passage in passages(workers, rule, delays, compute, seed):
        if passage.time > until:
            break
        steps[list(passage.workers)] = np.array(passage.steps) + 1
    return steps


def lag_bounds(within: float, sample: int, staleness: int, updates: int) -> tuple[float, float]:
    """The two bounds of Probabilistic Synchronous Parallel (arXiv 1709.07772) on the average lag over a run.

    A lag is the number of updates that a worker has not seen yet. With a = F(r)^beta and
    S = (1 - a) / (F(r) (1 - a) + a - a^(T - r + 1)):

        (1/T) sum E(lag)    <= S (r (r + 1) / 2 + a (r + 2) / (1 - a)^2)
        (1/T) sum E(lag^2)  <  S (r (r + 1) (2 r + 1) / 6 + a (r^2 + 4) / (1 - a)^3)

    `within` is F(r), the fraction of workers that are at most `staleness` steps (r) behind without any barrier;
    `sample` is beta, the number of workers that are drawn; `updates` is T. UserError for a value out of range.
    """
    if not 0 < within < 1 or sample < 1 or not 0 <= staleness < updates:
        raise UserError("lag bounds: need 0 < F(r) < 1, a sample of at least 1, and 0 <= r < T")
    a, r = within**sample, staleness
    scale = (1 - a) / (within * (1 - a) + a - a ** (updates - r + 1))
    mean = scale * (r * (r + 1) / 2 + a * (r + 2) / (1 - a) ** 2)
    return mean, scale * (r * (r + 1) * (2 * r + 1) / 6 + a * (r**2 + 4) / (1 - a) ** 3)
