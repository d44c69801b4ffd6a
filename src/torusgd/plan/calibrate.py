"""Fits the calibration and writes docs/published.md: `python -m torusgd.plan.calibrate` in a checkout of torusgd.

Half a minute on one core. It rewrites `calibrated.json` beside this file and, where there is a docs folder, the page.
"""

import json
from pathlib import Path

from . import calibration
from .fit import calibrate
from .published import Row, predict_row, read_rows
from .report import markdown, summary

HERE = Path(__file__).parent


def main() -> None:
    """Fits, checks and writes."""
    rows = read_rows()
    found, _ = calibrate(rows)
    (HERE / "calibrated.json").write_text(json.dumps(found.model_dump(mode="json"), indent=2) + "\n")
    calibration.load_calibrated.cache_clear()
    print(summary(rows))
    page = HERE.parents[2] / "docs" / "published.md"
    if page.parent.is_dir():
        page.write_text(markdown([predict_row(row) for row in rows], [predict_row(row) for row in further_rows()]))
        print(f"wrote {page}")


def further_rows() -> list[Row]:
    """The published figures that are kept out of the fit."""
    return read_rows(HERE / "checks.csv")


if __name__ == "__main__":
    main()
