"""Published results: a table of them, what the planner predicts for each row, and how good it is."""

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from ..errors import UserError, as_user_error
from ..recipe.load import load_recipe, parse_yaml, read_file, validate
from ..recipe.section import Count, Positive, Ranks, Section
from ..text import plural
from ..untrusted import MOST_TEXT
from .cluster import Cluster, Factors, Software, load_calibrated, load_cluster, load_parameters, load_software
from .forecast import HIGH, IMAGENET_EVAL, IMAGENET_TRAIN, LOW, Workload, run_time, staged, widened, workload_of
from .model_cost import ModelCost, known_cost
from .step_script import cut_buckets
from .timeline import phases, step_time

COLUMNS = ("id", "system", "model", "cluster", "software", "devices", "batch_per_device", "global_batch", "epochs")
_SCALE = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_UNITS = {
    "throughput": ("images/s",), "iteration": tuple(_SCALE), "time_to_train": tuple(_SCALE),
    "scaling_efficiency": ("1",), "speedup": ("x",), "allreduce_speedup_vs_ring": ("x",),
}  # fmt: skip


class Row(Section):
    id: str
    system: str
    model: str
    cluster: str
    software: str
    devices: Ranks
    images: tuple[Count, ...] = Field(alias="batch_per_device")  # in each stage; empty if the metric needs none
    batches: tuple[Count, ...] = Field(alias="global_batch")  # of all devices; empty if they are not published
    epochs: Positive | None
    metric: Literal[
        "throughput", "iteration", "time_to_train", "scaling_efficiency", "speedup", "allreduce_speedup_vs_ring"
    ]
    value: Positive
    unit: str
    recipe: str = ""  # the record's own, whose stages and evaluations a time to train is of; empty: none ships


@dataclass(frozen=True)
class Prediction:
    row: Row
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.value - 1

    def as_dict(self) -> dict[str, Any]:
        published = {"id": self.row.id, "metric": self.row.metric, "published": self.row.value}
        return {**published, "predicted": self.predicted, "low": self.low, "high": self.high, "error": self.error}


