"""The curve over devices and its knee."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .cluster import Cluster, Software
from .forecast import Forecast, Job, forecast
from .run_time import Span

KNEE_EFFICIENCY = 0.8
"""the knee is the last point of the curve where one more device still gives this share of one device's work"""


def device_counts(limit: int, workers: int) -> list[int]:
    """A few numbers of devices an octave up to `limit`, which is one of them, that share the virtual workers evenly.

    Divisors of `workers` stand closer than others; of the others up to `workers` only those are taken that leave at
    most 5 % of the devices' time idle.

    >>> device_counts(64, 48)
    [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 48, 58, 64]
    """
    counts, last = {limit}, 0.0
    for count in range(1, limit):
        divides = workers % count == 0
        even = count > workers or workers / (count * math.ceil(workers / count)) >= 0.95
        if count >= last * (2**0.125 if divides else 2**0.25) and even:
            counts.add(count)
            last = count
    return sorted(counts)


def fixed_batch(job: Job, devices: int) -> Job:
    """The job with the same batches, cut anew where there are more devices than virtual workers: strong scaling."""
    spans = []
    for span in job.spans:
        workers = max(span.workers, devices)
        images = math.ceil(span.batch / workers)
        spare = images * workers - span.batch
        spans.append(span if workers == span.workers else Span(span.steps, images, workers, spare))
    return Job(job.cost, tuple(spans), job.train_images, job.eval_images, job.evaluations)


def fixed_share(job: Job, devices: int) -> Job:
    """The job with one virtual worker a device and as many epochs, so that the batch grows: weak scaling."""
    spans = tuple(Span(math.ceil(span.steps * span.workers / devices), span.images, devices) for span in job.spans)
    return Job(job.cost, spans, job.train_images, job.eval_images, job.evaluations)


@dataclass(frozen=True)
class Sweep:
    """Forecasts over devices; `knee` is the number of devices beyond which more bring little."""

    forecasts: tuple[Forecast, ...]
    knee: int


def sweep(
    job: Job,
    cluster: Cluster,
    program: Callable[[int], Software],
    counts: Sequence[int],
    scale: Callable[[Job, int], Job] = fixed_batch,
) -> Sweep:
    """Forecasts for every number of devices, each with the program that trains on so many.

    `scale` keeps the batch (`fixed_batch`) or a device's share of it (`fixed_share`).
    """
    forecasts = tuple(forecast(scale(job, count), cluster, program(count), count) for count in counts)
    return Sweep(forecasts, knee_of([(f.devices, f.images_per_second) for f in forecasts]))


def knee_of(curve: Sequence[tuple[int, float]]) -> int:
    """The last number of devices up to which every added one kept KNEE_EFFICIENCY of the first point's rate a device.

    Taken on the curve's upper hull, so that numbers that share the work badly do not count.

    >>> knee_of([(1, 100.0), (2, 195.0), (3, 200.0), (4, 370.0), (8, 500.0)])
    4
    """
    hull: list[tuple[int, float]] = []
    for point in curve:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    least = KNEE_EFFICIENCY * hull[0][1] / hull[0][0]
    return next((a[0] for a, b in pairwise(hull) if _slope(a, b) < least), hull[-1][0])


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
