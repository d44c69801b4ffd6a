"""Late work left out, or done by others: one table, with the same delays, of images a second and of accuracy.

    python -m benchmarks slow_ranks late-work --seeds 5

Virtual time: 8 ranks with 4 virtual workers of 16 images each train `digits` by plain SGD. How long a rank's k-th piece
of work in a step takes is a keyed draw, the same for all. Cutoff takes the ranks that are first, DropCompute what each
has computed by a threshold; both are the classes that a run has (`synchrony.limits`), and learn from the steps before.
Work stealing and shares by speed are a run's too (`step.work_stealing`, `step.rank_times`), on a virtual clock. These
leave nothing out, so their weights are those of synchronous steps in every bit, and so is their accuracy by steps.

Needs: nothing.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median, stdev
from typing import Annotated, Any, cast

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store
from typer import Option

from torusgd.comm.groups import Group
from torusgd.data import Pipeline, open_sources
from torusgd.recipe.load import load_recipe
from torusgd.simulate import Passes
from torusgd.step.membership import Membership, even_shares
from torusgd.step.rank_times import EVERY, balance
from torusgd.step.work_stealing import Claims, StealingShare
from torusgd.synchrony.delays import F64, DelayModel, delay_model
from torusgd.synchrony.limits import Limits

from ..record import sample

RANKS, PARTS, STEPS = 8, 4, 80
WARMUP = 20
"""steps from which Cutoff and DropCompute learn, and shares; the rates are of the steps after them"""
POINT = 5
"""steps from one evaluation to the next"""
ALL = tuple(range(RANKS * PARTS))
DELAYS = {
    "noise of each piece": "lognormal",
    "pauses of 20 pieces": "pause:0.01x20",
    "one rank in eight three times as slow": "slow:0.125x3",
}
Step = tuple[float, Sequence[int]]
"""virtual seconds of a step, and the pieces in its mean, of ALL"""


@dataclass(frozen=True)
class Clock:
    """Virtual seconds of a rank's k-th piece of a step."""

    delays: DelayModel

    def table(self, step: int) -> F64:
        """[ranks, pieces that a rank may compute]"""
        return 1.0 + self.delays.table(RANKS, step, len(ALL))


def synchronous(clock: Clock) -> Iterator[Step]:
    for step in range(STEPS):
        yield float(clock.table(step)[:, :PARTS].sum(axis=1).max()), ALL


def cutoff(clock: Clock) -> Iterator[Step]:
    """The first c ranks, c by a moving average of their times."""
    alone = [[rank] for rank in range(RANKS)]
    limits = Limits(alone, 0, count="predicted", threshold=None, warmup=WARMUP, warm=WARMUP)
    for step in range(STEPS):
        ends = clock.table(step)[:, :PARTS].sum(axis=1)
        first = np.argsort(ends, kind="stable")[: limits.next(step).count]
        seconds = float(ends[first].max())
        known = np.full(RANKS, np.nan)
        known[first] = ends[first]
        limits.observe(known, seconds)
        yield seconds, [rank * PARTS + part for rank in sorted(first.tolist()) for part in range(PARTS)]


def drop_compute(clock: Clock) -> Iterator[Step]:
    """What each rank has computed by the threshold."""
    shares = even_shares(range(RANKS), 0, len(ALL)).shares
    limits = Limits(shares, 0, count=None, threshold="measured", warmup=WARMUP, warm=WARMUP)
    for step in range(STEPS):
        ends = np.cumsum(clock.table(step)[:, :PARTS], axis=1).reshape(-1)
        tau = limits.next(step).seconds
        taken = np.flatnonzero(ends <= tau)
        seconds = min(tau, float(ends.max()))
        limits.observe(np.where(ends <= tau, ends, np.nan), seconds)
        yield seconds, taken.tolist()


def shares_by_speed(clock: Clock) -> Iterator[Step]:
    """Every ten steps the shares that fit the ranks' speeds, by the medians of both halves of these steps."""
    membership, speeds = even_shares(range(RANKS), 0, len(ALL)), list[list[float]]()
    for step in range(STEPS):
        if step and step % EVERY == 0:
            membership, speeds = _moved(membership, speeds), []
        took = [float(row[:count].sum()) for row, count in zip(clock.table(step), membership.counts, strict=True)]
        speeds.append([seconds / count for seconds, count in zip(took, membership.counts, strict=True)])
        yield max(took), ALL


