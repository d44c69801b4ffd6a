"""Relaxed synchrony in virtual time: the comparisons of docs/synchrony.md, each a Markdown table on stdout.

    python -m benchmarks slow_ranks synchrony cutoff               rules that choose how many gradients to wait for
    python -m benchmarks slow_ranks synchrony progress    steps of 1,000 workers under barriers: the paper's figure
    python -m benchmarks slow_ranks synchrony barriers             error over time: BSP, SSP, ASP, pBSP, pSSP
    python -m benchmarks slow_ranks synchrony averaging   synchronous, gossip, elastic averaging at 4 to 128 workers
    python -m benchmarks slow_ranks synchrony local                local SGD and DiLoCo at equal images

Everything is keyed: the same tables each time on one machine, whatever else runs on it.

Needs: nothing.
"""

import argparse
import json
from collections.abc import Callable
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
import torch

from torusgd.recipe.load import load_recipe
from torusgd.simulate import Point, Setting, simulate
from torusgd.synchrony.barriers import barrier, steps_begun
from torusgd.synchrony.cutoff import CutoffRun, MovingAverage, best_cutoff, with_predictor
from torusgd.synchrony.delays import delay_model
from torusgd.synchrony.state_space import StateSpace, fit

from ..record import RESULTS, sample

POINTS = RESULTS / "averaging.json"
"""virtual seconds, images and error at PARTS points of each run of `averaging`"""
PARTS = 20


def node_times(steps: int, nodes: int, workers: int, seed: int, slow_from: int | None = None) -> np.ndarray:
    """Seconds of a cluster's workers [steps, nodes * workers].

    Each node is busy with something else for spells (a keyed Markov chain: 2 % of idle steps begin one, 5 % of busy
    ones end it), which makes all of its workers 1.5 to 3 times as slow; noise is log-normal with 10 %. From
    `slow_from` on the first node is three times as slow and stays so.
    """
    rng = np.random.default_rng(seed)
    busy, factor, rows = np.zeros(nodes, dtype=bool), np.ones(nodes), []
    for step in range(steps):
        turns = rng.random(nodes) < np.where(busy, 0.05, 0.02)
        factor = np.where(turns, np.where(busy, 1.0, rng.uniform(1.5, 3.0, nodes)), factor)
        busy ^= turns
        now = factor.copy()
        if slow_from is not None and step >= slow_from:
            now[0] = 3.0
        rows.append(np.repeat(now, workers) * np.exp(0.1 * rng.normal(size=nodes * workers)))
    return np.array(rows)


def elfving(mean: float, deviation: float, workers: int) -> np.ndarray:
    """E[x_(c)] for c = 1..n of independent normal times, by Elfving's approximation: float64 [workers].

    E[x_(c)] = mean + deviation * Phi^-1((c - pi/8) / (n - pi/4 + 1)) (Elfving, Biometrika 34, 1947).
    """
    chances = (np.arange(1, workers + 1) - np.pi / 8) / (workers - np.pi / 4 + 1)
    return mean + deviation * np.array([NormalDist().inv_cdf(chance) for chance in chances])


def with_counts(times: np.ndarray, choose: Callable[[np.ndarray], int]) -> CutoffRun:
    """The run of a rule on known times, seconds [steps, workers]: from a step's times to how many it waits for."""
    counts = np.array([choose(row) for row in times], dtype=np.int64)
    seconds = np.take_along_axis(np.sort(times, axis=1), counts[:, None] - 1, axis=1)[:, 0]
    return CutoffRun(counts, seconds)


class FittedElfving:
    """Elfving's approximation by mean and deviation over the workers of the step before, as if they were alike."""

    def __init__(self) -> None:
        self.last: np.ndarray | None = None

    def __call__(self, row: np.ndarray) -> int:
        last, self.last = self.last, row
        return len(row) if last is None else best_cutoff(elfving(last.mean(), last.std(), len(row)))


