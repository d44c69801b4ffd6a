"""The calibrated parameters: a few factors on the stated values of clusters and software profiles.

A cluster file and a profile state what is known from data sheets, logs and papers. What the published results say
beyond that is one factor a parameter, fitted by `torusgd.plan.fit` and kept in calibration.yaml: never one a row.
"""

import copy
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from ..recipe import Positive, Section
from ..recipes import _parse, validate


class Parameter(Section):
    """One fitted factor."""

    name: str
    meaning: str
    targets: tuple[str, ...]
    """values that it multiplies, such as software/nnl-fp16:math"""
    spread: Positive
    """how far from 1 it may well lie: standard deviation of its logarithm before any row is seen"""
    factor: Positive = 1.0
    """as fitted"""


class Calibration(Section):
    """All fitted factors."""

    parameters: tuple[Parameter, ...]
    errors: dict[str, float] = {}
    """software: spread of the logarithm of predicted over published, leave-one-out where that can be had"""


Factors = dict[str, float]
"""parameter's name: factor"""


@cache
def load_calibration() -> Calibration:
    """The calibration that ships with torusgd."""
    text = files(__package__).joinpath("calibration.yaml").read_text()
    return validate(Calibration, _parse(text, "calibration.yaml"), "calibration.yaml")


def shipped_factors() -> Factors:
    """The fitted factors."""
    return {parameter.name: parameter.factor for parameter in load_calibration().parameters}


def calibrated(folder: str, name: str, tree: dict[str, Any], factors: Factors | None = None) -> dict[str, Any]:
    """`tree` with every value that a parameter aims at multiplied by its factor (the shipped one if not given)."""
    factors = shipped_factors() if factors is None else factors
    result = copy.deepcopy(tree)
    for parameter in load_calibration().parameters:
        for target in parameter.targets:
            file, _, path = target.partition(":")
            if file == f"{folder}/{name}":
                *parents, last = path.split(".")
                node = result
                for key in parents:
                    node = node[key]
                assert last in node, f"{target}: the file must state the value that is calibrated"
                node[last] = float(TypeAdapter(float).validate_python(node[last])) * factors[parameter.name]
    return result