def _moved(membership: Membership, speeds: Sequence[Sequence[float]]) -> Membership:
    halves = speeds[: len(speeds) // 2], speeds[len(speeds) // 2 :]
    earlier, later = ([median(column) for column in zip(*half, strict=True)] for half in halves)
    move = balance(membership, earlier, later, EVERY).move
    return membership if move is None else move.membership


@dataclass(frozen=True)
class Member:
    """What claims want of a group, whose members are all in this process."""

    rank: int
    store: Store
    size: int = RANKS

    def broadcast_text(self, text: str) -> str:
        return "1"

    def barrier(self) -> None:
        """Nobody claims before all are made."""


def work_stealing(clock: Clock, by_speed: bool) -> Iterator[Step]:
    """Who has nothing left takes a piece of the rank that is furthest behind."""
    membership, speeds, store = even_shares(range(RANKS), 0, len(ALL)), list[list[float]](), HashStore()
    claims = [Claims(cast(Group, Member(rank, store))) for rank in range(RANKS)]
    for step in range(STEPS):
        if by_speed and step and step % EVERY == 0:
            membership, speeds = _moved(membership, speeds), []
        table = clock.table(step)
        # All begin the step before anyone claims.
        shares = [StealingShare(replace(membership, me=rank), claims[rank], lambda: None) for rank in range(RANKS)]
        free, done, computed = [(0.0, rank) for rank in range(RANKS)], [0] * RANKS, list[int]()
        ends = [0.0] * RANKS
        while free:
            now, rank = heapq.heappop(free)
            ends[rank] = now
            piece = shares[rank].next()
            if piece is not None:
                computed.append(piece)
                heapq.heappush(free, (now + float(table[rank, done[rank]]), rank))
                done[rank] += 1
        assert sorted(computed) == list(ALL), "each piece is computed once"
        speeds.append([end / count for end, count in zip(ends, done, strict=True)])
        yield max(ends), ALL


RULES: dict[str, Callable[[Clock], Iterator[Step]]] = {
    "synchronous": synchronous,
    "Cutoff": cutoff,
    "DropCompute": drop_compute,
    "shares by speed": shares_by_speed,
    "work stealing": partial(work_stealing, by_speed=False),
    "both": partial(work_stealing, by_speed=True),
}


def passes_of(seed: int) -> Passes:
    """`digits` with half of its width, as in the other comparisons of relaxed synchrony."""
    changes = ["model.options.width=8", "model.options.dropout=0.0", "model.options.zero_gamma=false", "polish=null"]
    changes += [f"seed={seed}", "stages=[{until: 20ep, images_per_worker: 16, augment: false}]"]
    recipe = load_recipe("digits", changes).recipe
    train, held_out = open_sources(recipe.data, None, recipe.seed)
    judged = Pipeline(held_out, recipe.held_out_data, recipe.seed)
    return Passes(recipe, Pipeline(train, recipe.data, recipe.seed), judged)


def errors(passes: Passes, steps: Sequence[Step], lr: float) -> list[float]:
    """The error every POINT steps of plain SGD on the mean gradient over the pieces of each step."""
    weights, found = passes.initial.clone(), list[float]()
    for step, (_, pieces) in enumerate(steps):
        if pieces:
            total = sum((passes.gradient(weights, step * len(ALL) + piece) for piece in pieces), torch.zeros(()))
            weights.sub_(total / len(pieces), alpha=lr)
        if step % POINT == POINT - 1:
            found.append(passes.error(weights))
    return found


def one_slow(text: str, seed: int) -> DelayModel:
    """The delays, by the first seed from `seed` * 1,000 on whose slow ranks, if it has any kind of them, are one."""
    for number in range(1000 * seed, 1000 * (seed + 1)):
        model = delay_model(text, number)
        if not text.startswith("slow") or (model.table(RANKS, 0, 1) > 0).sum() == 1:
            return model
    raise AssertionError("one seed of a thousand has one slow rank")


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f} ({stdev(values):.1f})" if len(values) > 1 else f"{values[0]:.1f}"


def main(seeds: int = 5, lr: Annotated[float, Option(help="of SGD")] = 1.0) -> None:
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    for seed in range(seeds):
        passes = passes_of(seed)
        exact = errors(passes, [(0.0, ALL)] * STEPS, lr)
        for name, text in DELAYS.items():
            runs = {rule: list(make(Clock(one_slow(text, seed)))) for rule, make in RULES.items()}
            ends = {rule: np.cumsum([seconds for seconds, _ in steps]) for rule, steps in runs.items()}
            until = min(float(each[-1]) for each in ends.values())
            for rule, steps in runs.items():
                is_exact = all(len(pieces) == len(ALL) for _, pieces in steps)
                curve = exact if is_exact else errors(passes, steps, lr)
                used = sum(len(pieces) for _, pieces in steps[WARMUP:])
                seconds = float(ends[rule][-1] - ends[rule][WARMUP - 1])
                share = used / (len(ALL) * (STEPS - WARMUP))
                by_then = max(1, int(np.searchsorted(ends[rule], until, side="right")) // POINT)
                row = (16 * used / seconds, 100 * share, 100 * curve[-1], 100 * curve[by_then - 1])
                found.setdefault((name, rule), []).append(row)
    show(found)


def show(found: dict[tuple[str, str], Any]) -> None:
    print("| delays | rule | images a virtual second | of synchronous | work used, % | error after all steps, % "
          "| error at equal time, % |\n|" + " --- |" * 7)  # fmt: skip
    for (name, rule), rows in found.items():
        rates, shares, after, by_then = zip(*rows, strict=True)
        base = [row[0] for row in found[name, "synchronous"]]
        gain = spread([rate / each for rate, each in zip(rates, base, strict=True)]).replace(" (0.0)", "")
        print(f"| {name} | {rule} | {spread(rates)} | {gain} | {fmean(shares):.1f} | {spread(after)} "
              f"| {spread(by_then)} |")  # fmt: skip
        sample(f"{name}, {rule}, images a virtual second", rates)
        sample(f"{name}, {rule}, % error after all steps", after)
        sample(f"{name}, {rule}, % error at equal time", by_then)
