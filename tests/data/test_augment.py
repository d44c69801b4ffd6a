"""What is done to images: each change as it is named, in the ranges that a recipe says, keyed by sample."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd import arithmetic
from torusgd.data import augment as policies
from torusgd.data import geometry
from torusgd.data.augment import OPERATIONS, STRONGEST, TRIVIAL, Ranges, change, draw_changes, erase, random_region
from torusgd.data.geometry import bend, resample
from torusgd.data.types import Region
from torusgd.recipe.data_schema import Augment
from torusgd.rng import keyed_hash, keyed_uniform

BETA = {0.05: "0x1.fffe845a6b293p-1", 0.8: "0x1.77886f4eeff31p-3", 10.0: "0x1.8b107cfb719b5p-2"}
EPOCHS, INDICES = np.zeros(6, dtype=np.int64), np.arange(6)
WARPS = Augment(rotation=0.5, distortion=0.2, brightness=0.1, contrast=1.5, noise=0.05, by_channel=True)
GREY_LEVELS = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)


def changes(augment: Augment, samples, seed: int = 0, epoch: int = 0):
    """Those of some samples, or of so many."""
    samples = np.arange(samples) if isinstance(samples, int) else np.array(samples)
    return draw_changes(augment, 3, seed, np.full(len(samples), epoch), samples)


@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 500))
@settings(deadline=None, max_examples=200)
def test_every_box_lies_in_its_image(height: int, width: int, sample: int) -> None:
    augment = Augment(crop="resized")
    region = random_region(height, width, (32, 32), augment, changes(augment, [sample]).boxes[0])
    assert 0 <= region.top < region.top + region.height <= height
    assert 0 <= region.left < region.left + region.width <= width
    assert (region.rows, region.columns) == (32, 32)


def test_boxes_have_the_area_and_aspect_asked_for_or_the_largest_one_that_fits_from_the_middle() -> None:
    augment = Augment(crop="resized", area=(0.05, 0.9), aspect=(2 / 3, 3 / 2))
    boxes = [random_region(600, 600, (224, 224), augment, draws) for draws in changes(augment, 2000).boxes]
    areas = np.array([box.height * box.width / 600**2 for box in boxes])
    aspects = np.array([box.width / box.height for box in boxes])
    assert 0.049 < areas.min() < areas.max() < 0.905
    assert 0.66 < aspects.min() < aspects.max() < 1.51
    # Log-uniform, so that wide and tall are equally frequent; boxes that did not fit make large areas a little rarer.
    assert abs(np.log(aspects).mean()) < 0.02
    assert abs(np.median(areas) - 0.46) < 0.03
    # All over the image.
    assert abs(np.mean([box.top / (601 - box.height) for box in boxes]) - 0.5) < 0.02
    assert abs(np.mean([box.left / (601 - box.width) for box in boxes]) - 0.5) < 0.02
    augment = Augment(crop="resized", area=(1.0, 1.0))
    (draws,) = changes(augment, 1).boxes
    wide, tall = random_region(100, 1000, (8, 8), augment, draws), random_region(1000, 100, (8, 8), augment, draws)
    assert (wide.top, wide.left, wide.height, wide.width) == (0, 433, 100, 133)
    assert (tall.top, tall.left, tall.height, tall.width) == (433, 0, 133, 100)


@given(st.floats(1.0, 100.0), st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=100)
def test_powers_by_square_roots(base: float, exponent: float) -> None:
    assert math.isclose(geometry.power(base, exponent), base ** (int(exponent * 65536) / 65536), rel_tol=1e-12)


@pytest.mark.parametrize("width", [7, 8, 24, 28])
def test_mirror_reverses_the_chosen_images_and_leaves_its_input(width: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 4, width), dtype=np.uint8)
    before = images.copy()
    for chosen in ([True, False, True, False, False], [True] * 5, [False] * 5):
        result = policies.mirror(images, np.array(chosen))
        assert np.array_equal(images, before)
        for at, flipped in enumerate(chosen):
            assert np.array_equal(result[at], images[at][:, :, ::-1] if flipped else images[at])


def test_the_share_of_mirrored_images_and_alternating_ones_that_turn_each_epoch() -> None:
    for probability, most in ((0.0, 0), (0.25, 0.03), (1.0, 0)):
        assert abs(changes(Augment(flip=probability), 4000).mirrored.mean() - probability) <= most
    augment = Augment(flip="alternating")
    first, second, third = (changes(augment, 2000, epoch=epoch).mirrored for epoch in (0, 1, 2))
    assert np.array_equal(first, ~second)
    assert np.array_equal(first, third)
    assert abs(first.mean() - 0.5) < 0.04
    assert not np.array_equal(first, changes(augment, 2000, seed=1).mirrored)
    mixed = draw_changes(augment, 3, 0, np.arange(4), np.zeros(4, dtype=np.int64)).mirrored
    assert mixed.tolist() == [bool(first[0]) ^ bool(epoch % 2) for epoch in range(4)]


def test_shift_moves_in_zeros_by_every_offset_equally() -> None:
    images = np.random.default_rng(0).integers(1, 256, (3, 2, 4, 5), dtype=np.uint8)
    moved = policies.shift(images, 2, np.array([[2, 2], [0, 0], [4, 3]]))
    expected = np.zeros_like(images)
    expected[0] = images[0]  # the middle of the padded image is the image
    expected[1][:, 2:, 2:] = images[1][:, :2, :3]
    expected[2][:, :2, :4] = images[2][:, 2:, 1:]
    assert np.array_equal(moved, expected)
    moves = changes(Augment(crop="shift", shift=2), 5000).moves
    counts = np.bincount(moves[:, 0] * 5 + moves[:, 1], minlength=25)
    assert len(counts) == 25
    assert 140 < counts.min() <= counts.max() < 260


def numbered() -> np.ndarray:
    """Image i is i + 1 everywhere."""
    return np.broadcast_to(np.arange(1, 7, dtype=np.float32)[:, None, None, None], (6, 2, 16, 12)).copy()


def mixed(out: np.ndarray, indices: np.ndarray = INDICES, **options: float):
    """The shares of each image's own label."""
    return policies.mix(out, Augment.model_validate(options), 0, EPOCHS, indices)


