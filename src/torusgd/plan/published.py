"""Published results: a table of them, and what the planner predicts for each row."""

import csv
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import UserError
from ..recipe.load import validate
from ..recipe.schema import Count, Positive, Section
from .buckets import cut_buckets
from .calibration import Factors, calibrated
from .catalog import load_cluster, load_software, tree_of
from .cluster import Cluster, Communication, Software
from .known import known_cost
from .model_cost import ModelCost
from .network import phases
from .run_time import HIGH, LOW, run_time, staged, widened
from .timeline import step_time

COLUMNS = ("id", "system", "model", "cluster", "software", "devices", "batch_per_device", "global_batch", "epochs")
_SCALE = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_UNITS = {
    "throughput": ("images/s",),
    "iteration": tuple(_SCALE),
    "time_to_train": tuple(_SCALE),
    "scaling_efficiency": ("1",),
    "speedup": ("x",),
    "allreduce_speedup_vs_ring": ("x",),
}


class Row(Section):
    """One published figure."""

    id: str
    system: str
    model: str
    cluster: str
    software: str
    devices: Count
    images: tuple[Count, ...]
    """of a device, a value a stage; empty where the metric needs none"""
    epochs: Positive | None
    metric: Literal[
        "throughput", "iteration", "time_to_train", "scaling_efficiency", "speedup", "allreduce_speedup_vs_ring"
    ]
    value: Positive
    unit: str
    mark: str


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a row, in the row's unit; `error` is predicted / published - 1."""

    row: Row
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.row.value - 1

    def as_dict(self) -> dict[str, str | float]:
        """For JSON."""
        return {
            "id": self.row.id,
            "metric": self.row.metric,
            "published": self.row.value,
            "predicted": self.predicted,
            "low": self.low,
            "high": self.high,
            "error": self.error,
        }


def read_rows(path: str | Path | None = None) -> list[Row]:
    """Reads a table of published results, by default the one that ships; UserError names the row and the column."""
    where = "published.csv" if path is None else str(path)
    try:
        text = (files(__package__).joinpath("published.csv") if path is None else Path(path)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in (*COLUMNS, "metric", "value", "unit") if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(
            f"{where}: the column {missing[0]} is missing; the first line must name {', '.join(COLUMNS)}, ..."
        )
    rows = [_row(record, f"{where}: row {record['id'] or number}") for number, record in enumerate(reader, 2)]
    if not rows:
        raise UserError(f"{where}: has no rows")
    return rows


def _row(record: dict[str, str | None], where: str) -> Row:
    fields = {key: (value or "").strip() for key, value in record.items() if key is not None}
    devices = _number(fields["devices"], where, "devices")
    images = [_number(part, where, "batch_per_device") for part in fields["batch_per_device"].split(">") if part]
    batches = [_number(part, where, "global_batch") for part in fields["global_batch"].split(">") if part]
    if devices < 1:
        raise UserError(f"{where}: devices: needs at least 1, got {fields['devices']}")
    if batches and not images:
        images = [math.ceil(batch / devices) for batch in batches]
    # Published batches are rounded (32K); an image a device is no rounding.
    shares = [batch / devices for batch in batches]
    if batches and (len(images) != len(shares) or any(abs(a - b) >= 1 for a, b in zip(images, shares, strict=True))):
        raise UserError(f"{where}: global_batch {fields['global_batch']} is not batch_per_device times devices")
    tree = {key: fields[key] for key in ("id", "system", "model", "cluster", "software", "metric", "unit")}
    numbers = {"devices": devices, "images": images, "value": _number(fields["value"], where, "value")}
    epochs = _number(fields["epochs"], where, "epochs") if fields["epochs"] else None
    row = validate(Row, {**tree, **numbers, "epochs": epochs, "mark": fields.get("mark", "")}, where)
    if row.unit not in _UNITS[row.metric]:
        raise UserError(f"{where}: unit {row.unit or '(empty)'}: {row.metric} is in {' or '.join(_UNITS[row.metric])}")
    if not row.images and row.metric != "allreduce_speedup_vs_ring":
        raise UserError(f"{where}: batch_per_device: is missing; {row.metric} depends on it")
    if row.metric == "time_to_train" and row.epochs is None:
        raise UserError(f"{where}: epochs: is missing; time_to_train depends on it")
    return row


def _number(text: str, where: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: {column}: needs a number, got {text or 'nothing'!r}") from None
    return int(value) if value.is_integer() else value


@dataclass(frozen=True)
class System:
    """What a row ran on."""

    cost: ModelCost
    cluster: Cluster
    software: Software


def system_of(row: Row, factors: Factors | None = None) -> System:
    """A row's network, cluster and software, calibrated; UserError says which of them is unknown."""
    try:
        cost = known_cost(row.model)
        if factors is None:
            return System(cost, load_cluster(row.cluster), load_software(row.software))
        cluster = calibrated("clusters", row.cluster, tree_of("clusters", row.cluster), factors)
        software = calibrated("software", row.software, tree_of("software", row.software), factors)
    except UserError as error:
        raise UserError(f"row {row.id}: {error}") from error
    return System(cost, validate(Cluster, cluster, row.cluster), validate(Software, software, row.software))


def predict(row: Row, system: System, quantile: float = 0.5) -> float:
    """The row's figure, in its unit; `quantile` of the slowest device's speed."""
    if row.metric == "allreduce_speedup_vs_ring":
        return _allreduce_speedup(system, row.devices)
    if not system.cost.forward.flops.size:
        raise UserError(f"row {row.id}: model {row.model}: only its gradients are known, for allreduce_speedup_vs_ring")
    images, scale = row.images[-1], _SCALE.get(row.unit, 1.0)
    software = system.software
    if row.metric == "time_to_train":
        assert row.epochs is not None
        spans = staged(row.epochs, row.images, row.devices)
        evaluations = math.ceil(row.epochs / software.evaluation.every)
        run = run_time(system.cost, system.cluster, software, row.devices, spans, evaluations, quantile=quantile)
        return run.seconds / scale
    seconds = step_time(system.cost, system.cluster, software, row.devices, images, quantile=quantile).seconds
    base = min(software.base_devices, row.devices)
    match row.metric:
        case "iteration":
            return seconds / scale
        case "throughput":
            return row.devices * images / seconds
        case "scaling_efficiency":
            return step_time(system.cost, system.cluster, software, base, images).seconds / seconds
        case "speedup":
            alone = row.devices * images // base
            return base * step_time(system.cost, system.cluster, software, base, alone).seconds / seconds
    raise AssertionError(row.metric)


def _allreduce_speedup(system: System, devices: int) -> float:
    if devices == 1:
        return 1.0
    how = system.software.communication
    flat = how.model_copy(update={"algorithm": "ring"})
    buckets = cut_buckets(system.cost.gradients, np.zeros(len(system.cost.gradients)), how.buckets, how.wire_bits // 8)

    def seconds(communication: Communication) -> float:
        parts = [phases(system.cluster, communication, devices, bucket.bytes) for bucket in buckets]
        return sum(phase.seconds for part in parts for phase in part)

    return seconds(flat) / seconds(how)


def predict_row(row: Row) -> Prediction:
    """The row with its band, by the calibration that ships."""
    system = system_of(row)
    values = [predict(row, system, quantile) for quantile in (0.5, LOW, HIGH)]
    low, high = widened(values, system.software.error)
    return Prediction(row, values[0], low, min(high, 1.0) if row.metric == "scaling_efficiency" else high)
