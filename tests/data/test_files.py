"""Sources, and what is said of them: made images, IDX, arrays, a folder a class. The files are untrusted."""

import errno
import gzip
import os
import re
import struct
import sys
import tracemalloc
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.data.own import Stripes
from tests.data.pictures import encoded, folder_data, photo, write_folder
from tests.disks import blind
from tests.messages import LIBRARY, refused, refuses
from torusgd.data import ArraySource, CorruptImage, RegionSource, Source, open_sources
from torusgd.data.arrays import open_mnist, open_numpy, read_idx
from torusgd.data.decode import picture_size
from torusgd.data.pictures import _is, open_folder, open_folders
from torusgd.data.registry import data_sha256, describe, undecodable
from torusgd.data.synthetic import SEQUENCE, walk
from torusgd.recipe.data_schema import Data

COUNTS = {"train": 9, "t10k": 4}
RANDOM = np.random.default_rng(0)
IMAGES = {split: RANDOM.integers(0, 256, (count, 6, 5), dtype=np.uint8) for split, count in COUNTS.items()}
LABELS = {split: np.arange(count, dtype=np.uint8) % 3 for split, count in COUNTS.items()}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(root: Path, zipped: bool, separator: str = "-") -> Path:
    for part, arrays in (("images", IMAGES), ("labels", LABELS)):
        for stem, array in arrays.items():
            name, content = f"{stem}-{part}{separator}idx{array.ndim}-ubyte", idx(array)
            (root / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
    return root


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("separator", ["-", "."])
def test_idx(tmp_path: Path, zipped: bool, separator: str) -> None:
    data = grey("mnist", image_size=5, options={"names": "x, y,z"})
    train, held_out = open_sources(data, write_idx(tmp_path, zipped, separator), 0)
    assert train.classes == ("x", "y", "z")
    assert isinstance(train, ArraySource)
    assert np.array_equal(train.read_many(np.arange(9))[..., 0], IMAGES["train"])
    assert np.array_equal(held_out.read(3)[..., 0], IMAGES["t10k"][3])
    assert held_out.labels.tolist() == LABELS["t10k"].tolist()
    assert held_out.labels.dtype == np.int64


GOOD = idx(IMAGES["train"])
BAD_IDX = {
    "empty": b"", "cut in the header": GOOD[:10], "text": b"<html>not found</html>",
    "another type": GOOD[:2] + b"\x0d" + GOOD[3:], "another number of dims": GOOD[:3] + b"\x01" + GOOD[4:],
    "one byte short": GOOD[:-1], "one byte more": GOOD + b"\0", "terabytes": GOOD[:4] + b"\xff" * 12 + GOOD[16:],
}  # fmt: skip


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", BAD_IDX)
def test_a_wrong_idx_file_is_refused(tmp_path: Path, name: str, zipped: bool) -> None:
    file = tmp_path / ("images.gz" if zipped else "images")
    file.write_bytes(gzip.compress(BAD_IDX[name]) if zipped else BAD_IDX[name])
    refuses(f"an IDX file: {name}", read_idx, file, dims=3, FILE=file)


def test_damaged_gzip_files_one_that_swells_and_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    file, content = tmp_path / "images.gz", gzip.compress(GOOD)
    damages = {"cut short": content[:-20], "zeros": content[:30] + b"\0\0\0\0" + content[34:], "not packed": GOOD}
    for damage, damaged in damages.items():
        file.write_bytes(damaged)
        refuses(f"a damaged gzip file: {damage}", read_idx, file, dims=3, FILE=file, REASON=LIBRARY)
    file.write_bytes(gzip.compress(GOOD + bytes(50_000_000)))
    tracemalloc.start()
    refuses("an IDX file: one byte more", read_idx, file, dims=3, FILE=file)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    file.unlink()
    refuses("an empty folder for mnist", open_mnist, tmp_path, TMP=tmp_path)
    write_idx(tmp_path, zipped=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(LABELS["train"]))
    refuses("more labels than images in mnist", open_mnist, tmp_path, TMP=tmp_path)


def arrays(**changes: Any) -> dict[str, Any]:
    good = {"train_images": IMAGES["train"], "eval_images": IMAGES["t10k"]}
    good |= {"train_labels": LABELS["train"], "eval_labels": LABELS["t10k"]} | changes
    return {name: array for name, array in good.items() if array is not None}


@pytest.mark.parametrize("kind", ["npz", "compressed npz", "npy"])
def test_arrays(tmp_path: Path, kind: str) -> None:
    colour, held_out_colour = (np.stack([IMAGES[stem]] * 3, axis=-1) for stem in ("train", "t10k"))
    path = write_arrays(tmp_path, kind, arrays(train_images=colour, eval_images=held_out_colour))
    train: Any
    train, held_out = open_sources(Data(source="numpy", image_size=5), path, 0)
    assert (train.classes, len(train), len(held_out)) == (("0", "1", "2"), 9, 4)
    assert np.array_equal(train.read(8), colour[8])
    assert np.array_equal(held_out.labels, LABELS["t10k"])
    assert "data.source numpy" in describe(path)[0]
    assert list(undecodable(path)) == []
    base = train.images if kind == "npy" else None  # mapped, not read
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap) == (kind == "npy")