def test_mixing_goes_by_the_share_of_the_label_and_erasing_clears_one_box_of_the_stated_area() -> None:
    out = numbered()
    shares = mixed(out, mixup=1.0)
    own, other = np.arange(1, 7), np.arange(6, 0, -1)
    assert out[:, 0, 0, 0] == pytest.approx(shares * own + (1 - shares) * other, rel=1e-6)
    assert (out == out[:, :1, :1, :1]).all()
    assert len(set(shares.tolist())) == 6
    moved = mixed(numbered(), np.roll(INDICES, 2), mixup=1.0)
    assert np.array_equal(np.roll(shares, 2), moved), "a draw belongs to its sample"
    out = numbered()
    shares = mixed(out, cutmix=1.0)
    pasted = out != numbered()
    assert 1 - pasted.mean(axis=(1, 2, 3)) == pytest.approx(shares, abs=1e-6)
    assert (out[pasted] == numbered()[::-1][pasted]).all()
    out = numbered()
    assert mixed(out) is None
    erase(out, Augment(), 0, EPOCHS, INDICES)
    assert np.array_equal(out, numbered()), "nothing is done without being asked for"
    erase(out, Augment(erase=1.0), 0, EPOCHS, INDICES)
    for image in out:
        rows, columns = np.nonzero(image[0] == 0)
        box = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        assert box == len(rows)
        assert 0.01 < box / image[0].size < 0.4
        assert np.array_equal(image[0], image[1])


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.2])
def test_shares_have_the_mean_and_variance_of_beta(alpha: float) -> None:
    found = np.array([policies.beta(alpha, row) for row in keyed_uniform(7, np.arange(4000)[:, None], np.arange(64))])
    assert abs(found.mean() - 0.5) < 0.02
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


@pytest.mark.parametrize("alpha", [0.3, *(pytest.param(each, marks=pytest.mark.slow) for each in (*BETA, 2.0))])
def test_draws_of_any_alpha_have_the_moments_of_beta_and_the_same_bits_on_any_machine(alpha: float) -> None:
    found = np.array([arithmetic.beta(alpha, 7, number) for number in range(2000)])
    assert abs(found.mean() - 0.5) < 0.02
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    assert ((found - 0.5) ** 4).mean() == pytest.approx(3 / (16 * (2 * alpha + 1) * (2 * alpha + 3)), rel=0.15)
    assert {each: arithmetic.beta(each, 7, 1).hex() for each in BETA} == BETA


def warps(augment: Augment, count: int = 500):
    return geometry.draw_warps(augment, 3, 0, np.zeros(count, np.int64), np.arange(count))


