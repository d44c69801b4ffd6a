import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.own import Stripes
from tests.data.pictures import folder_data, write_folder
from tests.messages import refused
from torusgd.data import ArraySource, RegionSource, Source, open_sources
from torusgd.data.registry import data_sha256
from torusgd.data.synthetic import SEQUENCE, walk
from torusgd.recipe.data_schema import Data


def grey(source: str, **changes: Any) -> Data:
    return Data(**{"source": source, "image_size": 8, "channels": 1, "mean": (0.5,), "std": (0.5,), **changes})


def synthetic(**changes: Any) -> Data:
    values = {"image_size": 16, "train_images": 40, "eval_images": 20, "classes": 4}
    return Data(**{"source": "synthetic", **values, **changes})


def frames(**changes: Any) -> Data:
    values = {"image_size": (11, 39), "train_images": 1500, "eval_images": 400, "classes": 50}
    return grey("frames", **{**values, **changes})


def opened(data: Data, seed: int = 0) -> tuple[ArraySource, ArraySource]:
    train, held_out = open_sources(data, None, seed)
    assert isinstance(train, ArraySource)
    assert isinstance(held_out, ArraySource)
    return train, held_out


def test_digits_are_split_the_same_for_every_seed() -> None:
    from sklearn.datasets import load_digits

    train, held_out = opened(grey("digits"))
    assert (len(train), len(held_out), train.classes) == (1437, 360, tuple("0123456789"))
    everything = train.read_many(np.arange(1437))
    assert (everything.shape, everything.dtype) == ((1437, 8, 8, 1), np.dtype(np.uint8))
    assert (everything.min(), everything.max()) == (0, 255)
    assert set(held_out.labels.tolist()) == set(range(10))
    assert np.array_equal(opened(grey("digits"), 5)[0].labels, train.labels)

    ours = np.concatenate([everything, held_out.read_many(np.arange(360))]).reshape(1797, 64)
    theirs = np.round(load_digits().data * (255 / 16))
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs.astype(np.uint8)))  # each digit once


@pytest.mark.parametrize("make", [synthetic, frames])
def test_made_images_are_a_function_of_seed_split_and_index(make: Any) -> None:
    data = make()
    train, held_out = opened(data, 3)
    assert (len(train), len(held_out)) == (data.train_images, data.eval_images)
    assert (train.classes, train.shape) == (tuple(map(str, range(data.classes))), (*data.sizes.sides, data.channels))
    many = train.read_many(np.array([5, len(train) - 1, 5]))
    assert np.array_equal(many[0], many[2])
    assert np.array_equal(many[1], train.read(len(train) - 1))
    for other in (train.read(9), held_out.read(5), opened(data, 4)[0].read(5)):
        assert not np.array_equal(train.read(5), other)
    larger, _ = opened(make(train_images=len(train) + 400), 3)
    everything = np.arange(len(train))
    assert np.array_equal(larger.read_many(everything), train.read_many(everything))
    assert np.array_equal(larger.labels[: len(train)], train.labels)


def test_synthetic_noise_and_size_are_read() -> None:
    assert opened(synthetic(resize=20, classes=2))[0].read(0).shape == (20, 20, 3), "the size before the centre crop"
    clean, half, noise = (opened(synthetic(options={"noise": value}))[0].read(0) for value in (0.0, 0.5, 1.0))
    assert len(np.unique(clean.reshape(-1, 3), axis=0)) <= 16  # 4 x 4 tiles of one colour each
    assert clean.std() != half.std() != noise.std()
    assert abs(noise.mean() - 127) < 10


def sorted_pixels(images: np.ndarray) -> np.ndarray:
    """Of each channel, so that it does not matter where the pattern lies."""
    return np.sort(images.reshape(len(images), 64, 3), axis=1).reshape(len(images), -1)


