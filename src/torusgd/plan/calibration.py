"""The calibrated parameters: a few factors on the stated values of clusters and software profiles.

A cluster file and a profile have the values of data sheets, logs and papers. The published results add one factor a
parameter, in calibrated.json: never one a row. In a checkout tools/calibrate_planner fits them and writes the file.
"""

import copy
import json
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from ..recipe.load import parse_yaml, validate
from ..recipe.section import NotNegative, Positive, Section

Factors = dict[str, float]
"""parameter's name: factor"""


class Parameter(Section):
    """One fitted factor."""

    name: str
    meaning: str
    targets: tuple[str, ...]
    """values that it multiplies, such as software/nnl-fp16:math; a star in a file's name stands for several"""
    spread: Positive
    """prior standard deviation of its logarithm, without any row"""

    def keys(self, folder: str, name: str) -> list[str]:
        """The keys of a file that it multiplies."""
        pairs = [target.partition(":") for target in self.targets]
        return [key for pattern, _, key in pairs if fnmatchcase(f"{folder}/{name}", pattern)]

    def aims_at(self, cluster: str, software: str) -> bool:
        """Whether it changes the predictions for that cluster and profile."""
        return bool(self.keys("clusters", cluster) or self.keys("software", software))


class Parameters(Section):
    """parameters.yaml."""

    parameters: tuple[Parameter, ...]


class Calibrated(Section):
    """calibrated.json, which tools/calibrate_planner writes."""

    factors: Factors
    errors: dict[str, NotNegative]
    """by software profile: spread of the logarithm of its predictions"""
    left_out: dict[str, Positive]
    """predictions by published row, each by the fit of all others"""
    system_left_out: dict[str, Positive]
    """predictions by published row, each by the fit of the rows of other systems: a cluster with a program"""
    other_networks: dict[str, Positive]
    """by published row of a program with three networks or more: its prediction without any row of its network"""


@cache
def load_parameters() -> Parameters:
    """The parameters that are fitted."""
    text = files(__package__).joinpath("parameters.yaml").read_text()
    return validate(Parameters, parse_yaml(text, "parameters.yaml"), "parameters.yaml")


@cache
def load_calibrated() -> Calibrated:
    """The result of the fit."""
    tree = json.loads(files(__package__).joinpath("calibrated.json").read_text())
    return validate(Calibrated, tree, "calibrated.json")


def calibrated(folder: str, name: str, tree: dict[str, Any], factors: Factors | None = None) -> dict[str, Any]:
    """A cluster or profile that ships, with the target values of every parameter multiplied by its factor.

    The fitted factors are used if none are given, and a profile then has its error, too. A default value that is not in
    the file is not multiplied.
    """
    multiplied_by = load_calibrated().factors if factors is None else factors
    result = copy.deepcopy(tree)  # the files are cached
    for parameter in load_parameters().parameters:
        for key in parameter.keys(folder, name):
            *parents, last = key.split(".")
            node = result
            for part in parents:
                node = node.get(part, {})
            if last in node:
                node[last] = float(node[last]) * multiplied_by[parameter.name]
    if factors is None and folder == "software" and name in load_calibrated().errors:
        result["error"] = load_calibrated().errors[name]
    return result