def test_draws_of_warps_fill_their_ranges_and_tones_follow_the_formula() -> None:
    found = warps(WARPS)
    for values, low, high in (
        (found.angles, -0.5, 0.5), (found.distortions, math.exp(-0.2) - 1, math.exp(0.2) - 1),
        (found.brightness, -0.1, 0.1), (found.contrast, 1 / 1.5, 1.5), (found.noise, 0.0, 0.05),
    ):  # fmt: skip
        reach = high - low
        assert low - 1e-4 <= values.min() < low + 0.02 * reach
        assert high - 0.02 * reach < values.max() <= high + 1e-4
    assert abs(np.log(found.contrast).mean()) < 0.02
    assert len(np.unique(found.brightness[0])) == 3
    together = warps(WARPS.model_copy(update={"by_channel": False}))
    assert (together.brightness == together.brightness[:, :1]).all()
    assert warps(Augment(flip=0.5)) is None
    found = warps(WARPS.model_copy(update={"noise": 0.0}), 4)
    plane = np.full((5, 6), 51.0, dtype=np.float32)
    geometry.tone(plane, found, 2, 1)
    brightness, contrast = found.brightness[2, 1], found.contrast[2, 1]
    assert plane[0, 0] / 255 == pytest.approx((0.2 + brightness - 0.5) * contrast + 0.5, abs=1e-5)
    noise = geometry._normal((100, 100), 0, 1, 2, 3)
    assert [noise.mean(), noise.std() - 1] == pytest.approx([0, 0], abs=0.02)
    assert not np.array_equal(noise, geometry._normal((100, 100), 0, 1, 2, 4))


def test_a_quarter_turn_turns_a_square_and_a_distortion_moves_what_is_between_middle_and_border() -> None:
    for angle in (-math.pi, -1.0, 0.0, 0.3, math.pi):
        found = geometry.cosine_and_sine(angle, geometry._TERMS)
        assert found == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-12)
    image = np.random.default_rng(0).integers(0, 256, (3, 9, 9), dtype=np.uint8)
    assert np.array_equal(bend(image, math.pi / 2, 0.0), np.rot90(image, 1, axes=(1, 2)))
    assert bend(image, 0.0, 0.0) is image
    ramp = np.tile(np.arange(0, 202, 2, dtype=np.uint8), (1, 101, 1))
    bent, straight = (each[0, 50].astype(int) for each in (bend(ramp, 0.0, 0.2), ramp))
    assert bent[50] == straight[50]
    assert abs(bent[0] - straight[0]) <= 2
    # Halfway to the border (1 + 0.2 / 4) / 1.2 of the way is looked up.
    assert bent[75] == pytest.approx(100 + 50 * 1.05 / 1.2, abs=1.5)


