"""Sources that read files, and what is said of them: IDX, arrays, a folder a class. The files are untrusted."""

import gzip
import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import encoded, photo, write_folder
from tests.messages import LIBRARY, refused
from torusgd.data import ArraySource, CorruptImage, open_sources
from torusgd.data.arrays import open_mnist, open_numpy, read_idx
from torusgd.data.pictures import open_folder
from torusgd.data.registry import describe, undecodable
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
    data = Data(source="mnist", image_size=5, channels=1, mean=(0.5,), std=(0.5,), options={"names": "x, y,z"})
    train, held_out = open_sources(data, write_idx(tmp_path, zipped, separator), 0)
    assert train.classes == ("x", "y", "z")
    assert isinstance(train, ArraySource)
    assert np.array_equal(train.read_many(np.arange(9))[..., 0], IMAGES["train"])
    assert np.array_equal(held_out.read(3)[..., 0], IMAGES["t10k"][3])
    assert np.array_equal(held_out.labels, LABELS["t10k"])
    assert held_out.labels.dtype == np.int64


GOOD = idx(IMAGES["train"])
BAD_IDX = {
    "empty": b"",
    "cut in the header": GOOD[:10],
    "another type": GOOD[:2] + b"\x0d" + GOOD[3:],
    "another number of dims": GOOD[:3] + b"\x01" + GOOD[4:],
    "one byte short": GOOD[:-1],
    "one byte more": GOOD + b"\0",
    "terabytes": GOOD[:4] + b"\xff" * 12 + GOOD[16:],
    "text": b"<html>not found</html>",
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", BAD_IDX)
def test_a_wrong_idx_file_is_refused(tmp_path: Path, name: str, zipped: bool) -> None:
    file = tmp_path / ("images.gz" if zipped else "images")
    file.write_bytes(gzip.compress(BAD_IDX[name]) if zipped else BAD_IDX[name])
    with refused(f"an IDX file: {name}", FILE=file):
        read_idx(file, dims=3)


def test_damaged_gzip_files_one_that_swells_and_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    file, content = tmp_path / "images.gz", gzip.compress(GOOD)
    damages = {"cut short": content[:-20], "zeros": content[:30] + b"\0\0\0\0" + content[34:], "not packed": GOOD}
    for damage, damaged in damages.items():
        file.write_bytes(damaged)
        with refused(f"a damaged gzip file: {damage}", FILE=file, REASON=LIBRARY):
            read_idx(file, dims=3)
    file.write_bytes(gzip.compress(GOOD + bytes(50_000_000)))
    tracemalloc.start()
    with refused("an IDX file: one byte more", FILE=file):
        read_idx(file, dims=3)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    file.unlink()
    with refused("an empty folder for mnist", TMP=tmp_path):
        open_mnist(tmp_path)
    write_idx(tmp_path, zipped=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(LABELS["train"]))
    with refused("more labels than images in mnist", TMP=tmp_path):
        open_mnist(tmp_path)


def arrays(**changes: Any) -> dict[str, Any]:
    good = {"train_images": IMAGES["train"], "train_labels": LABELS["train"]}
    good |= {"eval_images": IMAGES["t10k"], "eval_labels": LABELS["t10k"]}
    return {name: array for name, array in {**good, **changes}.items() if array is not None}


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
    "float images": {"train_images": IMAGES["train"] / 255},
    "flat images": {"eval_images": IMAGES["t10k"].reshape(4, -1)},
    "float labels": {"train_labels": LABELS["train"] / 1.0},
    "fewer labels": {"train_labels": LABELS["train"][:5]},
    "an array missing": {"eval_labels": None},
    "negative labels": {"train_labels": LABELS["train"].astype(np.int8) - 1},
    "images without pixels": {"train_images": np.zeros((9, 0, 5), np.uint8)},
}
GREY = Data(source="numpy", image_size=5, channels=1, mean=(0.5,), std=(0.5,))


@pytest.mark.parametrize("kind", ["npz", "npy"])
@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_wrong_arrays_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = write_arrays(tmp_path, kind, arrays(**BAD_ARRAYS[name]))
    with refused(f"arrays of {kind}: {name}", SET=path):
        open_sources(GREY, path, 0)


def test_files_that_are_no_arrays_are_refused(tmp_path: Path) -> None:
    file = write_arrays(tmp_path, "npz", arrays())
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[changed.index(IMAGES["train"].tobytes()) + 7] ^= 1
    file.write_bytes(changed)
    with refused("an npz with a changed byte", TMP=tmp_path):
        open_numpy(file)
    for content in (b"", b"text", b"PK\x03\x04 cut", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with refused("a damaged npz", FILE=file, REASON=LIBRARY):
            open_numpy(file)
    file = write_arrays(tmp_path, "npy", arrays()) / "train_images.npy"
    file.write_bytes(file.read_bytes()[:-50])
    with refused("a damaged npy", FILE=file, REASON=LIBRARY):
        open_numpy(tmp_path)


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
    assert (train.read(3).shape, train.size(3), grey.read(3).shape) == ((9, 9, 3), (9, 9), (9, 9, 1))
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
        with refused(f"a list of classes: {name}", TMP=root):
            open_folder(root, 3, classes=name)


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
            with refused(f"a folder of classes up to {name}", TMP=tmp_path):
                open_folder(tmp_path, 3)


def test_links_that_go_round_and_special_files_are_passed_over(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", train=2)
    (root / "train" / "cat" / "loop.jpg").symlink_to(root / "train" / "cat" / "loop.jpg")
    (root / "train" / "cat" / "back").symlink_to(root)
    os.mkfifo(root / "train" / "cat" / "pipe.jpg")  # to read it would wait for ever
    (root / "train" / "dog" / "linked.jpg").symlink_to(root / "train" / "cat" / "000.jpg")
    (root / "val" / "loop").symlink_to(root / "val" / "loop")
    train, _ = open_folder(root, 3)
    assert train.labels.tolist() == [0, 0, 1, 1, 1]
    assert np.array_equal(train.read(4), train.read(0))


def test_bad_pictures_are_corrupt_and_missing_ones_are_io_errors(tmp_path: Path) -> None:
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
    with refused("a recipe whose source needs a path", "data.source: "):
        describe(Path("sony-224s"))
    for path in (tmp_path, tmp_path / "missing"):
        with refused("a folder without a data set", PATH=path):
            describe(path)
