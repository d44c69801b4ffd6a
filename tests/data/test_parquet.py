"""Pictures in Parquet and Arrow files."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import folder_data, picture
from tests.data.tables import table, write_arrow, write_parquet
from tests.messages import refused
from torusgd.data import CorruptImage, open_sources, parquet
from torusgd.data.parquet import open_tables
from torusgd.data.registry import data_sha256, describe
from torusgd.data.tar import open_shards
from torusgd.errors import UserError

pytestmark = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")


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
    with refused("tables that are too large", TMP=tmp_path):
        open_sources(folder_data(source="parquet"), tmp_path / "set", 0)
    train, _ = open_tables(tmp_path / "set", 3)
    for index in (0, 11, 4, 0, 11):
        assert train.encoded(index) == picture(index)
        assert sum(train._parts[each].size for each in train._cached) <= 20_000
    assert run_cli("data", "pack", tmp_path / "set", tmp_path / "out")[0] == 0
    packed, _ = open_shards(tmp_path / "out", 3)
    assert [packed.encoded(index) for index in range(12)] == [picture(number) for number in range(12)]


def write_one(root: Path, made: Any) -> Path:
    import pyarrow.parquet as pq

    root.mkdir(exist_ok=True)
    for split in ("train", "val"):
        pq.write_table(made, root / f"{split}.parquet")
    return root


def test_columns_are_found_or_given(tmp_path: Path) -> None:
    root = write_one(tmp_path / "a", table(range(4), "pixels", "fine", coarse=[0, 0, 1, 1], depth=[b"a"] * 4))
    assert open_tables(root, 3, image="pixels", label="fine")[0].classes == ("cat", "dog")
    assert open_tables(root, 3, image="pixels", label="coarse")[0].classes == ("0", "1")
    for name, columns in {
        "a table with several columns of bytes": {},
        "a table with several columns of numbers": {"image": "pixels"},
        "a column of bytes as labels": {"image": "pixels", "label": "pixels"},
        "a column with a typing error": {"image": "pixels", "label": "fin"},
    }.items():
        with refused(name, TMP=tmp_path):
            open_tables(root, 3, **columns)
    only = write_one(tmp_path / "b", table(range(4), "pixels", "kind"))
    assert len(open_tables(only, 3)[0]) == 4


def test_images_that_are_not_there(tmp_path: Path) -> None:
    import pyarrow as pa

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": None, "path": "x.jpg"}, {"bytes": picture(1), "path": None}]
    train, _ = open_tables(write_one(tmp_path, pa.table({"image": pa.array(rows, kind), "label": ["a", "b"]})), 3)
    assert train.classes == ("a", "b")
    with refused("a row without an image", kind=CorruptImage, TMP=tmp_path):
        train.read(0)
    train.read(1)
    train, _ = open_tables(write_one(tmp_path, pa.table({"image": pa.array(rows[:1], kind), "label": ["a"]})), 3)
    with refused("a table of names of images", TMP=tmp_path):
        train.read(0)


@pytest.mark.parametrize(("suffix", "write"), [(".parquet", write_parquet), (".arrow", write_arrow)])
def test_damaged_tables_are_refused(tmp_path: Path, suffix: str, write: Any) -> None:
    (file,) = (file for file in write(tmp_path).rglob(f"*-00000-of-00001{suffix}") if "validation" not in str(file))
    whole = file.read_bytes()
    for damaged in (b"", b"text" * 50, whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        with refused("a damaged table", FILE=file, REASON=re.compile(r"(?<=table: ).*")):
            open_tables(tmp_path, 3)
    file.unlink()
    with refused(f"tables of one split{suffix}", TMP=tmp_path):
        open_tables(tmp_path, 3)
    # A damaged page is found when its rows are read.
    root = write_one(tmp_path / "one", table(range(4), "image", "label"))
    assert open_tables(root, 3)[0].encoded(0)
    whole = (root / "train.parquet").read_bytes()
    (root / "train.parquet").write_bytes(whole[:4] + b"\xff" * 30 + whole[34:])
    train, _ = open_tables(root, 3)  # labels are whole
    with pytest.raises(UserError, match=r"train\.parquet: row group 0 can't be read: \S+"):
        train.encoded(0)
