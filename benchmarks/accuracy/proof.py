"""What each technique brings: on against off, all else equal, paired seeds, at the full size of Fashion-MNIST.

    python -m benchmarks accuracy proof --data data/fashion-mnist --out runs/proof [--run MINUTES]

shows the plan and, with `--run`, goes on with it for so many minutes: the next training in the order of the table,
from where it was ended. The claims stand in claims.py, with their criteria, before their first run. At most BUDGET
core-hours are spent; what is left then is not resolved. Results are lines of benchmarks/results/proof-runs.jsonl, and
each look at the held-out images is one of proof-held-out.jsonl; `python -m benchmarks.tables` writes docs/proof.md's
tables from them.

    python -m benchmarks accuracy proof --messages

prints You et al.'s table of messages and volume by the size of the batch, which is computed and takes no run.

Needs: Fashion-MNIST; 16 core-hours in all, in pieces of any length.
"""

import math
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from typer import Option

from torusgd.plan.model_cost import known_cost

from ..record import markdown
from .claims import CLAIMS, HELD, OPEN, REFUTED, WARM, Claim, Criterion, Side, resolved
from .runs import LEDGER, RUNS, Arm, Key, go_on, has_weights, key_of, look, read

BUDGET = 16.0
"""core-hours of all trainings together"""
USUAL = 320.0
"""core-seconds of a training, before the first is done: what `fashion-large` took on an otherwise idle core"""
FAILS = 5.0
"""points below the best at which a rate fails"""
Machine = tuple[str, ...]


class Known:
    """What the two files hold, by recipe, machine (processor, torch, precision) and seed."""

    def __init__(self) -> None:
        self.lines = read(RUNS)
        self.validation, self.held_out = _by_key(RUNS, "validation"), _by_key(LEDGER, "top1")

    def trials(self, side: Side) -> dict[Arm, float]:
        """Top-1 of seed 0 on the validation images of the first machine that has trained all arms; empty: none has."""
        for machine in dict.fromkeys(key[2:] for key in self.validation):
            keys = {arm: (arm.sha256, 0, *machine) for arm in side.arms}
            if self.validation.keys() >= set(keys.values()):
                return {arm: self.validation[key] for arm, key in keys.items()}
        return {}

    def chosen(self, side: Side) -> Arm | None:
        """The arm of a side: of several the best of its trials; None: not yet known."""
        if not side.is_choice():
            return side.arms[0]
        trials = self.trials(side)
        return max(trials, key=lambda arm: trials[arm]) if trials else None

    def pairs(self, on: Arm | None, off: Arm | None) -> dict[tuple[Machine, int], tuple[float, float]]:
        """Top-1 in % of both by machine (processor and torch: an arm sets its precision) and seed."""
        if on is None or off is None:
            return {}
        sides = [
            {(key[2:4], key[1]): 100 * top1 for key, top1 in self.held_out.items() if key[0] == arm.sha256}
            for arm in (on, off)
        ]
        return {each: (sides[0][each], sides[1][each]) for each in sorted(sides[0].keys() & sides[1].keys())}

    def core_hours(self) -> float:
        """Of all trainings that count against the budget."""
        apart = {arm.sha256 for claim in CLAIMS if not claim.in_budget for arm in (*claim.on.arms, *claim.off.arms)}
        return float(sum(line["core_seconds"] for line in self.lines if line["recipe"] not in apart)) / 3600


def _by_key(path: Path, name: str) -> dict[Key, float]:
    return {key_of(line): float(line[name]) for line in read(path)}


Task = tuple[Claim, Arm, int, bool]


def needed(known: Known, only: str = "") -> Iterator[Task]:
    """Claim, arm, seed, and whether the held-out images are to be looked at, in the table's order, each once.

    Of claims whose technique has `only` in its name. What a choice will be nobody knows before; its first arm stands
    for it in the plan.
    """
    seen = set()
    for claim in (claim for claim in CLAIMS if only in claim.technique):
        on, off = known.chosen(claim.on), known.chosen(claim.off)
        trials = [
            (each, 0, False) for side, arm in ((claim.on, on), (claim.off, off)) if arm is None for each in side.arms
        ]
        there = {seed for _, seed in known.pairs(on, off)}
        final = [
            (arm or side.arms[0], seed, arm is not None)
            for seed in range(claim.seeds)
            if seed not in there
            for side, arm in ((claim.on, on), (claim.off, off))
        ]
        for arm, seed, is_final in (*trials, *final):
            if (arm, seed, is_final) not in seen:
                seen.add((arm, seed, is_final))
                yield claim, arm, seed, is_final


def left(known: Known, only: str = "") -> list[Task]:
    """What of it is not done on this machine."""
    found = []
    for claim, arm, seed, is_final in needed(known, only):
        key = arm.key(seed)
        if key not in known.held_out and (is_final or key not in known.validation):
            found.append((claim, arm, seed, is_final))
    return found


