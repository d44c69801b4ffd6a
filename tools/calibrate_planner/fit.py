"""Fits the few factors of the calibration to published rows, and checks each by fits that have not seen it.

Least squares of log(predicted / published), every row with the same weight, and each factor held near 1 by its stated
spread: Gauss-Newton with a shrinking step, a handful of parameters, no library.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import median

import numpy as np

from torusgd.plan.cluster import Calibrated, Factors, load_parameters
from torusgd.plan.model_cost import Array
from torusgd.plan.published import Row, counted_groups, predict, system_of

ROW_SPREAD = 0.04
"""how well a row can be expected to be met: rounding, runs that differ, and physics left out"""


def fit_factors(rows: Sequence[Row], start: Factors | None = None) -> Factors:
    """The factors that fit `rows` best; without rows all are 1."""
    parameters = load_parameters()
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
    factors = {parameter.name: 1.0 for parameter in load_parameters()} | dict(mine)
    return math.log(predict(row, system_of(row, factors)) / row.value)


def predict_left_out(rows: Sequence[Row], groups: Iterable[Sequence[Row]], factors: Factors) -> dict[str, float]:
    """By id each row of each group, predicted by the fit of the rows outside its group; a fit begins at `factors`."""
    found: dict[str, float] = {}
    for group in groups:
        ids = {row.id for row in group}
        fit = fit_factors([row for row in rows if row.id not in ids], factors)
        found |= {row.id: float(f"{predict(row, system_of(row, fit)):.6g}") for row in group}
    return found


def networks(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each network of each program that trained three networks or more."""
    by_program: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_program[row.software][row.model].append(row)
    return [group for _, found in sorted(by_program.items()) if len(found) > 2 for _, group in sorted(found.items())]


def spread_of(errors: Sequence[float]) -> float:
    """A robust standard deviation of the logarithm, 1.4826 times the median size; at least 5 % as rows are so few."""
    return max(0.05, 1.4826 * median(abs(math.log1p(error)) for error in errors))


def calibrate(rows: Sequence[Row]) -> Calibrated:
    """Fits everything to `rows`, and checks each row by fits that have not seen it; takes a minute."""
    factors = fit_factors(rows)
    left_out = predict_left_out(rows, [[row] for row in rows], factors)
    errors = defaultdict(list)
    for row in rows:
        errors[row.software].append(left_out[row.id] / row.value - 1)
    return Calibrated(
        factors={name: float(f"{factor:.6g}") for name, factor in factors.items()},
        errors={software: round(spread_of(each), 4) for software, each in sorted(errors.items())},
        left_out=left_out,
        # Of a system with one row, that row is all of it.
        system_left_out=left_out | predict_left_out(rows, counted_groups(rows).values(), factors),
        other_networks=predict_left_out(rows, networks(rows), factors),
    )
