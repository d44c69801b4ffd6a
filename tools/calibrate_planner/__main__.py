"""`python -m tools.calibrate_planner` in a checkout: a minute on one core."""

import json
from importlib.resources import files
from pathlib import Path

from torusgd.plan import calibration
from torusgd.plan.published import predict_row, read_rows, summary

from .fit import calibrate
from .report import further_rows, markdown


def main() -> None:
    """Fits, checks, and writes calibrated.json and the page."""
    rows = read_rows()
    found, _ = calibrate(rows)
    Path(str(files("torusgd.plan"))).joinpath("calibrated.json").write_text(
        json.dumps(found.model_dump(mode="json"), indent=2) + "\n"
    )
    calibration.load_calibrated.cache_clear()
    print(summary(rows))
    page = Path(__file__).parents[2] / "docs" / "published.md"
    page.write_text(markdown([predict_row(row) for row in rows], [predict_row(row) for row in further_rows()]))
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
