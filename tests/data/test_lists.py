"""Lists of picture files, several folders at once, and pictures in Parquet and Arrow files."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import encoded, folder_data, photo, picture, write_folder
from tests.data.tables import table, write_arrow, write_lists, write_parquet
from tests.messages import refused, refuses
from torusgd.data import CorruptImage, open_sources, parquet
from torusgd.data.parquet import open_tables
from torusgd.data.pictures import open_csv, open_folders
from torusgd.data.registry import data_sha256, describe
from torusgd.data.tar import open_shards
from torusgd.errors import UserError


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
    (root / "names").write_text("1\n0\n")  # the order of another program's outputs: the images of which are called 1?
    lists = {"train": "my.tsv", "eval": "held out.csv", "classes": "names"}
    refuses("numbers that a list has too", open_csv, root, 3, **lists, TMP=tmp_path)


WRONG = {
    "no label": "path,label\na.jpg\n", "an empty label": "a.jpg,\n", "nothing": "", "another class": "a.jpg,bird\n",
    "a head of other words": "id,breed\na.jpg,cat\n", "half a head": "image_id,label\na.jpg,1\n",
    "a NUL": "\x00,1\n", "a field without an end": '"' + "x" * 200_000 + '",cat\n',
}  # fmt: skip


def test_wrong_lists_are_refused(tmp_path: Path, mistake: Any) -> None:
    root = write_lists(write_folder(tmp_path / "a set"))
    (root / "classes").write_text("cat\ndog\n")
    listed, held_out = root / "train.csv", root / "val.csv"
    whole = listed.read_text()
    for name, text in WRONG.items():
        listed.write_text(text)
        with refused(f"a list of pictures with {name}", TMP=root):
            open_sources(folder_data(source="csv", options={"classes": "classes"}), root, 0)
    listed.write_text("a.jpg,0\nb.jpg,-1\nc.jpg,10\n")
    refuses("a list of pictures with a label below 0", open_csv, root, 3, eval="train.csv", TMP=root)
    listed.write_text("a\n")
    mistake("train", "folder", "--set", "data.source=csv", "--data", root, "--out", tmp_path / "run", TMP=tmp_path)
    listed.write_text(whole)
    held_out.write_bytes(b"\xff\xfe\xfa")
    refuses("a list of pictures in bytes", open_csv, root, 3, TMP=root)
    held_out.unlink()
    refuses("no list of pictures", open_csv, root, 3, TMP=root)
    held_out.write_text("gone.jpg,cat\n")
    refuses("a listed picture that is gone", data_sha256, *open_csv(root, 3), TMP=root)
    os.mkfifo(root / "pipe")
    listed.write_text("pipe,cat\n/dev/zero,dog\n")
    for index in range(2):
        with pytest.raises(CorruptImage):
            open_csv(root, 3)[0].read(index)


def test_paths_start_from_their_lists_folder(tmp_path: Path) -> None:
    write_folder(tmp_path)  # of the same names, seen from the data set's folder
    root = write_folder(tmp_path / "lists", train=1, val=1, classes=("cat",))
    for split in ("train", "val"):
        (root / f"{split}.csv").write_text(f"{split}/cat/000.jpg,cat\n")
    for each in open_csv(tmp_path, 3, train="lists/train.csv", eval="lists/val.csv"):
        assert Path(each.where(0)).is_relative_to(root)


def test_another_source_is_named_if_the_layout_is_its(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a.jpg,cat\n")
    refuses("a folder of lists as class folders", open_sources, folder_data(), tmp_path, 0, TMP=tmp_path)


def test_a_listed_file_that_is_missing_is_named(tmp_path: Path, run_cli: Any) -> None:
    root = write_lists(write_folder(tmp_path / "a set"))
    lost = root / "train/dog/001.jpg"
    lost.unlink()
    for reason in ("No such file or directory", "Is a directory"):
        code, out, _ = run_cli("data", "info", str(root), "--check")
        assert code == 0
        assert f"missing   1 of them, the first {lost}; --check names all\n" in out
        assert f"undecodable: {lost}: {reason}\nundecodable images: 1\n" in out
        lost.mkdir(exist_ok=True)


def test_several_folders_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "numbered" / "one", train=1, val=1, classes=("1", "01", "7"))
    assert open_folders(tmp_path / "numbered", 3)[0].classes == ("01", "1", "7")
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
    refuses("a held-out class without training images", open_folders, tmp_path / "sets", 3, TMP=tmp_path)
    refuses("no set of folders", open_folders, tmp_path / "sets" / "one", 3, TMP=tmp_path)


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_rows_in_any_order(tmp_path: Path, write: Any) -> None:
    train, held_out = open_sources(folder_data(source="parquet"), write(tmp_path), 0)
    assert (train.classes, train.labels.tolist()) == (("cat", "dog"), [number % 2 for number in range(12)])
    assert isinstance(train, parquet.TableImages)
    assert [train.encoded(index) for index in (11, 0, 5, 6, 3)] == [picture(number) for number in (11, 0, 5, 6, 3)]
    assert held_out.read(5).shape[2] == 3
    head, images, *_ = describe(tmp_path)
    assert "data.source parquet" in head
    assert images == "images    12 for training, 6 held out"
    assert data_sha256(train, held_out) == data_sha256(*open_tables(tmp_path, 3))


def test_row_groups_are_cached_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Any) -> None:
    write_parquet(tmp_path / "set")
    monkeypatch.setattr(parquet, "MOST_CACHED", 20_000)
    refuses("tables that are too large", open_sources, folder_data(source="parquet"), tmp_path / "set", 0, TMP=tmp_path)
    train, _ = open_tables(tmp_path / "set", 3)
    for index in (0, 11, 4, 0, 11):
        assert train.encoded(index) == picture(index)
        assert sum(train._parts[each].size for each in train._cached) <= 20_000
    assert run_cli("data", "pack", tmp_path / "set", tmp_path / "out")[0] == 0
    packed, _ = open_shards(tmp_path / "out", 3)
    assert [packed.encoded(index) for index in range(12)] == [picture(number) for number in range(12)]


def write_one(root: Path, made: Any, *splits: str, **options: Any) -> Path:
    pq = pytest.importorskip("pyarrow.parquet")
    root.mkdir(exist_ok=True)
    for split in splits or ("train", "val"):
        pq.write_table(made, root / f"{split}.parquet", **options)
    return root


def test_columns_are_found_or_given(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    root = write_one(tmp_path / "a", table(range(4), "pixels", "fine", coarse=[0, 0, 1, 1], depth=[b"a"] * 4))
    assert open_tables(root, 3, image="pixels", label="fine")[0].classes == ("cat", "dog")
    assert open_tables(root, 3, image="pixels", label="coarse")[0].classes == ("0", "1")
    words = write_one(tmp_path / "words", table(range(4)).set_column(1, "label", [["dog", "cat", "dog", "cat"]]))
    assert open_tables(words, 3)[0].labels.tolist() == [1, 0, 1, 0]  # names where the schema speaks of numbers
    kinds = pa.array(["dog", "cat", "dog", "cat"]).dictionary_encode()
    categories = table(range(4)).set_column(1, "label", kinds)
    assert open_tables(write_one(tmp_path / "categories", categories), 3)[0].labels.tolist() == [1, 0, 1, 0]
    for name, columns in {
        "a table with several columns of bytes": {},
        "a table with several columns of numbers": {"image": "pixels"},
        "a column of bytes as labels": {"image": "pixels", "label": "pixels"},
        "a column with a typing error": {"image": "pixels", "label": "fin"},
    }.items():
        refuses(name, open_tables, root, 3, **columns, TMP=tmp_path)
    holes = write_one(tmp_path / "holes", table(range(4), "pixels", "kind", target=[0, None, 1, 1]))
    refuses("a row without a label", open_tables, holes, 3, label="target", TMP=tmp_path)
    assert len(open_tables(write_one(tmp_path / "b", table(range(4), "pixels", "kind")), 3)[0]) == 4


def test_each_file_has_its_own_numbers_of_the_classes_and_all_have_the_columns(tmp_path: Path) -> None:
    root = write_one(tmp_path, table(range(4)))
    write_one(tmp_path, table(range(4), names=("dog", "cat")), "val")
    train, held_out = open_tables(root, 3)
    assert (train.classes, held_out.classes) == (("cat", "dog"), ("cat", "dog"))
    assert (train.labels.tolist(), held_out.labels.tolist()) == ([0, 1, 0, 1], [1, 0, 1, 0])
    for name, made in {
        "a table with a class of its own": table(range(4), names=("yak", "cat")),
        "a table with more labels than names": table(range(4), names=("cat",)),
        "a later table without the column": table(range(4), "img"),
        "a later table with names of images": table(range(4)).set_column(0, "image", [["1.jpg"] * 4]),
    }.items():
        write_one(tmp_path, made, "val")
        refuses(name, open_tables, root, 3, TMP=tmp_path)


def test_images_that_are_not_there(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": None, "path": "x.jpg"}, {"bytes": picture(1), "path": None}]
    made = pa.table({"image": pa.array(rows, kind), "label": ["a", "b"]})
    train, _ = open_tables(write_one(tmp_path, made, row_group_size=1), 3)
    assert train.classes == ("a", "b")
    refuses("a row without an image", train.read, 0, kind=CorruptImage, TMP=tmp_path)
    train.read(1)
    refuses("a table of names of images", open_tables, write_one(tmp_path, made[:1]), 3, TMP=tmp_path)
    for split in ("train", "val"):
        (tmp_path / f"{split}.parquet").unlink()
        with pa.ipc.new_stream(str(tmp_path / f"{split}.arrow"), made.schema) as stream:
            stream.write_table(made[:1])
    refuses("a mapped table of names of images", open_tables, tmp_path, 3, TMP=tmp_path)


@pytest.mark.parametrize(("suffix", "write"), [(".parquet", write_parquet), (".arrow", write_arrow)])
def test_damaged_tables_are_refused(tmp_path: Path, suffix: str, write: Any) -> None:
    (file,) = (file for file in write(tmp_path).rglob(f"*-00000-of-00001{suffix}") if "validation" not in str(file))
    whole = file.read_bytes()
    for damaged in (b"", b"text" * 50, whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        refuses("a damaged table", open_tables, tmp_path, 3, FILE=file, REASON=re.compile(r"(?<=table: ).*"))
    file.unlink()
    refuses(f"tables of one split{suffix}", open_tables, tmp_path, 3, TMP=tmp_path)
    # A damaged page is found when its rows are read.
    root = write_one(tmp_path / "one", table(range(4), "image", "label"))
    assert open_tables(root, 3)[0].encoded(0)
    whole = (root / "train.parquet").read_bytes()
    (root / "train.parquet").write_bytes(whole[:4] + b"\xff" * 30 + whole[34:])
    train, _ = open_tables(root, 3)  # labels are whole
    with pytest.raises(UserError, match=r"train\.parquet: row group 0 can't be read: \S+"):
        train.encoded(0)
