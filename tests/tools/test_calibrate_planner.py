"""The planner's calibration: the factors that ship are the fit of the rows that ship, and the page is its own."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from tools.calibrate_planner import report
from tools.calibrate_planner.fit import ROW_SPREAD, fit_factors, predict_left_out
from tools.calibrate_planner.report import Played, further_rows, read_played, step_rows

from torusgd.plan.cluster import load_calibrated, load_parameters
from torusgd.plan.published import counted_groups, predict, predict_row, read_rows, system_of

ROWS = read_rows()
ONE = Played(
    "ethernet", 16, "native", "das_vgga_aws", "2026-11-21",
    600.0, 400.0, 390.0, 410.0, 300.0, 380.0, 1100.0, 9.0, 10.0, 18.0, 9.0, 50.0,
)  # fmt: skip


def test_what_ships_makes_sense_and_the_quickest_of_a_published_row_is_its_rehearsed_figure() -> None:
    assert (ONE.error, ONE.error_late, ONE.error_of_step) == pytest.approx((-0.25, -0.05, -100 / 1100))
    played = [ONE, replace(ONE, settings="torus", speedup=12.0), replace(ONE, published_id="", speedup=15.0)]
    best = [report.best_of(played, name) for name in ("das_vgga_aws", "sony_v2_4")]
    assert [each and each.settings for each in best] == ["torus", None]
    heading, rule, line = report.section([ONE])[-3:]
    assert heading.count("|") == rule.count("|") == line.count("|")
    assert "| 400 (390 to 410) | 300 | -25 % | -9.1 % |" in line
    ids = {row.id: row for row in ROWS}
    for each in read_played():
        assert not each.published_id or ids[each.published_id].devices == each.devices
        assert each.least <= each.exposed <= each.most
        assert 1 < each.speedup <= 1.05 * each.devices
        assert min(each.stretch, each.shrink) >= 1


def test_figures_that_were_never_fitted() -> None:
    """Further ones, and steps of other runs."""
    for found, known, middle, most in ((further_rows(), ROWS, 0.1, 0.15), (step_rows(), further_rows(), 0.05, 0.2)):
        assert not {row.id for row in found} & {row.id for row in (*ROWS, *known)}
        errors = [abs(predict_row(row).error) for row in found]
        assert median(errors) <= middle
        assert max(errors) <= most


def test_the_shipped_factors_and_predictions_of_what_is_left_out_are_the_fits_which_find_what_made_rows() -> None:
    shipped = load_calibrated().factors
    assert fit_factors(ROWS, shipped) == pytest.approx(shipped, rel=1e-3)
    assert set(fit_factors([]).values()) == {1.0}
    known, several = load_calibrated(), [row.id for rows in counted_groups(ROWS).values() for row in rows]
    for name in ("dgxa100_96", "you_resnet50_14"):
        row = next(row for row in ROWS if row.id == name)
        factors = fit_factors([other for other in ROWS if other is not row], known.factors)
        assert predict(row, system_of(row, factors)) == pytest.approx(known.left_out[name], rel=1e-3)
    group = [row for row in ROWS if (row.cluster, row.software) == ("stampede2-knl", "intel-caffe-knl")]
    found = predict_left_out(ROWS, [group], known.factors)
    assert len(found) == len(group) == 2
    assert found == pytest.approx({name: known.system_left_out[name] for name in found}, rel=1e-3)
    # Of a system with one row that row is left out.
    alone = {row.id for row in ROWS} - set(several)
    assert len(several) == 27
    assert {name: known.left_out[name] for name in alone} == {name: known.system_left_out[name] for name in alone}
    # Rows made by the model with known factors: the fit comes back to them, against the pull of the spreads.
    made = {parameter.name: 1.0 for parameter in load_parameters()} | {"knl-peak": 1.5}
    rows = [row for row in ROWS if row.cluster == "stampede2-knl"]
    rows = [row.model_copy(update={"value": predict(row, system_of(row, made))}) for row in rows]
    assert fit_factors(rows)["knl-peak"] == pytest.approx(1.5, rel=0.02)
    assert ROW_SPREAD < 0.1


@pytest.mark.parametrize(("folder", "write"), [("docs", report.markdown), ("notes", report.details)])
def test_the_pages_are_those_that_the_command_writes(folder: str, write: Callable[..., str]) -> None:
    page = Path(__file__).parents[2] / folder / "published.md"
    written = write(*([predict_row(row) for row in rows] for rows in (ROWS, further_rows(), step_rows())))
    number = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
    assert number.sub("#", page.read_text()) == number.sub("#", written), "run python -m tools.calibrate_planner"
    # Another torch may run a kernel more or less: a change in the last digits is none.
    values = [[float(n.replace(",", "")) for n in number.findall(text)] for text in (page.read_text(), written)]
    assert values[0] == pytest.approx(values[1], rel=0.01, abs=0.3), "run python -m tools.calibrate_planner"
