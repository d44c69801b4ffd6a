"""Fits the few factors of the calibration to published rows, and checks each row with itself left out.

Least squares of log(predicted / published), every row with the same weight, and each factor held near 1 by its stated
spread: Gauss-Newton with a shrinking step, a handful of parameters, no library.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np

from torusgd.plan.calibration import Calibrated, Factors, load_parameters
from torusgd.plan.model_cost import Array
from torusgd.plan.published import Row, predict, system_of

ROW_SPREAD = 0.04
"""how well a row can be expected to be met: rounding, runs that differ, and physics left out"""


@dataclass(frozen=True)
class Check:
    """A row predicted by a calibration that has not seen it."""

    row: Row
    predicted: float
    counted: bool
    """another row has the same cluster and software"""

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.row.value - 1


def fit_factors(rows: Sequence[Row], start: Factors | None = None) -> Factors:
    """The factors that fit `rows` best; without rows all are 1."""
    parameters = load_parameters().parameters
    names = [parameter.name for parameter in parameters]
    spreads = np.array([parameter.spread for parameter in parameters])
    x = np.log([(start or {}).get(name, 1.0) for name in names])
    everyone = range(len(rows))
    aims = np.array([[p.aims_at(row.cluster, row.software) for p in parameters] for row in rows], dtype=bool)

    def residuals(at: Array, which: Sequence[int]) -> Array:
        factors = np.exp(at).tolist()
        mine = {i: tuple((names[k], factors[k]) for k in np.flatnonzero(aims[i])) for i in which}
        return np.array([_log_error(rows[i], mine[i]) for i in which]) / ROW_SPREAD

    def objective(at: Array, errors: Array) -> float:
        return float((errors**2).sum() + ((at / spreads) ** 2).sum())

    errors = residuals(x, everyone)
    measured = np.full(len(names), np.inf)  # where the slopes were measured: only a move of 1 % asks for new ones
    jacobian = np.zeros((len(rows), len(names)))
    for _ in range(50):
        if np.abs(x - measured).max() > 0.01:
            measured = x
            for column in range(len(names)):
                which = np.flatnonzero(aims[:, column]).tolist() if rows else []
                if which:
                    step = np.zeros(len(names))
                    step[column] = 1e-3
                    jacobian[which, column] = (residuals(x + step, which) - residuals(x - step, which)) / 2e-3
        normal = jacobian.T @ jacobian + np.diag(spreads**-2.0)
        move = -np.linalg.solve(normal, jacobian.T @ errors + x / spreads**2)
        before, share = objective(x, errors), 1.0
        while share > 1e-3:
            tried = residuals(x + share * move, everyone)
            if objective(x + share * move, tried) < before:
                break
            share /= 2
        else:
            break
        x, errors = x + share * move, tried
        if np.abs(share * move).max() < 1e-4:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))


@cache
def _log_error(row: Row, mine: tuple[tuple[str, float], ...]) -> float:
    """By the factors that have a say in the row; the fits without one row each ask for many of them again."""
    factors = {parameter.name: 1.0 for parameter in load_parameters().parameters} | dict(mine)
    return math.log(predict(row, system_of(row, factors)) / row.value)


def leave_one_out(rows: Sequence[Row], factors: Factors) -> list[Check]:
    """Each row predicted by the fit of all others; `factors`, the fit of all, is where each begins."""
    members = Counter((row.cluster, row.software) for row in rows)
    checks = []
    for row in rows:
        others = [other for other in rows if other.id != row.id]
        predicted = predict(row, system_of(row, fit_factors(others, factors)))
        checks.append(Check(row, predicted, members[row.cluster, row.software] > 1))
    return checks


def other_networks(rows: Sequence[Row], factors: Factors) -> dict[str, float]:
    """Where a program trained three networks or more: each one's rows, predicted by the fit of the others alone."""
    networks = {
        software: {row.model for row in rows if row.software == software} for software in {r.software for r in rows}
    }
    found: dict[str, float] = {}
    for software in sorted(networks):
        for network in sorted(networks[software]) if len(networks[software]) > 2 else ():
            mine = [row for row in rows if (row.software, row.model) == (software, network)]
            fit = fit_factors([row for row in rows if row not in mine], factors)
            found |= {row.id: predict(row, system_of(row, fit)) for row in mine}
    return found


def spread_of(errors: Sequence[float]) -> float:
    """A robust standard deviation of the logarithm, 1.4826 times the median size; at least 5 % as rows are so few."""
    return max(0.05, 1.4826 * median(abs(math.log1p(error)) for error in errors))


def calibrate(rows: Sequence[Row]) -> tuple[Calibrated, list[Check]]:
    """Fits everything to `rows`, and checks each row; takes a minute."""
    factors = fit_factors(rows)
    checks = leave_one_out(rows, factors)
    errors = defaultdict(list)
    for check in checks:
        errors[check.row.software].append(check.error)
    return (
        Calibrated(
            factors={name: float(f"{factor:.6g}") for name, factor in factors.items()},
            errors={software: round(spread_of(each), 4) for software, each in sorted(errors.items())},
            left_out={check.row.id: float(f"{check.predicted:.6g}") for check in checks},
            other_networks={name: float(f"{value:.6g}") for name, value in other_networks(rows, factors).items()},
        ),
        checks,
    )
