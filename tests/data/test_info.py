import re
from pathlib import Path

import numpy as np

from tests.data.pictures import encoded, photo, write_folder
from tests.data.test_files import write_arrays, write_idx
from tests.messages import refused
from torusgd.data.registry import describe, undecodable


def test_a_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path, train=5, val=2)
    (root / "train" / "cat" / "wide.png").write_bytes(encoded(photo(20, 90), "PNG"))
    (root / "train" / "cat" / "torn.jpg").write_text("torn")
    lines = describe(root)
    assert "data.source folder, 3 channels" in lines[0]
    assert "12 for training, 4 held out" in lines[1]
    assert "2: cat, dog" in lines[2]
    assert "5 to 7 training images" in lines[3]
    assert re.fullmatch(r"sizes     (\d+ x \d+ \(1\), ){5}and 6 other sizes \(width x height, of 12 .*", lines[4])
    (torn,) = undecodable(root)
    assert torn == f"{root}/train/cat/torn.jpg: neither JPEG nor PNG"


def test_idx_files_and_arrays_of_many_classes(tmp_path: Path) -> None:
    lines = describe(write_idx(tmp_path, zipped=True))
    assert "data.source mnist, 1 channel" in lines[0]
    assert "9 for training, 4 held out" in lines[1]
    assert "3 training images" in lines[3]
    assert lines[4].startswith("sizes     5 x 6 (9) ")
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
