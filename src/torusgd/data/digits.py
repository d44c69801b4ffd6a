"""The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn ships: real data without a download."""

import numpy as np

from ..errors import UserError
from ..rng import SPLIT, keyed_permutation
from .arrays import Images

HELD_OUT = 360


def open_digits() -> tuple[Images, Images]:
    """1,437 training and 360 held-out images, uint8 [8, 8, 1], classes "0" to "9".

    The split is fixed, so that runs of every seed are measured on the same images.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("data.source: digits need scikit-learn; pip install 'torusgd[digits]'") from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]  # values 0..16 in the file
    labels = bunch.target.astype(np.int64)
    names = tuple(str(name) for name in bunch.target_names)
    order = keyed_permutation(len(labels), SPLIT, 0)
    train, held_out = np.sort(order[HELD_OUT:]), np.sort(order[:HELD_OUT])
    return Images(images[train], labels[train], names), Images(images[held_out], labels[held_out], names)