def cutoff(options: argparse.Namespace) -> None:
    (nodes, workers), half = options.nodes, 150
    n = nodes * workers
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(options.seeds):
        known = node_times(600, nodes, workers, seed=100 + seed)
        times = node_times(2 * half, nodes, workers, seed=200 + seed, slow_from=half)
        average = MovingAverage(n, seed)
        for row in known:
            average.observe(row, float(row.max()))
        runs = {
            "all of them": with_counts(times, len),
            "static, 96 %": with_counts(times, lambda row: round(0.96 * len(row))),
            "Elfving, of the step before": with_counts(times, FittedElfving()),
            "moving average": with_predictor(times, average),
            "state space, learned": with_predictor(times, StateSpace(fit(known, seed, states=nodes), known, seed)),
            "oracle": with_counts(times, lambda row: best_cutoff(np.sort(row))),
        }
        for name, run in runs.items():
            found.setdefault(name, []).append((run.throughput(0, half), run.throughput(half)))
    print(f"{n} workers on {nodes} nodes, gradients a second, n = {options.seeds}: mean (deviation)\n")
    print("| rule | before | after a node turns slow | of the oracle |\n| --- | --- | --- | --- |")
    best = found["oracle"]
    for name, values in found.items():
        shares = [sum(value) / sum(most) for value, most in zip(values, best, strict=True)]
        cells = [spread([v[i] for v in values]) for i in (0, 1)]
        sample(f"{name}, gradients a second", [v[0] for v in values])
        print(f"| {name} | {cells[0]} | {cells[1]} | {100 * fmean(shares):.1f} % |")


def spread(values: list[float]) -> str:
    return f"{fmean(values):.1f} ({stdev(values):.1f})"


def errors(
    form: str, workers: int, delays: str, lr: float, compute: float, seeds: int, momentum: float = 0.0, **limit: Any
) -> list[tuple[Point, ...]]:
    """`error_points` of each seed's run."""
    return [error_points(form, workers, delays, lr, compute, seed, momentum, **limit) for seed in range(seeds)]


def error_points(
    form: str,
    workers: int,
    delays: str,
    lr: float,
    compute: float,
    seed: int,
    momentum: float,
    points: int = 3,
    **limit: Any,
) -> tuple[Point, ...]:
    """The points of a run: `digits` with a network of half the width, 16 images a gradient, no augmentation.

    The network has no dropout and begins with its residual blocks at work, so that short runs of plain SGD get
    somewhere.
    """
    options = ["width=8", "dropout=0.0", "zero_gamma=false"]
    overrides = [f"model.options.{option}" for option in options] + ["polish=null", f"seed={seed}"]
    overrides.append("stages=[{until: 20ep, images_per_worker: 16, augment: false}]")
    setting = Setting(load_recipe("digits", overrides).recipe, form, workers, delays, lr, compute, momentum)
    return simulate(setting, points=points, **limit).points


def progress(options: argparse.Namespace) -> None:
    print("1,000 workers, steps of Exp(1) s, 400 virtual seconds: steps begun\n")
    print("| barrier | mean | least | most |\n|" + " --- |" * 4)
    named = ("bsp", "pbsp:10", "ssp:5", "pssp:10x5", "asp", "ssp:4", "pssp:10x4")
    for form in options.forms or (*named, *(f"pbsp:{2**k}" for k in range(7))):
        steps = steps_begun(1000, barrier(form), delay_model("exponential", seed=0), compute=0.0, seed=0, until=400.0)
        print(f"| `{form}` | {steps.mean():.1f} | {steps.min()} | {steps.max()} |", flush=True)
        sample(f"{form}, mean steps", [steps.mean()])


def barriers(options: argparse.Namespace) -> None:
    print("6 workers, sleep Gamma(1, 1) s before a step, SGD: error in % at virtual times, "
          f"n = {options.seeds}: mean (deviation)\n")  # fmt: skip
    print("| rate | barrier | images at the end | 50 s | 100 s | 150 s |\n|" + " --- |" * 6)
    for lr in options.rates:
        for form in options.forms or ("bsp", "pbsp:2", "pssp:2x4", "ssp:4", "asp"):
            runs = errors(form, 6, "gamma:1@1", lr, 0.001, options.seeds, options.momentum, seconds=150.0)
            cells = [spread([100 * run[i].error for run in runs]) for i in range(1, 4)]
            images = fmean(run[-1].images for run in runs)
            sample(f"{lr}, {form}, % error at 150 s", [100 * run[3].error for run in runs])
            print(f"| {lr} | `{form}` | {images:,.0f} | {' | '.join(cells)} |", flush=True)


