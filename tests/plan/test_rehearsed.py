"""The table of rehearsals on the page of published results."""

from dataclasses import replace

import pytest

from torusgd.plan.published import read_rows
from torusgd.plan.rehearsed import Played, best_of, read_played, section

ONE = Played(
    "ethernet", 16, "native", "das_vgga_aws", "2026-11-21",
    600.0, 400.0, 390.0, 410.0, 300.0, 380.0, 1100.0, 9.0, 10.0, 18.0, 9.0, 50.0,
)  # fmt: skip


def test_errors_are_the_plans_against_the_rehearsal():
    assert ONE.error == pytest.approx(-0.25)
    assert ONE.error_late == pytest.approx(-0.05)
    assert ONE.error_of_step == pytest.approx(-100 / 1100)


def test_the_quickest_of_a_published_row_is_its_rehearsed_figure():
    played = [ONE, replace(ONE, settings="torus", speedup=12.0), replace(ONE, published_id="", speedup=15.0)]
    best = best_of(played, "das_vgga_aws")
    assert best is not None
    assert best.settings == "torus"
    assert best_of(played, "sony_v2_4") is None


def test_a_line_has_a_cell_for_every_heading():
    heading, rule, line = section([ONE])[-3:]
    assert heading.count("|") == rule.count("|") == line.count("|")
    assert "| 400 (390 to 410) | 300 | -25 % | -9.1 % |" in line


def test_what_ships_names_published_rows_and_makes_sense():
    ids = {row.id: row for row in read_rows()}
    for each in read_played():
        assert not each.published_id or ids[each.published_id].devices == each.devices
        assert each.least <= each.exposed <= each.most
        assert 1 < each.speedup <= 1.05 * each.devices
        assert min(each.stretch, each.shrink) >= 1
