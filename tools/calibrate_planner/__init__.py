"""The research behind the planner's calibration: the fit of its factors, and docs/published.md and notes/published.md.

No part of the package: `python -m tools.calibrate_planner` in a checkout fits the factors to
src/torusgd/plan/published.csv, writes src/torusgd/plan/calibrated.json and the page. It may import all of torusgd.
"""