@pytest.mark.parametrize(
    ("data", "features", "classes", "share"),
    [
        (synthetic(train_images=400, eval_images=100, image_size=8), sorted_pixels, 4, 0.8),
        (frames(train_images=8000), lambda windows: windows[:, 5, :, 0], 50, 0.7),
    ],
    ids=["synthetic", "the middle frames"],
)
def test_made_images_can_be_learned(data: Data, features: Any, classes: int, share: float) -> None:
    """The nearest mean of the training set tells most of the held-out classes."""
    train, held_out = opened(data)
    known, asked = (features(each.read_many(np.arange(len(each))).astype(float)) for each in (train, held_out))
    means = np.stack([known[train.labels == label].mean(axis=0) for label in range(classes)])
    guesses = ((asked[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (guesses == held_out.labels).mean() > share
    assert np.bincount(held_out.labels).max() / len(held_out) < (0.1 if classes == 50 else 1)


def test_states_of_frames_are_held_and_left_for_the_right_and_what_is_between_lies_between_their_means() -> None:
    train, _ = opened(frames(), 3)
    # The next sample is the same sequence, a frame later, unless a new one begins.
    assert np.array_equal(train.read(5)[1:], train.read(6)[:-1])
    assert not np.array_equal(train.read(SEQUENCE - 1)[1:], train.read(SEQUENCE)[:-1])
    states = walk(np.arange(40), 300, classes=3 * 20, seed=0, split=0)
    assert states.shape == (40, 300)
    for row in states:
        changes = np.flatnonzero(np.diff(row)) + 1
        assert set(np.diff(changes)) <= set(range(3, 10))
        before, after = row[changes - 1], row[changes]
        within = before % 3 < 2
        assert (after[within] == before[within] + 1).all()
        assert (after[~within] % 3 == 0).all()
    followers = {(a, b) for row in states for a, b in pairwise(row.tolist()) if a % 3 == 2 and a != b}
    assert max(sum(pair[0] == last for pair in followers) for last in range(2, 60, 3)) <= 16
    assert set(walk(np.arange(400), 300, classes=50, seed=0, split=1).ravel()) == set(range(50))
    train, _ = opened(frames(options={"noise": 0}))
    windows, labels = train.read_many(np.arange(200))[..., 0].astype(int), train.labels[:200]
    held = [i for i in range(5, 195) if len(set(labels[i - 2 : i + 3])) == 1]
    means = {labels[i]: windows[i, 5] for i in held}
    assert all(np.array_equal(windows[i, 5], means[labels[i]]) for i in held)
    turns = [i for i in range(5, 195) if labels[i] != labels[i + 1] and {labels[i], labels[i + 1]} <= set(means)]
    assert len(turns) > 5
    for i in turns:
        low, high = np.sort([means[labels[i]], means[labels[i + 1]]], axis=0)
        inside = (low <= windows[i, 5]) & (windows[i, 5] <= high)
        assert inside.mean() > 0.95  # a third state may be near


def test_the_first_images_are_taken(tmp_path: Path) -> None:
    whole, _ = open_sources(grey("digits"), None, 0)
    few, held_out = opened(grey("digits", train_images=10, eval_images=7))
    assert (len(few), len(held_out), few.shape) == (10, 7, (8, 8, 1))
    assert np.array_equal(few.labels, whole.labels[:10])
    assert np.array_equal(few.read(9), whole.read(9))
    train, _ = open_sources(folder_data(train_images=5), write_folder(tmp_path), 0)
    assert isinstance(train, RegionSource)
    assert (isinstance(train, ArraySource), len(train)) == (False, 5)


@pytest.mark.parametrize("kind", ["arrays", "folder"])
def test_validation_images_are_training_images_by_key_that_are_not_trained_on(kind: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path) if kind == "folder" else None
    data = grey("digits", train_images=20) if kind == "arrays" else folder_data()
    whole, _ = open_sources(data, path, 0)
    kept = data.model_copy(update={"validation_images": 3})
    (train, validation), (again, same) = (open_sources(kept, path, seed) for seed in (0, 1))
    assert (len(train), len(validation)) == (len(whole) - 3, 3)
    for left, right in ((train, again), (validation, same)):
        assert data_sha256(left, left) == data_sha256(right, right), "the same for every seed"

    def pixels(source: Source) -> list[bytes]:
        return [source.read(index).tobytes() + bytes([source.labels[index]]) for index in range(len(source))]

    assert sorted([*pixels(train), *pixels(validation)]) == sorted(pixels(whole))
    assert isinstance(train, ArraySource if kind == "arrays" else RegionSource)
    if isinstance(train, ArraySource):
        assert np.array_equal(train.read_many(np.array([4, 2]))[0], train.read(4))


def test_a_source_of_ones_own() -> None:
    data = Data(source="tests.data.own:stripes", options={"count": 12}, image_size=16, resize=18)
    train, held_out = open_sources(data, None, 0)
    assert (isinstance(train, Stripes), isinstance(train, Source)) == (True, True)
    assert (len(train), len(held_out)) == (12, 6)


MISTAKES = {
    "unknown source": grey("digit"),
    "path for digits": grey("digits"),
    "option of digits": grey("digits", options={"noise": 1}),
    "option of synthetic": synthetic(options={"nois": 1}),
    "noise above 1": synthetic(options={"noise": 1.5}),
    "noise as text": synthetic(options={"noise": "much"}),
    "no size for synthetic": synthetic(train_images=None),
    "no classes for frames": frames(classes=None),
    "frames can't be resized": frames(resize=40),
    "frames in colour": frames(channels=3, mean=(0.5,) * 3, std=(0.5,) * 3),
    "option of frames": frames(options={"nois": 1}),
    "noise of frames": frames(options={"noise": -1}),
    "no path": grey("mnist"),
    "no path for a folder": folder_data(),
    "classes": grey("digits", classes=11),
    "channels": Data(source="digits", image_size=8),
    "too many images": grey("digits", eval_images=361),
    "all for validation": grey("digits", validation_images=1437),
    "own, not importable": grey("no_such_module:source"),
    "own, not a source": grey("tests.data.own:incomplete"),
    "own, labels": Data(source="tests.data.own:mislabelled", image_size=8),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_their_key_and_remedy(name: str, tmp_path: Path) -> None:
    with refused(f"data: {name}", "data.", TMP=tmp_path):
        open_sources(MISTAKES[name], tmp_path if name == "path for digits" else None, 0)


def test_missing_paths_and_packages_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with refused("data at a missing path", "--data ", PATH=tmp_path / "missing"):
        open_sources(folder_data(), tmp_path / "missing", 0)
    for module in ("sklearn", "simplejpeg"):
        monkeypatch.setitem(sys.modules, module, None)  # an import then fails
    with refused("digits without scikit-learn", TMP=tmp_path):
        open_sources(grey("digits"), None, 0)
    with refused("pictures without their decoders", TMP=tmp_path):
        open_sources(folder_data(), write_folder(tmp_path), 0)
