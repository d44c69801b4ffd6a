"""Crops, mirrors, erasing and mixing: each change as it is named, in the ranges and amounts that a recipe says."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd import arithmetic
from torusgd.data.augment import beta, draw_changes, erase, mirror, mix, random_region, shift
from torusgd.data.geometry import power
from torusgd.recipe.data_schema import Augment
from torusgd.rng import keyed_uniform

BETA = {0.05: "0x1.fffe845a6b293p-1", 0.8: "0x1.77886f4eeff31p-3", 10.0: "0x1.8b107cfb719b5p-2"}
EPOCHS, INDICES = np.zeros(6, dtype=np.int64), np.arange(6)


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


def test_boxes_have_the_area_and_aspect_asked_for() -> None:
    augment = Augment(crop="resized", area=(0.05, 0.9), aspect=(2 / 3, 3 / 2))
    boxes = [random_region(600, 600, (224, 224), augment, draws) for draws in changes(augment, 2000).boxes]
    areas = np.array([box.height * box.width / 600**2 for box in boxes])
    aspects = np.array([box.width / box.height for box in boxes])
    assert areas.min() > 0.049
    assert areas.max() < 0.905
    assert aspects.min() > 0.66
    assert aspects.max() < 1.51
    # Log-uniform, so that wide and tall are equally frequent; boxes that did not fit make large areas a little rarer.
    assert abs(np.log(aspects).mean()) < 0.02
    assert abs(np.median(areas) - 0.46) < 0.03
    # All over the image.
    assert abs(np.mean([box.top / (601 - box.height) for box in boxes]) - 0.5) < 0.02
    assert abs(np.mean([box.left / (601 - box.width) for box in boxes]) - 0.5) < 0.02


def test_where_no_box_fits_the_largest_one_with_an_allowed_aspect_is_taken_from_the_middle() -> None:
    augment = Augment(crop="resized", area=(1.0, 1.0))
    (draws,) = changes(augment, 1).boxes
    wide, tall = random_region(100, 1000, (8, 8), augment, draws), random_region(1000, 100, (8, 8), augment, draws)
    assert (wide.top, wide.left, wide.height, wide.width) == (0, 433, 100, 133)
    assert (tall.top, tall.left, tall.height, tall.width) == (433, 0, 133, 100)


@given(st.floats(1.0, 100.0), st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=100)
def test_powers_by_square_roots(base: float, exponent: float) -> None:
    cut = int(exponent * 65536) / 65536
    assert math.isclose(power(base, exponent), base**cut, rel_tol=1e-12)


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_the_share_of_mirrored_images(probability: float) -> None:
    mirrored = changes(Augment(flip=probability), 4000).mirrored
    assert abs(mirrored.mean() - probability) < 0.03
    assert probability not in (0.0, 1.0) or mirrored.mean() == probability


@pytest.mark.parametrize("width", [7, 8, 24, 28])
def test_mirror_reverses_the_chosen_images_and_leaves_its_input(width: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 4, width), dtype=np.uint8)
    before = images.copy()
    for chosen in ([True, False, True, False, False], [True] * 5, [False] * 5):
        result = mirror(images, np.array(chosen))
        assert np.array_equal(images, before)
        for at, flipped in enumerate(chosen):
            assert np.array_equal(result[at], images[at][:, :, ::-1] if flipped else images[at])


def test_shift_moves_in_zeros() -> None:
    images = np.random.default_rng(0).integers(1, 256, (3, 2, 4, 5), dtype=np.uint8)
    moved = shift(images, 2, np.array([[2, 2], [0, 0], [4, 3]]))
    assert np.array_equal(moved[0], images[0])  # the middle of the padded image is the image
    assert np.array_equal(moved[1][:, 2:, 2:], images[1][:, :2, :3])
    assert not moved[1][:, :2].any()
    assert not moved[1][:, :, :2].any()
    assert np.array_equal(moved[2][:, :2, :4], images[2][:, 2:, 1:])
    assert not moved[2][:, 2:].any()


def test_shifts_reach_every_offset_equally() -> None:
    moves = changes(Augment(crop="shift", shift=2), 5000).moves
    counts = np.bincount(moves[:, 0] * 5 + moves[:, 1], minlength=25)
    assert len(counts) == 25
    assert counts.min() > 140
    assert counts.max() < 260


def test_alternating_mirrors_turn_every_image_each_epoch_and_half_of_them_at_first() -> None:
    augment = Augment(flip="alternating")
    first, second, third = (changes(augment, 2000, epoch=epoch).mirrored for epoch in (0, 1, 2))
    assert np.array_equal(first, ~second)
    assert np.array_equal(first, third)
    assert abs(first.mean() - 0.5) < 0.04
    assert not np.array_equal(first, changes(augment, 2000, seed=1).mirrored)
    mixed = draw_changes(augment, 3, 0, np.arange(4), np.zeros(4, dtype=np.int64)).mirrored
    assert mixed.tolist() == [bool(first[0]) ^ bool(epoch % 2) for epoch in range(4)]


def numbered() -> np.ndarray:
    """Image i is i + 1 everywhere."""
    return np.broadcast_to(np.arange(1, 7, dtype=np.float32)[:, None, None, None], (6, 2, 16, 12)).copy()


def mixed(out: np.ndarray, indices: np.ndarray = INDICES, **options: float):
    """The shares of each image's own label."""
    return mix(out, Augment.model_validate(options), 0, EPOCHS, indices)


def test_mixup_blends_with_the_partner_by_the_share_of_the_label() -> None:
    out = numbered()
    shares = mixed(out, mixup=1.0)
    own, other = np.arange(1, 7), np.arange(6, 0, -1)
    assert out[:, 0, 0, 0] == pytest.approx(shares * own + (1 - shares) * other, rel=1e-6)
    assert (out == out[:, :1, :1, :1]).all()
    assert len(set(shares.tolist())) == 6
    moved = mixed(numbered(), np.roll(INDICES, 2), mixup=1.0)
    assert np.array_equal(np.roll(shares, 2), moved), "a draw belongs to its sample"


def test_cutmix_pastes_as_much_as_the_label_says() -> None:
    out = numbered()
    shares = mixed(out, cutmix=1.0)
    pasted = out != numbered()
    assert 1 - pasted.mean(axis=(1, 2, 3)) == pytest.approx(shares, abs=1e-6)
    assert (out[pasted] == numbered()[::-1][pasted]).all()


def test_erasing_clears_one_box_of_the_stated_area() -> None:
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
    draws = keyed_uniform(7, np.arange(4000)[:, None], np.arange(64))
    found = np.array([beta(alpha, row) for row in draws])
    assert abs(found.mean() - 0.5) < 0.02
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


@pytest.mark.parametrize("alpha", [0.3, 2.0, *(pytest.param(each, marks=pytest.mark.slow) for each in BETA)])
def test_draws_of_any_alpha_have_the_moments_of_beta(alpha: float) -> None:
    found = np.array([arithmetic.beta(alpha, 7, number) for number in range(2000)])
    assert abs(found.mean() - 0.5) < 0.02
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert ((found - 0.5) ** 4).mean() == pytest.approx(fourth, rel=0.15)


def test_a_draw_of_beta_has_the_same_bits_on_any_machine() -> None:
    assert {alpha: arithmetic.beta(alpha, 7, 1).hex() for alpha in BETA} == BETA