@pytest.mark.parametrize("sizes", [(37, 41, 16, 9), (9, 7, 24, 31), (64, 50, 64, 13), (300, 1, 7, 3)])
def test_exact_scaling_is_the_triangles_mean_by_whole_numbers(sizes: tuple[int, int, int, int]) -> None:
    height, width, rows, columns = sizes
    image = (keyed_hash(5, *np.ogrid[:height, :width, :3]) % 256).astype(np.uint8)

    def scaled_side(values: np.ndarray, out: int) -> np.ndarray:
        """Along the first axis, each weight counted in 1 / (2 * out), rounded half up."""
        length, result = len(values), []
        for place in range(out):
            reach = 2 * max(length, out)
            weights = [max(0, reach - abs((2 * j + 1) * out - (2 * place + 1) * length)) for j in range(length)]
            total = np.tensordot(np.array(weights), values.astype(np.int64), 1)
            result.append((2 * total + sum(weights)) // (2 * sum(weights)))
        return np.array(result)

    expected = scaled_side(scaled_side(image, rows).swapaxes(0, 1), columns).swapaxes(0, 1)
    region = Region(0, 0, height, width, rows, columns, exact=True)
    assert np.array_equal(resample(image, region), expected)
    assert abs(expected - resample(image, replace(region, exact=False)).astype(int)).max() <= 1


def blobs(channels: int = 3, height: int = 21, width: int = 30) -> np.ndarray:
    """Of many grey levels, uint8 [channels, height, width]."""
    rows, columns = np.mgrid[:height, :width]
    planes = [np.sin(rows / 4 + k) + np.cos(columns / (3 + k)) for k in range(channels)]
    return np.stack([(60 * plane + 120).astype(np.uint8) for plane in planes])


def test_a_policy_draws_its_changes() -> None:
    def drawn(**options: Any) -> Any:
        return policies.draw_policy(Augment(**options), 0, np.zeros(500, dtype=np.int64), np.arange(500))

    any_strength = drawn(policy="trivialaugment")
    assert any_strength.shape == (500, 1, 3)
    for column, values in enumerate((len(OPERATIONS), STRONGEST + 1, 2)):
        assert set(any_strength[..., column].ravel().tolist()) == set(range(values))
    of_one_strength = drawn(policy="randaugment", operations=3, magnitude=7)
    assert (of_one_strength.shape, set(of_one_strength[..., 1].ravel().tolist())) == ((500, 3, 3), {7})
    assert (of_one_strength[:, 0, 0] != of_one_strength[:, 1, 0]).mean() > 0.8


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_change_keeps_shape_and_type_and_the_weakest_by_a_direction_the_image(operation: str, channels: int) -> None:
    image = blobs(channels)
    for strength in (0, 1, STRONGEST):
        changed = change(image, operation, strength, 1, TRIVIAL)
        assert (changed.shape, changed.dtype) == (image.shape, np.dtype(np.uint8))
        assert np.array_equal(image, blobs(channels)), "the given one is left alone"
    if operation not in ("solarize", "autocontrast", "equalize"):
        assert np.array_equal(change(image, operation, 0, 0, TRIVIAL), image)


def test_changes_do_what_they_are_called() -> None:
    image, half = blobs(), STRONGEST // 2
    right = change(image, "translate-x", STRONGEST, 0, Ranges(0, 8, 0, 0, 0, 0))
    assert np.array_equal(right[..., 8:], image[..., :-8])
    assert not right[..., :8].any()
    square = blobs(3, 24, 24)
    quarter = change(square, "rotate", STRONGEST, 1, Ranges(0, 0, 0, 90.0, 0, 0))
    assert any(np.array_equal(quarter, np.rot90(square, turns, axes=(1, 2))) for turns in (1, 3))
    sheared = change(image, "shear-x", STRONGEST, 1, Ranges(1.0, 0, 0, 0, 0, 0))
    assert np.array_equal(sheared[:, 5, :20], image[:, 5, 6:26])
    whole = Ranges(0, 0, 0, 0, 1.0, 0)
    assert change(image, "brightness", STRONGEST, 0, whole).max() == 0
    grey = change(image, "color", STRONGEST, 0, whole)
    assert np.array_equal(grey[0], grey[1])
    assert np.ptp(change(image, "contrast", STRONGEST, 0, whole)) == 0
    assert change(GREY_LEVELS, "posterize", STRONGEST, 0, TRIVIAL).tolist() == (GREY_LEVELS & 0b11000000).tolist()
    assert change(GREY_LEVELS, "solarize", half, 0, TRIVIAL).ravel().tolist() == [*range(128), *range(127, -1, -1)]
    stretched = change(GREY_LEVELS[:, 4:8], "autocontrast", 0, 0, TRIVIAL)
    assert (stretched.min(), stretched.max()) == (0, 255)
    skewed = (GREY_LEVELS.astype(int) ** 2 // 255).astype(np.uint8)
    assert abs(change(skewed, "equalize", 0, 0, TRIVIAL).mean() - 127.5) < abs(skewed.mean() - 127.5) / 4


@pytest.mark.parametrize("ranges", [policies.RAND, TRIVIAL])
def test_changes_are_torchvisions(ranges: Ranges) -> None:
    transforms = pytest.importorskip("torchvision.transforms", exc_type=ImportError)
    kind = transforms.RandAugment(magnitude=9) if ranges is policies.RAND else transforms.TrivialAugmentWide()
    image = blobs(3, 40, 56)
    space = kind._augmentation_space(31, (40, 56)) if ranges is policies.RAND else kind._augmentation_space(31)
    assert len(space) == len(OPERATIONS)
    for operation, (name, (magnitudes, signed)) in zip(OPERATIONS, space.items(), strict=True):
        for strength in (0, 9, 30):
            magnitude = float(magnitudes[strength]) if magnitudes.ndim else 0.0
            theirs = transforms.autoaugment._apply_op(
                torch.from_numpy(image), name, magnitude, transforms.InterpolationMode.NEAREST, None
            ).numpy()
            ways = (change(image, operation, strength, sign, ranges) for sign in ((0, 1) if signed else (1,)))
            same = [np.abs(ours.astype(int) - theirs) <= 1 for ours in ways]
            assert max(each.mean() for each in same) > 0.97, (name, strength)
