from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import encoded, photo, write_folder
from tests.data.test_files import arrays, write_arrays, write_idx
from tests.messages import refused
from torusgd.data.registry import describe, undecodable


def test_a_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path, train=5, val=2)
    (root / "train" / "cat" / "wide.png").write_bytes(encoded(photo(20, 90), "PNG"))
    (root / "train" / "cat" / "torn.jpg").write_text("torn")
    info = describe(root)
    assert (info.kind, info.images, info.classes) == ("folder", {"train": 12, "eval": 4}, ("cat", "dog"))
    assert (info.per_class, info.sampled, info.channels) == ((5, 7), 12, 3)
    assert dict(info.sizes)[20, 90] == 1
    assert sum(count for _, count in info.sizes) == 11
    lines = info.lines()
    assert "data.source folder, 3 channels" in lines[0]
    assert "12 for training, 4 held out" in lines[1]
    assert "2: cat, dog" in lines[2]
    (torn,) = undecodable(root)
    assert torn == f"{root}/train/cat/torn.jpg: neither JPEG nor PNG"


def test_idx_files(tmp_path: Path) -> None:
    info = describe(write_idx(tmp_path, zipped=True))
    assert (info.kind, info.images, info.channels) == ("mnist", {"train": 9, "eval": 4}, 1)
    assert info.sizes == (((6, 5), 9),)
    assert "5 x 6 (9)" in info.lines()[-1]
    assert "3 training images" in info.lines()[-2]


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_arrays(tmp_path: Path, kind: str) -> None:
    path = write_arrays(tmp_path, kind, arrays())
    assert describe(path).kind == "numpy"
    assert list(undecodable(path)) == []


def test_many_classes_are_cut_short(tmp_path: Path) -> None:
    images, labels = np.zeros((300, 2, 2), np.uint8), np.arange(300)
    contents = {"train_images": images, "train_labels": labels, "eval_images": images, "eval_labels": labels}
    lines = describe(write_arrays(tmp_path, "npz", contents)).lines()
    assert lines[2].endswith("300: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...")


def test_what_a_recipe_makes() -> None:
    info = describe(Path("intel-cddnn-16"))
    assert (info.kind, info.images, info.channels) == ("frames", {"train": 4_000_000, "eval": 40_000}, 1)
    assert info.sizes == (((11, 39), 200),)
    assert info.per_class[0] > 50
    assert info.lines()[0].startswith("intel-cddnn-16: data.source frames, 1 channel")
    with refused("a recipe whose source needs a path", "data.source: "):
        describe(Path("sony-224s"))


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with refused("a folder without a data set", PATH=path):
            describe(path)
