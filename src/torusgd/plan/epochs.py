"""How many epochs an accuracy takes, as a function of the batch: E(B) = minimum * (1 + B / critical).

The form is McCandlish et al.'s (arXiv 1812.06162, equation 2.11): up to about the critical batch a larger one costs few
more images, beyond it nearly all of the additional images are lost. The constants are fitted to MLPerf's reference
points. These are of one network, one data set and one accuracy, and each of them is tuned: rate, warm-up, momentum and
weight decay go with the batch, as the rows of the recipe `resnet50` have them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..errors import UserError
from ..recipe.load import load_recipe
from ..recipe.schema import Recipe

TARGET = 0.759
"""top-1 of the reference points"""
FAMILY = "resnet50"
"""the built-in recipe whose rows they are"""
SCHEDULE = 1.05
"""the length of a reference point's schedule over its epochs to the accuracy, 1.03 to 1.06 in all ten"""


@dataclass(frozen=True)
class ReferencePoint:
    """Mean epochs to TARGET over 10 to 28 runs at one batch."""

    batch: int
    epochs: float


# mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json: ResNet-50 v1.5, LARS, 224 pixels.
REFERENCE = (
    ReferencePoint(1_632, 35.0),
    ReferencePoint(3_264, 35.2),
    ReferencePoint(4_096, 40.0),
    ReferencePoint(8_192, 42.0),
    ReferencePoint(13_056, 45.4),
    ReferencePoint(32_768, 56.0),
    ReferencePoint(49_152, 68.0),
    ReferencePoint(58_880, 79.9),
    ReferencePoint(65_536, 84.5),
    ReferencePoint(67_840, 85.9),
)
SMALLEST, LARGEST = REFERENCE[0].batch, REFERENCE[-1].batch
"""batches between which the curve is known"""


@dataclass(frozen=True)
class EpochCurve:
    """Epochs to an accuracy over the batch."""

    minimum: float
    """epochs of a small batch"""
    critical: float
    """the batch that needs twice as many"""

    def epochs(self, batch: float) -> float:
        """Epochs to the accuracy.

        >>> round(curve().epochs(32_768), 1)
        58.7
        """
        return self.minimum * (1 + batch / self.critical)


def fit(points: Sequence[ReferencePoint]) -> EpochCurve:
    """The curve with the least sum of squared relative errors; needs two batches or more."""
    batches = np.array([point.batch for point in points], dtype=np.float64)
    epochs = np.array([point.epochs for point in points])
    # E(B) = a + b B is linear in a and b; divided by the epochs, its residuals are the relative errors.
    rows = np.stack([1 / epochs, batches / epochs], axis=1)
    (minimum, slope), *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    return EpochCurve(float(minimum), float(minimum / slope))


@cache
def curve() -> EpochCurve:
    """Of all reference points: 34.6 epochs, twice as many at a batch of about 46,900."""
    return fit(REFERENCE)


@cache
def leave_one_out() -> tuple[float, ...]:
    """The relative error of each reference point's epochs, predicted by the fit of the nine others."""
    errors = []
    for point in REFERENCE:
        others = [other for other in REFERENCE if other != point]
        errors.append(fit(others).epochs(point.batch) / point.epochs - 1)
    return tuple(errors)


def spread() -> float:
    """Standard deviation of the logarithm of the epochs: the root mean square of the leave-one-out errors."""
    return math.sqrt(sum(math.log1p(error) ** 2 for error in leave_one_out()) / len(REFERENCE))


_EQUAL = (
    "data.train_images", "data.classes", "data.channels", "data.image_size", "data.augment", "model", "optimizer.name",
    "optimizer.variant", "optimizer.trust", "optimizer.eps", "optimizer.no_decay", "optimizer.no_trust",
    "label_smoothing", "rate.decay.shape", "rate.decay.power",
)  # fmt: skip
"""what a recipe must have in common with FAMILY; rate, warm-up, momentum and weight decay go with the batch"""


def check_known(recipe: Recipe, target: float) -> None:
    """Raises UserError, naming the first difference, where the curve says nothing of a recipe or an accuracy."""
    where = f"--to: epochs are known for the recipe {FAMILY} to {TARGET:.1%} alone (MLPerf's reference points)"
    if target != TARGET:
        raise UserError(f"{where}, not to {100 * target:.4g}%; write --to {TARGET:.1%}")
    theirs, own = load_recipe(FAMILY).recipe.as_dict(), recipe.as_dict()
    for path in _EQUAL:
        there, here = _at(theirs, path), _at(own, path)
        if there != here:
            raise UserError(f"{where}; {recipe.name} has another {path}: {here}, there {there}")
    if len(recipe.stages) > 1:
        raise UserError(f"{where}; {recipe.name} changes its batch in {len(recipe.stages)} stages")


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree
