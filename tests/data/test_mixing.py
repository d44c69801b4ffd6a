"""Erasing and mixing: keyed by sample, with the stated shares, and the partner's label and pixels in step."""

import numpy as np
import pytest

from torusgd import arithmetic
from torusgd.data.augment import beta, erase, mix
from torusgd.data.order import COPY, StreamOrder
from torusgd.recipe.data_schema import Augment
from torusgd.rng import keyed_uniform

DRAWS = {0.05: "0x1.fffe845a6b293p-1", 0.8: "0x1.77886f4eeff31p-3", 10.0: "0x1.8b107cfb719b5p-2"}
EPOCHS, INDICES = np.zeros(6, dtype=np.int64), np.arange(6)


def images() -> np.ndarray:
    """Image i is i + 1 everywhere."""
    return np.broadcast_to(np.arange(1, 7, dtype=np.float32)[:, None, None, None], (6, 2, 16, 12)).copy()


def mixed(out: np.ndarray, indices: np.ndarray = INDICES, **options: float):
    """The shares of each image's own label."""
    return mix(out, Augment.model_validate(options), 0, EPOCHS, indices)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.2])
def test_shares_have_the_mean_and_variance_of_beta(alpha: float) -> None:
    draws = keyed_uniform(7, np.arange(4000)[:, None], np.arange(64))
    found = np.array([beta(alpha, row) for row in draws])
    assert abs(found.mean() - 0.5) < 0.02
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_mixup_blends_with_the_partner_by_the_share_of_the_label() -> None:
    out = images()
    shares = mixed(out, mixup=1.0)
    own, other = np.arange(1, 7), np.arange(6, 0, -1)
    assert out[:, 0, 0, 0] == pytest.approx(shares * own + (1 - shares) * other, rel=1e-6)
    assert (out == out[:, :1, :1, :1]).all()
    assert len(set(shares.tolist())) == 6


def test_cutmix_pastes_as_much_as_the_label_says() -> None:
    out = images()
    shares = mixed(out, cutmix=1.0)
    kept = (out == images()).mean(axis=(1, 2, 3))
    assert kept == pytest.approx(shares, abs=1e-6)
    pasted = out != images()
    assert (out[pasted] == images()[::-1][pasted]).all()


def test_a_draw_belongs_to_its_sample() -> None:
    one, other = (mixed(images(), order, mixup=0.5) for order in (INDICES, np.roll(INDICES, 2)))
    assert np.array_equal(np.roll(one, 2), other)


def test_nothing_is_mixed_without_being_asked() -> None:
    out = images()
    assert mixed(out) is None
    erase(out, Augment(), 0, EPOCHS, INDICES)
    assert np.array_equal(out, images())


def test_erasing_clears_one_box_of_the_stated_area() -> None:
    out = images()
    erase(out, Augment(erase=1.0), 0, EPOCHS, INDICES)
    for image in out:
        rows, columns = np.nonzero(image[0] == 0)
        box = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        assert box == len(rows)
        assert 0.01 < box / image[0].size < 0.4
        assert np.array_equal(image[0], image[1])


def test_repeats_stand_side_by_side_with_draws_of_their_own() -> None:
    indices, epochs = StreamOrder(4, 0, repeats=3).at(0, 14)
    plain, _ = StreamOrder(4, 0).at(0, 5)
    assert indices.tolist() == np.repeat(plain, 3)[:14].tolist()
    assert (epochs // COPY).tolist() == [0, 1, 2] * 4 + [0, 1]
    assert (epochs % COPY).tolist() == [0] * 12 + [1] * 2
    part, _ = StreamOrder(4, 0, repeats=3).at(5, 4)
    assert part.tolist() == indices[5:9].tolist()


@pytest.mark.parametrize(
    "alpha", [0.3, 2.0, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.05, 0.8, 10.0))]
)
def test_draws_of_any_alpha_have_the_moments_of_beta(alpha: float) -> None:
    found = np.array([arithmetic.beta(alpha, 7, number) for number in range(2000)])
    assert abs(found.mean() - 0.5) < 0.02
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert ((found - 0.5) ** 4).mean() == pytest.approx(fourth, rel=0.15)


def test_a_draw_of_beta_has_the_same_bits_on_any_machine() -> None:
    found = {alpha: arithmetic.beta(alpha, 7, 1).hex() for alpha in DRAWS}
    assert found == DRAWS