def write_arrays(root: Path, kind: str, contents: dict[str, Any]) -> Path:
    if kind.endswith("npz"):
        (np.savez if kind == "npz" else np.savez_compressed)(root / "set.npz", **contents)
        return root / "set.npz"
    for name, array in contents.items():
        np.save(root / f"{name}.npy", array)
    return root


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_nothing_is_unpickled(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trapped = np.empty(9, dtype=object)
    trapped[:] = [Trap() for _ in range(9)]
    with refused(f"arrays of {kind} with a pickle", TMP=tmp_path, REASON=LIBRARY):
        open_numpy(write_arrays(tmp_path, kind, arrays(train_images=trapped)))
    assert not (tmp_path / "sprung").exists()


BAD_ARRAYS: dict[str, dict[str, Any]] = {
    "float images": {"train_images": IMAGES["train"] / 255}, "float labels": {"train_labels": LABELS["train"] / 1.0},
    "flat images": {"eval_images": IMAGES["t10k"].reshape(4, -1)}, "an array missing": {"eval_labels": None},
    "few labels": {"train_labels": LABELS["train"][:5]}, "one class": {"train_labels": 9 * [0], "eval_labels": 4 * [0]},
    "negative labels": {"train_labels": LABELS["train"].astype(np.int8) - 1},
    "images without pixels": {"train_images": np.zeros((9, 0, 5), np.uint8)},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["npz", "npy"])
@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_wrong_arrays_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = write_arrays(tmp_path, kind, arrays(**BAD_ARRAYS[name]))
    refuses(f"arrays of {kind}: {name}", open_sources, grey("numpy", image_size=5), path, 0, SET=path)


def test_files_that_are_no_arrays_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    refuses("a pipe of arrays", open_sources, grey("numpy", image_size=5), tmp_path / "pipe.npz", 0, TMP=tmp_path)
    file = write_arrays(tmp_path, "npz", arrays())
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[changed.index(IMAGES["train"].tobytes()) + 7] ^= 1
    file.write_bytes(changed)
    refuses("an npz with a changed byte", open_numpy, file, TMP=tmp_path)
    below = write_arrays(tmp_path, "npz", arrays(train_labels=LABELS["train"].astype(np.int64) - 1))
    refuses("an npz with labels below 0", describe, below, TMP=tmp_path)
    for content in (b"", b"text", b"PK\x03\x04 cut", whole[: len(whole) // 2]):
        file.write_bytes(content)
        refuses("a damaged npz", open_numpy, file, FILE=file, REASON=LIBRARY)
    file = write_arrays(tmp_path, "npy", arrays()) / "train_images.npy"
    file.write_bytes(file.read_bytes()[:-50])
    refuses("a damaged npy", open_numpy, tmp_path, FILE=file, REASON=LIBRARY)


def test_a_folder_lists_classes_and_files_by_name_and_classes_as_a_list_orders_them(tmp_path: Path) -> None:
    root = write_folder(tmp_path, train=3, val=2, classes=("wolf", "ape", "cow"))
    (root / "train" / "ape" / "zz.PNG").write_bytes(encoded(photo(9, 9), "PNG"))
    for name in ("notes.txt", ".hidden.jpg"):
        (root / "train" / "ape" / name).write_text("not a picture")
    (root / "train" / ".cache").mkdir()
    train, val = open_folder(root, channels=3)
    assert train.classes == val.classes == ("ape", "cow", "wolf")
    assert train.labels.tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert [Path(train.where(index)).name for index in range(4)] == ["000.jpg", "001.jpg", "002.jpg", "zz.PNG"]
    grey, _ = open_folder(root, channels=1)
    assert (train.read(3).shape, picture_size(train.encoded(3)), grey.read(3).shape) == ((9, 9, 3), (9, 9), (9, 9, 1))
    (root / "classes.txt").write_text("wolf\ttabby cat\n\nape\n")
    train, val = open_folder(root, 3, classes="classes.txt")
    assert train.classes == val.classes == ("tabby cat", "ape")
    assert (len(train), Path(train.where(0)).parent.name) == (7, "wolf")


@pytest.mark.parametrize("listed", ["../outside\n", "cat\ncat\n", "/etc\n", ".\n", "..\n", "\n \n", "bird\n"])
def test_a_wrong_list_of_classes_is_refused(tmp_path: Path, listed: str) -> None:
    root = write_folder(tmp_path / "set")
    write_folder(tmp_path / "outside")
    (root / "classes.txt").write_text(listed)
    with refused(f"a list of classes: {listed!r}", f"{root}/classes.txt: ", TMP=tmp_path):
        open_folder(root, 3, classes="classes.txt")
    (root / "binary").write_bytes(b"\xff\xfe\xfa")
    for name in ("missing.txt", "binary", "train"):
        refuses(f"a list of classes: {name}", open_folder, root, 3, classes=name, TMP=root)


def test_no_class_is_left_out_because_a_disk_fails_a_moment(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", train=2)
    folder = next((root / "val").iterdir())
    with blind(folder), pytest.raises(OSError, match="Input/output error"):
        open_folder(root, 3)
    with blind(tmp_path / "set" / "val"), pytest.raises(OSError, match="Input/output error"):
        open_folders(tmp_path, 3)
    assert not _is(Mock(side_effect=OSError(errno.ELOOP, "loop")))
    with pytest.raises(OSError, match="Stale"):  # of a link to the folder of a class
        _is(Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))


def test_wrong_layouts_are_refused(tmp_path: Path) -> None:
    picture = encoded(photo(9, 9))
    made: dict[str, bytes | None] = {
        "nothing": b"", "train/loose.jpg": picture, "val": None, "train/cat": None, "val/cat": None,
        "train/cat/1.jpg": picture, "val/dog": None,
    }  # fmt: skip
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if content is None:
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(content)
        if name not in ("train/cat", "train/cat/1.jpg"):  # the next one is also missing
            refuses(f"a folder of classes up to {name}", open_folder, tmp_path, 3, TMP=tmp_path)


def test_links_to_nothing_and_missing_pictures_are_io_errors_bad_ones_corrupt(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", train=2)
    (root / "train" / "dog" / "loop.jpg").symlink_to(root / "train" / "dog" / "loop.jpg")
    (root / "train" / "dog" / "gone.jpg").symlink_to(root / "unmounted.jpg")
    (root / "train" / "cat" / "folder.jpg").symlink_to(root)
    (root / "train" / "cat" / "back").symlink_to(root)
    os.mkfifo(root / "train" / "cat" / "pipe.jpg")  # to read it would wait for ever
    (root / "train" / "dog" / "linked.jpg").symlink_to(root / "train" / "cat" / "000.jpg")
    (root / "val" / "loop").symlink_to(root / "val" / "loop")
    train, _ = open_folder(root, 3)
    assert train.labels.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert np.array_equal(train.read(5), train.read(0))  # linked.jpg; gone.jpg and loop.jpg can't be read
    for index in (4, 6):
        with pytest.raises(OSError, match=r"gone|loop"):
            train.read(index)
    root = write_folder(tmp_path, train=5)
    folder = root / "train" / "cat"
    (folder / "000.jpg").write_text("a text named .jpg")
    (folder / "001.jpg").write_bytes(b"")
    (folder / "002.jpg").write_bytes((folder / "002.jpg").read_bytes()[:-300])
    (folder / "003.jpg").write_bytes(encoded(photo(9, 9), "PNG"))  # by its content, not its name
    train, _ = open_folder(root, 3)
    with open(folder / "004.jpg", "r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no room
    for index, what in {0: "text", 1: "nothing", 2: "half a picture", 4: "a terabyte"}.items():
        about = f"image {index}: {folder}/{index:03}.jpg"
        with refused(f"a .jpg of {what}", about, CorruptImage, TMP=tmp_path) as error:
            train.read(index)
        assert getattr(error.value, "index", None) == index
    assert train.read(3).shape == (9, 9, 3)
    (folder / "003.jpg").unlink()
    with pytest.raises(FileNotFoundError):
        train.read(3)


def test_a_folder_idx_files_and_arrays_of_many_classes_are_described(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "folder", train=5, val=2)
    (root / "train" / "cat" / "wide.png").write_bytes(encoded(photo(20, 90), "PNG"))
    (root / "train" / "cat" / "torn.jpg").write_text("torn")
    words = ("data.source folder, 3 channels", "12 for training, 4 held out", "2: cat, dog", "5 to 7 training images")
    *lines, sizes = describe(root)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert re.fullmatch(r"sizes     (\d+ x \d+ \(1\), ){5}and 6 other sizes \(width x height, of 12 .*", sizes)
    assert list(undecodable(root)) == [f"{root}/train/cat/torn.jpg: neither JPEG nor PNG"]
    words = ("data.source mnist, 1 channel", "9 for training, 4 held out", "", "3 training images")
    (tmp_path / "idx").mkdir()
    *lines, sizes = describe(write_idx(tmp_path / "idx", zipped=True))
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert sizes.startswith("sizes     5 x 6 (9) ")
    images, labels = np.zeros((300, 2, 2), np.uint8), np.arange(300)
    contents = {"train_images": images, "train_labels": labels, "eval_images": images, "eval_labels": labels}
    lines = describe(write_arrays(tmp_path, "npz", contents))
    assert lines[2].endswith("300: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...")


def test_what_a_recipe_makes_and_what_is_no_data_set(tmp_path: Path) -> None:
    lines = describe(Path("intel-cddnn-16"))
    assert lines[0] == "intel-cddnn-16: data.source frames, 1 channel"
    assert lines[1] == "images    4000000 for training, 40000 held out"
    assert int(lines[3].split()[2]) > 50
    assert lines[4].startswith("sizes     39 x 11 (200) ")
    refuses("a recipe whose source needs a path", describe, Path("sony-224s"), about="data.source: ")
    for what, path in (("a folder without a data set", tmp_path), ("a folder that is missing", tmp_path / "missing")):
        refuses(what, describe, path, PATH=path)


def grey(source: str, **changes: Any) -> Data:
    return Data(**{"source": source, "image_size": 8, "channels": 1, "mean": (0.5,), "std": (0.5,), **changes})


synthetic: Any = partial(Data, source="synthetic", image_size=16, train_images=40, eval_images=20, classes=4)
frames = partial(grey, "frames", image_size=(11, 39), train_images=1500, eval_images=400, classes=50)


def opened(data: Data, seed: int = 0) -> Any:
    pair = open_sources(data, None, seed)
    assert all(isinstance(each, ArraySource) for each in pair)
    return pair


def test_digits_are_split_the_same_for_every_seed() -> None:
    from sklearn.datasets import load_digits

    train, held_out = opened(grey("digits"))
    assert (len(train), len(held_out), train.classes) == (1437, 360, tuple("0123456789"))
    everything = train.read_many(np.arange(1437))
    assert (everything.shape, everything.dtype) == ((1437, 8, 8, 1), np.uint8)
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
    assert (((asked[:, None] - means) ** 2).sum(axis=2).argmin(axis=1) == held_out.labels).mean() > share
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
        assert ((low <= windows[i, 5]) & (windows[i, 5] <= high)).mean() > 0.95  # a third state may be near


def test_the_first_images_are_taken_and_a_source_may_be_ones_own(tmp_path: Path) -> None:
    (whole, _), (few, held_out) = opened(grey("digits")), opened(grey("digits", train_images=10, eval_images=7))
    assert (len(few), len(held_out), few.shape) == (10, 7, (8, 8, 1))
    assert np.array_equal(few.labels, whole.labels[:10])
    assert np.array_equal(few.read(9), whole.read(9))
    train, _ = open_sources(folder_data(train_images=5), write_folder(tmp_path), 0)
    assert isinstance(train, RegionSource)
    assert (isinstance(train, ArraySource), len(train)) == (False, 5)
    data = Data(source="tests.data.own:stripes", options={"count": 12}, image_size=16, resize=18)
    own, others = open_sources(data, None, 0)
    assert (isinstance(own, Stripes), isinstance(own, Source), len(own), len(others)) == (True, True, 12, 6)


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


NO_TEXTS = {"folder": {"classes": 10}, "csv": {"train": 5}, "tar": {"index": 5}, "numpy": {"names": 5}}
MISTAKES = {
    "unknown source": grey("digit"), "path for digits": grey("digits"), "no path": grey("mnist"),
    "option of digits": grey("digits", options={"noise": 1}), "option of synthetic": synthetic(options={"nois": 1}),
    "noise above 1": synthetic(options={"noise": 1.5}), "noise as text": synthetic(options={"noise": "much"}),
    **{f"an option of {name} that is no text": grey(name, options=options) for name, options in NO_TEXTS.items()},
    "no size for synthetic": synthetic(train_images=None), "no classes for frames": frames(classes=None),
    "frames can't be resized": frames(resize=40), "option of frames": frames(options={"nois": 1}),
    "frames in colour": frames(channels=3, mean=(0.5,) * 3, std=(0.5,) * 3),
    "noise of frames": frames(options={"noise": -1}), "no path for a folder": folder_data(),
    "classes": grey("digits", classes=11), "channels": Data(source="digits", image_size=8),
    "too many images": grey("digits", eval_images=361), "all for validation": grey("digits", validation_images=1437),
    "own, not importable": grey("no_such_module:source"), "own, not a source": grey("tests.data.own:incomplete"),
    "own, labels": Data(source="tests.data.own:mislabelled", image_size=8),
    "own, no such option": grey("tests.data.own:stripes", options={"conut": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_their_key_and_remedy(name: str, tmp_path: Path) -> None:
    with refused(f"data: {name}", "data.", TMP=tmp_path):
        open_sources(MISTAKES[name], tmp_path if name == "path for digits" or "no text" in name else None, 0)


def test_missing_paths_and_packages_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with refused("data at a missing path", "--data ", PATH=tmp_path / "missing"):
        open_sources(folder_data(), tmp_path / "missing", 0)
    for module in ("sklearn", "simplejpeg"):
        monkeypatch.setitem(sys.modules, module, None)  # an import then fails
    refuses("digits without scikit-learn", open_sources, grey("digits"), None, 0, TMP=tmp_path)
    refuses("pictures without their decoders", open_sources, folder_data(), write_folder(tmp_path), 0, TMP=tmp_path)