def show_plan(known: Known) -> None:
    """A line a technique: trainings to do, and the core-hours after them."""
    times = defaultdict(list)
    for line in known.lines:
        times[line["recipe"]].append(line["core_seconds"])
    usual = median([median(each) for each in times.values()] or [USUAL])
    hours, trainings = known.core_hours(), defaultdict(set)
    for claim, arm, seed, _ in left(known):
        trainings[claim].add((arm, seed))
    done = {(key[0], key[1]) for key in known.validation}
    print(f"{len(known.lines)} trainings done in {hours:.2f} core-hours of {BUDGET:g}; to do:")
    for claim, each in trainings.items():
        to_do = [arm for arm, seed in each if (arm.sha256, seed) not in done]
        more = sum(median(times.get(arm.sha256, [usual])) for arm in to_do) / 3600
        after = "outside of the budget"
        if claim.in_budget:
            hours += more
            after = f"{hours:6.2f} core-hours{' (beyond)' * (hours > BUDGET)}"
        print(f"  {claim.technique:55} {len(to_do):3} trainings, {after}")


def run(data: Path, out: Path, minutes: float, jobs: int, only: str) -> None:
    """Goes on with the first trainings that are left, `jobs` at a time and each on one core, until the time is up."""
    end = time.monotonic() + 60 * minutes
    flying: dict[Future[bool], tuple[Arm, int]] = {}

    def end_jobs(*_: Any) -> None:
        nonlocal end
        end = -math.inf
        for job in active_children():
            job.terminate()

    # So that no training goes on alone, its processor time uncounted.
    signal.signal(signal.SIGTERM, end_jobs)
    # A process for each job, since the processor time of a training is that of the process's children.
    with ProcessPoolExecutor(jobs, get_context("spawn"), _ignore_sigterm) as pool:
        while True:
            is_full = time.monotonic() >= end or len(flying) == jobs
            task = None if is_full else next_task(Known(), set(flying.values()), only)
            if task is not None:
                claim, arm, seed, is_final = task
                print(f"{claim.technique}: {' '.join(arm.words(seed))}", flush=True)
                flying[pool.submit(_go_on, arm, seed, is_final, data, out, end)] = arm, seed
                continue
            if not flying:
                break
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                del flying[future]
                if not future.result():
                    end = -math.inf
    show_plan(Known())


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # while a job waits for work; `ended` has its own


def next_task(known: Known, flying: set[tuple[Arm, int]], only: str = "") -> Task | None:
    """The first training that is left, within the budget, which no job is at."""
    is_spent = known.core_hours() >= BUDGET
    for claim, arm, seed, is_final in left(known, only):
        if (arm, seed) in flying or (is_spent and claim.in_budget):
            continue
        if is_final or seed == 0:  # else it stands for a choice that is not yet made
            return claim, arm, seed, is_final
    return None


def _go_on(arm: Arm, seed: int, is_final: bool, data: Path, out: Path, end: float) -> bool:
    """Trains, or looks at the held-out images; whether that came to its end before `end`, by the system's clock."""
    is_trained = arm.key(seed) in Known().validation
    if not (is_trained and is_final and has_weights(arm, seed, out)):
        return go_on(arm, seed, data, out, (end - time.monotonic()) / 60, has_line=is_trained)
    look(arm, seed, data, out)
    return True