def read_rows(path: str | Path | None = None) -> list[Row]:
    """Reads a table of published results, by default the one that ships; UserError names the row and the column."""
    where = "published.csv" if path is None else str(path)
    shipped = files(__package__).joinpath("published.csv")
    text = shipped.read_text() if path is None else read_file(Path(path), where, MOST_TEXT)
    reader = csv.DictReader(text.splitlines())
    with as_user_error(where, of=csv.Error):  # such as of a cell of 128 KiB or more
        records = list(reader)
    missing = [name for name in (*COLUMNS, "metric", "value", "unit") if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(
            f"{where}: the column {missing[0]} is missing; the first line must name {', '.join(COLUMNS)}, ..."
        )
    rows = [_row(record, f"{where}: row {record['id'] or number}") for number, record in enumerate(records, 2)]
    if not rows:
        raise UserError(f"{where}: has no rows")
    return rows


def _row(record: dict[str, str | None], where: str) -> Row:
    fields = {key: (value or "").strip() for key, value in record.items() if key is not None}
    tree: dict[str, Any] = {key: text for key, text in fields.items() if key in Row.model_fields}
    for key in ("devices", "value", "epochs"):
        tree[key] = parse_yaml(fields[key], f"{where}: {key}")
    for key in ("batch_per_device", "global_batch"):
        tree[key] = [parse_yaml(part, f"{where}: {key}") for part in fields[key].split(">") if part]
    row = validate(Row, tree, where)
    # Published batches are rounded (32K), but by less than an image a device.
    shares = [batch / row.devices for batch in row.batches]
    if not row.images:
        row = row.model_copy(update={"images": tuple(map(math.ceil, shares))})
    if shares and (len(row.images) != len(shares) or np.abs(np.subtract(row.images, shares)).max() >= 1):
        raise UserError(f"{where}: global_batch {fields['global_batch']} is not batch_per_device times devices")
    if row.unit not in _UNITS[row.metric]:
        raise UserError(f"{where}: unit {row.unit or '(empty)'}: {row.metric} is in {' or '.join(_UNITS[row.metric])}")
    if not row.images and row.metric != "allreduce_speedup_vs_ring":
        raise UserError(f"{where}: batch_per_device: is missing; {row.metric} depends on it")
    if row.metric == "time_to_train" and row.epochs is None:
        raise UserError(f"{where}: epochs: is missing; time_to_train depends on it")
    return row


class System(NamedTuple):
    cost: ModelCost
    cluster: Cluster
    software: Software


def system_of(row: Row, factors: Factors | None = None) -> System:
    """A row's network, cluster and software, calibrated; UserError if one of them is unknown."""
    try:
        cost = known_cost(row.model)
        return System(cost, load_cluster(row.cluster, factors), load_software(row.software, factors))
    except UserError as error:
        raise UserError(f"row {row.id}: {error}") from error


def predict(row: Row, system: System, quantile: float = 0.5) -> float:
    """The row's figure, in its unit; `quantile` of the slowest device's speed."""
    if row.metric == "allreduce_speedup_vs_ring":
        return _allreduce_speedup(system, row.devices)
    if not system.cost.forward.flops.size:
        raise UserError(f"row {row.id}: model {row.model}: only its gradients are known, for allreduce_speedup_vs_ring")
    images, scale = row.images[-1], _SCALE.get(row.unit, 1.0)
    software = system.software
    if row.metric == "time_to_train":
        # The steps and evaluations are the recipe's, or as many as its epochs and program have.
        if row.recipe:
            run = workload_of(load_recipe(row.recipe).recipe)
        else:
            assert row.epochs is not None
            stages = staged(row.epochs, row.images, row.devices, whole_epochs=software.whole_epochs)
            evaluations = math.ceil(row.epochs / software.evaluation.every)
            run = Workload(system.cost, stages, IMAGENET_TRAIN, IMAGENET_EVAL, evaluations)
        return run_time(run, system.cluster, software, row.devices, quantile).seconds / scale
    seconds = step_time(system.cost, system.cluster, software, row.devices, images, quantile=quantile).seconds
    # An efficiency compares equal images a device, a speed-up equal batches.
    base = min(software.base_devices, row.devices)
    if row.metric == "iteration":
        return seconds / scale
    if row.metric == "throughput":
        return row.devices * images / seconds
    if row.metric == "scaling_efficiency":
        return step_time(system.cost, system.cluster, software, base, images).seconds / seconds
    alone = row.devices * images // base
    return base * step_time(system.cost, system.cluster, software, base, alone).seconds / seconds


def _allreduce_speedup(system: System, devices: int) -> float:
    if devices == 1:
        return 1.0
    own, gradients = system.software.communication, system.cost.gradients
    # The messages alone, bucket by bucket, without a backward pass that hides them.
    buckets = cut_buckets(gradients, np.zeros(len(gradients)), own.buckets, own.wire_bits // 8)
    flat, by_own = (
        sum(phase.seconds for bucket in buckets for phase in phases(system.cluster, how, devices, bucket.bytes))
        for how in (own.model_copy(update={"algorithm": "ring"}), own)
    )
    return flat / by_own


def predict_row(row: Row) -> Prediction:
    """The row with its band, by the calibration that ships."""
    system = system_of(row)
    values = [predict(row, system, quantile) for quantile in (0.5, LOW, HIGH)]
    low, high = widened(values, system.software.error)
    return Prediction(row, values[0], low, min(high, 1.0) if row.metric == "scaling_efficiency" else high)


def base_of(row: Row) -> str:
    """The base of a speed-up or efficiency, in words."""
    if row.metric == "allreduce_speedup_vs_ring":
        return "flat ring"
    if row.metric not in ("speedup", "scaling_efficiency"):
        return ""
    batch = "the same batch" if row.metric == "speedup" else "as many images each"
    return f"{plural(load_software(row.software).base_devices, 'device')}, {batch}"


def counted_groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by (cluster, software), those with two rows or more."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.cluster, row.software].append(row)
    return {key: members for key, members in groups.items() if len(members) > 1}


def summary(rows: Sequence[Row]) -> str:
    """The errors of the calibration on the rows that it has, in a few sentences."""
    parameters, fit = load_parameters(), load_calibrated()
    known = [row for row in rows if row.id in fit.left_out]
    counted = [row for members in counted_groups(known).values() for row in members]
    shared = [p for p in parameters if any(p.aims_at(row.cluster, row.software) for row in counted)]
    return (
        f"{len(parameters)} parameters for {len(known)} rows. Leave-one-out, {len(counted)} rows of systems with two "
        f"rows or more ({len(shared)} of the parameters): {error_sizes(counted, fit.left_out)}. "
        f"The same rows, each predicted without any row of its system (cluster and program): "
        f"{error_sizes(counted, fit.system_left_out)}. "
        f"All {len(known)} rows so: {error_sizes(known, fit.system_left_out)}. "
        f"The other {len(known) - len(counted)} rows are of systems with one row: fitted, and not counted above."
    )


def error_sizes(rows: Sequence[Row], predicted: Mapping[str, float]) -> str:
    """The median and the worst error of predictions of rows, in words."""
    errors = sorted(100 * abs(predicted.get(row.id, 0.0) / row.value - 1) for row in rows)
    return f"median error {median(errors):.1f} %, worst {errors[-1]:.1f} %"
