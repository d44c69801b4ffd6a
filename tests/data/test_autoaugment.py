"""RandAugment and TrivialAugment: keyed by sample, each change as it is named, and as torchvision has it."""

from typing import Any

import numpy as np
import pytest
import torch

from torusgd.data.augment import OPERATIONS, RAND, STRONGEST, TRIVIAL, Ranges, change, draw_policy
from torusgd.recipe.data_schema import Augment

GREY_LEVELS = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)


def picture(channels: int = 3, height: int = 21, width: int = 30) -> np.ndarray:
    """Blobs of many grey levels, uint8 [channels, height, width]."""
    rows, columns = np.mgrid[:height, :width]
    planes = [np.sin(rows / 4 + k) + np.cos(columns / (3 + k)) for k in range(channels)]
    return np.stack([(60 * plane + 120).astype(np.uint8) for plane in planes])


def test_a_policy_draws_its_changes() -> None:
    def drawn(**options: Any) -> Any:
        return draw_policy(Augment(**options), 0, np.zeros(500, dtype=np.int64), np.arange(500))

    any_strength = drawn(policy="trivialaugment")
    assert any_strength.shape == (500, 1, 3)
    for column, values in enumerate((len(OPERATIONS), STRONGEST + 1, 2)):
        assert set(any_strength[..., column].ravel().tolist()) == set(range(values))
    of_one_strength = drawn(policy="randaugment", operations=3, magnitude=7)
    assert of_one_strength.shape == (500, 3, 3)
    assert set(of_one_strength[..., 1].ravel().tolist()) == {7}
    assert (of_one_strength[:, 0, 0] != of_one_strength[:, 1, 0]).mean() > 0.8


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_change_keeps_shape_and_type_and_the_weakest_by_a_direction_the_image(operation: str, channels: int) -> None:
    image = picture(channels)
    for strength in (0, 1, STRONGEST):
        changed = change(image, operation, strength, 1, TRIVIAL)
        assert (changed.shape, changed.dtype) == (image.shape, np.dtype(np.uint8))
        assert np.array_equal(image, picture(channels)), "the given one is left alone"
    if operation not in ("solarize", "autocontrast", "equalize"):
        assert np.array_equal(change(image, operation, 0, 0, TRIVIAL), image)


def test_changes_do_what_they_are_called() -> None:
    image, half = picture(), STRONGEST // 2
    right = change(image, "translate-x", STRONGEST, 0, Ranges(0, 8, 0, 0, 0, 0))
    assert np.array_equal(right[..., 8:], image[..., :-8])
    assert not right[..., :8].any()
    quarter = change(picture(3, 24, 24), "rotate", STRONGEST, 1, Ranges(0, 0, 0, 90.0, 0, 0))
    assert any(np.array_equal(quarter, np.rot90(picture(3, 24, 24), turns, axes=(1, 2))) for turns in (1, 3))
    sheared = change(image, "shear-x", STRONGEST, 1, Ranges(1.0, 0, 0, 0, 0, 0))
    assert np.array_equal(sheared[:, 5, :20], image[:, 5, 6:26])
    assert change(image, "brightness", STRONGEST, 0, Ranges(0, 0, 0, 0, 1.0, 0)).max() == 0
    grey = change(image, "color", STRONGEST, 0, Ranges(0, 0, 0, 0, 1.0, 0))
    assert np.array_equal(grey[0], grey[1])
    assert np.ptp(change(image, "contrast", STRONGEST, 0, Ranges(0, 0, 0, 0, 1.0, 0))) == 0
    assert change(GREY_LEVELS, "posterize", STRONGEST, 0, TRIVIAL).tolist() == (GREY_LEVELS & 0b11000000).tolist()
    solarized = change(GREY_LEVELS, "solarize", half, 0, TRIVIAL).ravel()
    assert solarized.tolist() == [*range(128), *range(127, -1, -1)]
    stretched = change(GREY_LEVELS[:, 4:8], "autocontrast", 0, 0, TRIVIAL)
    assert (stretched.min(), stretched.max()) == (0, 255)
    skewed = (GREY_LEVELS.astype(int) ** 2 // 255).astype(np.uint8)
    assert abs(change(skewed, "equalize", 0, 0, TRIVIAL).mean() - 127.5) < abs(skewed.mean() - 127.5) / 4


@pytest.mark.parametrize("ranges", [RAND, TRIVIAL])
def test_changes_are_torchvisions(ranges: Ranges) -> None:
    transforms = pytest.importorskip("torchvision.transforms", exc_type=ImportError)
    kind = transforms.RandAugment(magnitude=9) if ranges is RAND else transforms.TrivialAugmentWide()
    image = picture(3, 40, 56)
    space = kind._augmentation_space(31, (40, 56)) if ranges is RAND else kind._augmentation_space(31)
    assert len(space) == len(OPERATIONS)
    for operation, (name, (magnitudes, signed)) in zip(OPERATIONS, space.items(), strict=True):
        for strength in (0, 9, 30):
            magnitude = float(magnitudes[strength]) if magnitudes.ndim else 0.0
            theirs = transforms.autoaugment._apply_op(
                torch.from_numpy(image), name, magnitude, transforms.InterpolationMode.NEAREST, None
            ).numpy()
            same = [
                np.abs(change(image, operation, strength, sign, ranges).astype(int) - theirs) <= 1
                for sign in ((0, 1) if signed else (1,))
            ]
            assert max(each.mean() for each in same) > 0.97, (name, strength)