def rows(known: Known) -> Iterator[tuple[object, ...]]:
    """A line of the table for each claim."""
    for claim in CLAIMS:
        pairs = known.pairs(known.chosen(claim.on), known.chosen(claim.off))
        differences = [on - off for on, off in pairs.values()]
        verdict, n = claim.criterion.verdict(differences), len(pairs)
        if n < claim.seeds:
            verdict = f"{OPEN}: {n} of {claim.seeds} pairs" if n else f"{OPEN}: not run"
        columns = zip(*pairs.values(), strict=True)
        sides = [f"{mean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in columns] or ["", ""]
        half = resolved(differences)
        told = [f"{mean(differences):+.2f}" if pairs else "", f"{half:.2f}" if half < math.inf else ""]
        machines = ", ".join(sorted({machine[0] for machine, _ in pairs}))
        names = f"{claim.on.name}; {claim.off.name}"
        yield claim.technique, names, *sides, *told, claim.criterion, n, machines, verdict


def warm_up(known: Known) -> str:
    """Whether without a warm-up a lower rate fails: FAILS points below the best of all eight arms."""
    claims = [claim for claim in CLAIMS if claim.fails]
    arms = {
        (side is claim.on, scale): side.arms[0]
        for claim, (scale, _) in zip(claims, WARM, strict=True)
        for side in (claim.on, claim.off)
    }
    means = {}
    for name, arm in arms.items():
        values = [on for on, _ in known.pairs(arm, arm).values()]
        if len(values) < claims[0].seeds:
            return OPEN
        means[name] = mean(values)
    best = arms[max(means, key=lambda name: means[name])]
    sooner = {True: math.inf, False: math.inf}
    for (is_warm, scale), arm in arms.items():
        verdict = Criterion(-FAILS).verdict([each - top for each, top in known.pairs(arm, best).values()])
        if verdict == OPEN:
            return OPEN
        if verdict == REFUTED:
            sooner[is_warm] = min(sooner[is_warm], scale)
    return HELD if sooner[False] < sooner[True] else REFUTED


def table() -> str:
    """The proof's table, from the files."""
    known = Known()
    names = ("technique", "on; off", "on: mean top-1, % (range)", "off", "difference", "resolved", "criterion", "n")
    trials = [line for line in known.lines if key_of(line) not in known.held_out]
    spent = (
        f"{len(known.lines)} trainings, {known.core_hours():.2f} core-hours of {BUDGET:g}; {len(known.held_out)} looks "
        f"at the held-out images, {len(trials)} trainings seen on the validation images alone."
    )
    found = markdown((*names, "machine", "verdict"), rows(known))
    return f"{spent}\n\n{found}\n\nWithout a warm-up a lower rate fails: {warm_up(known)}."


def choices() -> str:
    """What was chosen by the validation images, from the files."""
    known, found = Known(), []
    sides = dict.fromkeys(side for claim in CLAIMS for side in (claim.on, claim.off) if side.is_choice())
    for side in sides:
        best = known.chosen(side)
        for arm, top1 in known.trials(side).items():
            rate = next(change for change in reversed(arm.changes) if change.startswith("rate.lr="))
            found.append((side.name, rate[8:], f"{100 * top1:.2f}", "taken" if arm == best else ""))
    return markdown(("side", "rate", "top-1 on 5,000 validation images, seed 0, %", ""), found)


def noise() -> str:
    """The sweep over batches beside the gradient noise scale, which predicts where more images stop paying.

    McCandlish et al. (arXiv 1812.06162, equation 2.11): at batch B as much progress takes 1 + B / noise scale times the
    images of a small batch. The scale is that of the smallest batch's runs.
    """
    known, found = Known(), []
    first: dict[bool, float] = {}
    for claim in CLAIMS:
        if claim.batch is None:
            continue
        cells = [f"{claim.batch:,}"]
        for is_lars, side in ((True, claim.on), (False, claim.off)):
            arm = known.chosen(side)
            lines = [line for line in known.lines if arm is not None and line["recipe"] == arm.sha256]
            scales = [line["noise_scale"] for line in lines if line["noise_scale"] is not None]
            tops = [100 * known.held_out[key_of(line)] for line in lines if key_of(line) in known.held_out]
            scale = mean(scales) if scales else None
            if scale is not None:
                first.setdefault(is_lars, scale)
            more = f"{1 + claim.batch / first[is_lars]:.2f}" if is_lars in first else ""
            cells += [f"{mean(tops):.2f}" if tops else "", f"{scale:,.0f}" if scale is not None else "", more]
        found.append(cells)
    columns = ("LARS: top-1, %", "noise scale", "images, predicted", "SGD: top-1, %", "noise scale", "images")
    return markdown(("batch", *columns), found)


def messages() -> None:
    """What a larger batch saves in 90 epochs of ImageNet: the cost model of You et al. (arXiv 1709.05011, section 4).

    A step's all-reduce over a tree of P ranks is log2(P) messages of |W| bytes, each of alpha + |W| beta seconds. The
    constants are theirs for FDR InfiniBand.
    """
    ranks, epochs, images, alpha, beta = 512, 90, 1_281_167, 0.7e-6, 0.2e-9
    size = 4 * known_cost("resnet50").parameters
    print("| batch | steps | messages of a rank | sent by a rank, GB | seconds |\n|---|---|---|---|---|")
    for batch in (2**power for power in range(9, 17)):
        steps = math.ceil(epochs * images / batch)
        count = int(math.log2(ranks)) * steps
        told = f"{count * size / 1e9:,.0f} | {count * (alpha + size * beta):,.0f}"
        print(f"| {batch:,} | {steps:,} | {count:,} | {told} |")


def main(
    data: Annotated[Path, Option(help="folder of Fashion-MNIST")] = Path("data/fashion-mnist"),
    out: Annotated[Path, Option(help="where trainings go on")] = Path("runs/proof"),
    minutes: Annotated[float, Option("--run", help="go on with the plan for so many minutes")] = 0.0,
    jobs: Annotated[int, Option(help="trainings at a time, each on a core")] = 1,
    only: Annotated[str, Option(help="only claims whose technique has this in its name")] = "",
    messages_only: Annotated[bool, Option("--messages", help="only the table that is computed")] = False,
) -> None:
    """Shows the plan, and goes on with it."""
    if messages_only:
        messages()
        return
    if not any(only in claim.technique for claim in CLAIMS):
        raise SystemExit(f"--only {only}: none of the techniques has that in its name")
    show_plan(Known())
    if minutes:
        run(data, out, minutes, jobs, only)


if __name__ == "__main__":
    typer.run(main)