def averaging(options: argparse.Namespace) -> None:
    """Each run's points are kept in POINTS as soon as it has ended, so that the same command goes on."""
    images = options.epochs * 1437  # digits trains on four fifths of its 1,797
    print(f"Steps of 1 + Exp(1) s, {options.epochs} epochs, SGD of momentum {options.momentum}: error in % after "
          "a part of them, and when workers that nobody waits for have ended theirs, "
          f"n = {options.seeds}: mean (deviation)\n")  # fmt: skip
    print("| rate | workers | form | virtual seconds | 1/4 | 1/2 | all | at equal time |\n|" + " --- |" * 8)
    for lr in options.rates:
        for workers in options.workers:
            forms = options.forms or ("bsp", "gossip:1", "elastic:4")
            found = {form: kept_points(form, workers, lr, images, options) for form in forms}
            ends = [min(runs[seed][-1].time for runs in found.values()) for seed in range(options.seeds)]
            for form, runs in found.items():
                by_images = [
                    [next(point.error for point in run if point.images >= images * part) for run in runs]
                    for part in (0.25, 0.5, 1)
                ]
                cells = [spread([100 * error for error in errors_of]) for errors_of in by_images]
                at_end = [[p for p in run if p.time <= end][-1] for run, end in zip(runs, ends, strict=True)]
                cells.append(spread([100 * point.error for point in at_end]))
                name = f"{lr}, momentum {options.momentum}, {workers} workers, {form}"
                sample(f"{name}, % error of {options.epochs} epochs", [100 * run[-1].error for run in runs])
                sample(f"{name}, % error at equal time", [100 * point.error for point in at_end])
                seconds = fmean(run[-1].time for run in runs)
                print(f"| {lr} | {workers} | `{form}` | {seconds:,.0f} | {' | '.join(cells)} |", flush=True)


def kept_points(form: str, workers: int, lr: float, images: int, options: argparse.Namespace) -> list[list[Point]]:
    """The points of each seed's run, from POINTS where it has been done."""
    found = []
    for seed in range(options.seeds):
        name = f"rate {lr}, momentum {options.momentum}, {workers} workers, {form}, {images} images, seed {seed}"
        known = json.loads(POINTS.read_text()) if POINTS.exists() else {}
        if name not in known:
            run = error_points(form, workers, "exponential", lr, 1.0, seed, options.momentum, PARTS, images=images)
            known[name] = [[round(p.time, 2), p.images, round(p.error, 4)] for p in run]
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known))
            POINTS.write_text(f"{{\n{lines}\n}}\n")
        found.append([Point(*point) for point in known[name]])
    return found


def local(options: argparse.Namespace) -> None:
    print("4 workers, steps of 1 + Exp(1) s, 8,000 images, SGD: error in %, "
          f"n = {options.seeds}: mean (deviation)\n")  # fmt: skip
    print("| rate | form | exchanges | virtual seconds | error |\n|" + " --- |" * 5)
    for lr in options.rates:
        for form in options.forms or ("bsp", "local:4", "local:16", "diloco:16"):
            runs = errors(form, 4, "exponential", lr, 1.0, options.seeds, images=8000)
            seconds, error = fmean(run[-1].time for run in runs), spread([100 * run[-1].error for run in runs])
            sample(f"{lr}, {form}, % error of 8,000 images", [100 * run[-1].error for run in runs])
            exchanges = runs[0][-1].images // (4 * 16) // int(form.partition(":")[2] or 1)
            print(f"| {lr} | `{form}` | {exchanges} | {seconds:,.0f} | {error} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparisons = {"cutoff": cutoff, "progress": progress, "barriers": barriers, "averaging": averaging, "local": local}
    parser.add_argument("comparison", choices=comparisons)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 4.0], help="of SGD")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64, 128], help="of averaging")
    parser.add_argument("--momentum", type=float, default=0.0, help="of the server, under barriers")
    parser.add_argument("--nodes", type=int, nargs=2, default=[4, 40], help="of cutoff, and workers of each")
    parser.add_argument("--epochs", type=int, default=40, help="of averaging")
    parser.add_argument("--forms", nargs="+", help="instead of those of the comparison")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comparisons[options.comparison](options)


if __name__ == "__main__":
    main()
