"""Published results: how good the predictions are, and bad tables."""

import csv
import math
from pathlib import Path
from statistics import median

import pytest

from tests.messages import refused, refuses
from torusgd.plan.cluster import load_calibrated, load_parameters
from torusgd.plan.forecast import forecast, workload_of
from torusgd.plan.program import program_for
from torusgd.plan.published import Row, base_of, counted_groups, predict, predict_row, read_rows, system_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions

ROWS = read_rows()


def named(name: str) -> Row:
    return next(row for row in ROWS if row.id == name)


def test_most_published_values_lie_in_their_bands_and_leave_one_out_errors_are_within_the_aims() -> None:
    predictions = [predict_row(row) for row in ROWS]
    for each in predictions:
        assert 0 < each.low <= each.predicted <= each.high < math.inf, each.row.id
        assert list(each.as_dict()) == ["id", "metric", "published", "predicted", "low", "high", "error"]
    assert sum(each.low <= each.row.value <= each.high for each in predictions) >= 0.85 * len(ROWS)
    counted = [row for rows in counted_groups(ROWS).values() for row in rows]
    errors = {row.id: abs(load_calibrated().left_out[row.id] / row.value - 1) for row in counted}
    assert median(errors.values()) <= 0.03
    assert max(errors.values()) <= 0.11


def test_one_share_of_the_peak_tells_the_rows_of_another_cluster_and_two_networks_check_a_third() -> None:
    rows = [row for row in ROWS if row.software == "intel-caffe"]
    assert sorted(row.cluster for row in rows) == ["aws-c5.18xlarge"] * 2 + ["stampede2-skx"] * 3
    assert max(abs(load_calibrated().system_left_out[row.id] / row.value - 1) for row in rows) <= 0.13
    found = load_calibrated().other_networks
    assert {named(name).model for name in found} == {"vgg-a", "overfeat-fast", "cd-dnn"}
    assert max(abs(value / named(name).value - 1) for name, value in found.items()) <= 0.15


@pytest.mark.parametrize("row", [row for row in ROWS if row.recipe], ids=lambda row: row.recipe)
def test_a_records_recipe_and_its_row_are_one_run(row: Row) -> None:
    recipe, system = load_recipe(row.recipe).recipe, system_of(row)
    program = program_for(recipe, RuntimeOptions(workers=row.devices), system.cluster, system.software)
    planned = forecast(workload_of(recipe), system.cluster, program, row.devices)
    assert planned.run.seconds / {"s": 1, "min": 60}[row.unit] == pytest.approx(predict_row(row).predicted, rel=1e-3)
    images = [stage.images for stage in workload_of(recipe).stages]
    assert (images[0], images[-1]) == (row.images[0], row.images[-1])


def test_fewer_parameters_than_rows_none_for_a_row_and_each_moves_one() -> None:
    parameters = load_parameters()
    assert len(parameters) <= len(ROWS) / 2
    for rows in counted_groups(ROWS).values():
        several = [p for p in parameters if any(p.aims_at(row.cluster, row.software) for row in rows)]
        assert all(all(p.aims_at(row.cluster, row.software) for row in rows) for p in several)
    ones = {parameter.name: 1.0 for parameter in parameters}
    plain = [predict(row, system_of(row, ones)) for row in ROWS]
    for name in ones:
        assert [predict(row, system_of(row, {**ones, name: 1.3})) for row in ROWS] != plain, f"{name}: moves no row"


def test_two_stages_take_a_time_between_those_of_each_in_any_unit_and_relative_to_what() -> None:
    row = named("sony_v1_time")
    rows = (row.model_copy(update={"images": images, "recipe": ""}) for images in ((16, 32), (16,), (32,)))
    both, small, large = (predict(each, system_of(row)) for each in rows)
    assert large < both < small
    row = named("dgx1_1")
    seconds = predict(row.model_copy(update={"unit": "s"}), system_of(row))
    assert seconds == pytest.approx(predict(row, system_of(row)) / 1e3)
    bases = {
        "das_vgga_64": "1 device, the same batch", "goyal_256": "8 devices, as many images each",
        "hvd_torus_speedup": "flat ring", "h100_1": "",
    }  # fmt: skip
    assert {name: base_of(named(name)) for name in bases} == bases
    changes = {"metric": "throughput", "unit": "images/s", "images": (32,)}
    row = next(row for row in ROWS if row.model == "bert-large").model_copy(update=changes)
    refuses("a network known by its gradients", predict_row, row, about=f"row {row.id}:")


@pytest.mark.parametrize("metric", ["throughput", "iteration", "scaling_efficiency", "speedup"])
def test_one_device_is_a_row_too(metric: str) -> None:
    row = next(row for row in ROWS if row.metric == metric).model_copy(update={"devices": 1})
    found = predict_row(row)
    assert 0 < found.low <= found.predicted <= found.high
    ratio = next(row for row in ROWS if row.metric == "allreduce_speedup_vs_ring").model_copy(update={"devices": 1})
    assert predict_row(ratio).predicted == 1.0


def table(tmp_path: Path, **changes: str) -> Path:
    """The shipped table's first row with other values, or without a column where the value is None."""
    with (Path(__file__).parents[2] / "src/torusgd/plan/published.csv").open() as file:
        row = {**next(csv.DictReader(file)), **changes}
    path = tmp_path / "table.csv"
    with path.open("w") as file:
        csv.writer(file).writerows([row.keys(), row.values()])
    return path


WRONG = {
    "cluster": {"cluster": "abcj"}, "software": {"software": ""}, "model": {"model": "resnet5"}, "unit": {"unit": "ms"},
    "metric": {"metric": "speed"}, "value": {"value": "fast"}, "value = -1": {"value": "-1"},
    "devices": {"devices": "0"}, "batch_per_device": {"batch_per_device": "", "global_batch": ""},
    "global_batch": {"global_batch": "192"}, "epochs": {"metric": "time_to_train", "unit": "s"},
}  # fmt: skip


def test_bad_rows_and_tables_are_one_line_that_names_them(tmp_path: Path) -> None:
    for column, changes in WRONG.items():
        path = table(tmp_path, **changes)
        with refused(f"a published row: {column}", PATH=path) as caught:
            predict_row(read_rows(path)[0])
        assert f"row sony_v2_4: {column}" in str(caught.value)
    assert read_rows(table(tmp_path, batch_per_device=""))[0].images == (32,)
    (tmp_path / "short.csv").write_text("id,system\nx,y\n")
    (tmp_path / "empty.csv").write_text(table(tmp_path).read_text().splitlines()[0] + "\n")
    (tmp_path / "long.csv").write_text("id\n" + (1 << 18) * "x")
    for name in ("no-such.csv", "short.csv", "empty.csv", "long.csv"):
        refuses(f"a published table: {name}", read_rows, tmp_path / name, about=f"{tmp_path / name}:", TMP=tmp_path)
