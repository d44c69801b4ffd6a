"""Lists of files, and tables of pictures as the library `datasets` writes them, for the tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import picture

NAMES = ("cat", "dog")


def write_lists(root: Path, head: str = "path,label", label: str = "{folder}") -> Path:
    """Lists of the pictures of a folder a class."""
    for split in ("train", "val"):
        files = sorted((root / split).glob("*/*.jpg"))
        lines = [f"{file.relative_to(root)},{label.format(folder=file.parent.name)}" for file in files]
        (root / f"{split}.csv").write_text("\n".join([*([head] if head else []), *lines]) + "\n")
    return root


def table(numbers: range, image: str = "image", label: str = "label", names: Any = NAMES, **columns: Any) -> Any:
    """Pictures as structs of bytes and path, labels as ClassLabel of these names."""
    pa = pytest.importorskip("pyarrow")
    features = {label: {"names": names, "_type": "ClassLabel"}, image: {"_type": "Image"}}
    rows = [{"bytes": picture(number), "path": None} for number in numbers]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    made = pa.table({image: pa.array(rows, kind), label: pa.array([n % 2 for n in numbers], pa.int64()), **columns})
    return made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_parquet(root: Path) -> Path:
    """As the hub lays data sets out, in row groups of 4 rows."""
    pq = pytest.importorskip("pyarrow.parquet")
    (root / "data").mkdir(parents=True)
    for name, numbers in (
        ("train-00000-of-00002", range(6)),
        ("train-00001-of-00002", range(6, 12)),
        ("test-00000-of-00001", range(100, 106)),
    ):
        pq.write_table(table(numbers), root / "data" / f"{name}.parquet", row_group_size=4)
    return root


def write_arrow(root: Path) -> Path:
    """As `DatasetDict.save_to_disk` leaves it: streams."""
    pa = pytest.importorskip("pyarrow")
    for split, numbers in (("train", range(12)), ("validation", range(100, 106))):
        (root / split).mkdir(parents=True)
        made = table(numbers)
        file = pa.OSFile(str(root / split / "data-00000-of-00001.arrow"), "wb")
        with file, pa.ipc.new_stream(file, made.schema) as stream:
            stream.write_table(made, max_chunksize=5)
    return root
