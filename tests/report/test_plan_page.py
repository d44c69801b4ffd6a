"""`torusgd plan --report`: the sweep that a cluster proposal needs, as one page."""

from pathlib import Path
from typing import Any

import pytest
from tests.report.test_page import EVIL, Tags


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (("digits",), ('"row">forward<', "images a second", "efficiency", "Bold: the knee")),
        (("digits", "--cost", "2.50", "--best"), ("cost", "Better settings")),
        pytest.param(
            ("resnet50", "--to", "75.9%"),
            ("top-1 to reach", "75.90%", "epochs"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plan", "best", "to"],
)
def test_a_page_has_the_sweep(asked: tuple[str, ...], shown: tuple[str, ...], tmp_path: Path, run_cli: Any) -> None:
    page = tmp_path / "page.html"
    words = ("plan", *asked, "--cluster", "hgx-h100", "--devices", "12", "--report", page)
    code, output, errors = run_cli(*words)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1].endswith(f"wrote {page}")
    text = page.read_text()
    tags = Tags(text)
    assert tags.seen.count("figure") >= 2
    assert tags.addresses == []
    for words_shown in shown:
        assert words_shown in text
    assert f"torusgd plan {asked[0]}" in text


def test_names_of_a_stranger_stay_text() -> None:
    from torusgd.report.page import plan_page

    stage = {"batch": 8, "seconds": 1.0, "forward": 0.25, "backward": 0.75}
    plan = {"title": EVIL, "notes": [EVIL], "limit": EVIL, "stages": [stage], "devices": 2, "seconds": 9.0}
    text = plan_page(plan, EVIL)
    assert "script" not in Tags(text).seen
    assert text.count("&lt;script&gt;") == 5
