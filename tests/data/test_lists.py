"""Lists of picture files, and several folders at once."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import encoded, folder_data, photo, write_folder
from tests.data.tables import write_lists
from tests.messages import refused
from torusgd.data import CorruptImage, open_sources
from torusgd.data.pictures import open_csv, open_folders
from torusgd.data.registry import data_sha256, describe


@pytest.mark.parametrize("head", ["path,label", "ID,Label,File_name", "", "\ufeffimage, target"])
def test_lists_with_and_without_a_head(tmp_path: Path, head: str) -> None:
    root = write_lists(write_folder(tmp_path / "a set"), head)
    if head.startswith("ID"):
        for split in ("train", "val"):
            lines = (root / f"{split}.csv").read_text().splitlines()[1:]
            swapped = [",".join(["7", *line.split(",")[::-1]]) for line in lines]
            (root / f"{split}.csv").write_text("\n".join([head, "", *swapped]))
    train, held_out = open_sources(folder_data(source="csv"), root, 0)
    assert (train.classes, train.labels.tolist(), len(held_out)) == (("cat", "dog"), [0] * 6 + [1] * 6, 8)
    assert train.read(7).shape[2] == 3
    assert "data.source csv" in describe(root)[0]


def test_numbers_names_absolute_paths_and_other_files(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    (root / "my.tsv").write_text(f"{root}/train/cat/000.jpg\t1\ntrain/dog/001.jpg\t0\n")
    (root / "held out.csv").write_text("val/cat/000.jpg,1\n")
    (root / "names").write_text("dog\ncat\n")
    data = folder_data(source="csv", options={"train": "my.tsv", "eval": "held out.csv", "classes": "names"})
    train, held_out = open_sources(data, root, 0)
    assert (train.classes, train.labels.tolist(), held_out.labels.tolist()) == (("dog", "cat"), [1, 0], [1])
    train.read(0)
    assert open_csv(root, 3, train="my.tsv", eval="held out.csv")[0].classes == ("0", "1")


WRONG = {
    "no label": "path,label\na.jpg\n",
    "an empty label": "a.jpg,\n",
    "nothing": "",
    "another class": "a.jpg,bird\n",
    "a NUL": "\x00,1\n",
    "a field without an end": '"' + "x" * 200_000 + '",cat\n',
}


def test_wrong_lists_are_refused(tmp_path: Path, mistake: Any) -> None:
    root = write_lists(write_folder(tmp_path / "a set"))
    (root / "classes").write_text("cat\ndog\n")
    listed, held_out = root / "train.csv", root / "val.csv"
    whole = listed.read_text()
    for name, text in WRONG.items():
        listed.write_text(text)
        with refused(f"a list of pictures with {name}", TMP=root):
            open_sources(folder_data(source="csv", options={"classes": "classes"}), root, 0)
    listed.write_text("a\n")
    mistake("train", "folder", "--set", "data.source=csv", "--data", root, "--out", tmp_path / "run", TMP=tmp_path)
    listed.write_text(whole)
    held_out.write_bytes(b"\xff\xfe\xfa")
    with refused("a list of pictures in bytes", TMP=root):
        open_csv(root, 3)
    held_out.unlink()
    with refused("no list of pictures", TMP=root):
        open_csv(root, 3)
    held_out.write_text("gone.jpg,cat\n")
    with refused("a listed picture that is gone", TMP=root):
        data_sha256(*open_csv(root, 3))
    os.mkfifo(root / "pipe")
    listed.write_text("pipe,cat\n/dev/zero,dog\n")
    for index in range(2):
        with pytest.raises(CorruptImage):
            open_csv(root, 3)[0].read(index)


def test_several_folders_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "sets" / "one", train=2, val=1)
    write_folder(tmp_path / "elsewhere", train=3, val=1, classes=("dog", "emu"))
    (tmp_path / "sets" / "two").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "sets" / "notes").mkdir()
    train, held_out = open_folders(tmp_path / "sets", 3)
    assert train.labels.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert (train.classes, held_out.labels.tolist()) == (("cat", "dog", "emu"), [0, 1, 1, 2])
    assert train.encoded(4) == (tmp_path / "elsewhere" / "train" / "dog" / "000.jpg").read_bytes()
    assert "data.source folders" in describe(tmp_path / "sets")[0]
    yak = tmp_path / "elsewhere" / "val" / "yak"
    yak.mkdir()
    (yak / "1.jpg").write_bytes(encoded(photo(9, 9)))
    with refused("a held-out class without training images", TMP=tmp_path):
        open_folders(tmp_path / "sets", 3)
    with refused("no set of folders", TMP=tmp_path):
        open_folders(tmp_path / "sets" / "one", 3)
