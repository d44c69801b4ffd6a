"""`python -m tools.calibrate_planner` in a checkout: a minute on one core."""

import json
from importlib.resources import files
from pathlib import Path

from torusgd.plan.cluster import load_calibrated
from torusgd.plan.published import predict_row, read_rows, summary

from .fit import calibrate
from .report import details, further_rows, markdown, step_rows


def main() -> None:
    """Fits, checks, and writes calibrated.json and the two pages."""
    rows = read_rows()
    found = calibrate(rows)
    Path(str(files("torusgd.plan"))).joinpath("calibrated.json").write_text(
        json.dumps(found.model_dump(mode="json"), indent=2) + "\n"
    )
    load_calibrated.cache_clear()
    print(summary(rows))
    fitted, further, steps = ([predict_row(row) for row in each] for each in (rows, further_rows(), step_rows()))
    for folder, write in (("docs", markdown), ("notes", details)):
        page = Path(__file__).parents[2] / folder / "published.md"
        page.write_text(write(fitted, further, steps))
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
