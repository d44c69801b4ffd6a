"""Tar shards in a bucket: here fsspec's in memory, which is no server; tests/data/test_buckets.py has real ones."""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")

from tests.data.buckets import upload
from tests.data.pictures import folder_data, picture
from tests.data.tars import samples, write_indexed, write_tar
from tests.messages import refused
from torusgd.data import Pipeline, open_sources
from torusgd.data.registry import data_sha256, describe
from torusgd.data.tar import RemoteShards, open_shards
from torusgd.errors import UserError
from torusgd.storage import Store, url_of

URL = Path("memory://bucket/a set")


@pytest.fixture
def local(memory_bucket: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of which the bucket has a copy."""
    monkeypatch.setenv("TORUSGD_CACHE", str(tmp_path / "cache"))
    upload(write_indexed(tmp_path / "set"), "memory://bucket/a set")
    return tmp_path / "set"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read from the bucket."""
    names, read = list[str](), Store.read

    def counted(self: Store, name: str, *place: Any) -> bytes:
        names.append(name)
        return read(self, name, *place)

    monkeypatch.setattr(Store, "read", counted)
    return names


def test_a_bucket_gives_the_same_batches_as_the_folder(local: Path) -> None:
    assert url_of(Path("s3://b/x y")) == "s3://b/x y"
    assert url_of(Path("https://host:8000/x")) == "https://host:8000/x"
    assert [url_of(each) for each in (None, Path("s3/x"), Path("c:/x"), Path("/s3:/x"))] == [None] * 4
    data = folder_data(source="tar")
    pairs = [open_sources(data, path, 0) for path in (local, URL)]
    assert data_sha256(*pairs[0]) == data_sha256(*pairs[1])
    indices, epochs = np.array([3, 11, 0, 7]), np.array([0, 0, 1, 1])
    one, other = (Pipeline(train, data, 0).training_batch(indices, epochs, augment=True) for train, _ in pairs)
    assert one.images.equal(other.images)
    assert pairs[1][1].read(4).shape == pairs[0][1].read(4).shape
    assert describe(URL)[1] == "images    12 for training, 6 held out"


def test_what_was_read_is_kept_on_disk_for_all_processes(local: Path, reads: list[str], tmp_path: Path) -> None:
    train, _ = open_shards(URL, 3)
    assert isinstance(train, RemoteShards)
    train.expect(np.arange(6))
    again, _ = open_shards(URL, 3)
    for each in (train, again):
        assert [each.encoded(index) for index in range(8)] == [picture(number) for number in range(8)]
        assert len(reads) == 8
    (kept,) = tmp_path.glob("cache/*/train/0.tar")
    kept.write_bytes(bytes(kept.stat().st_size))  # a disk that lost what was on it
    assert again.encoded(2) == picture(2)
    assert len(reads) == 9
    kept.unlink()
    assert again.encoded(3) == picture(3)


def test_the_cache_is_bounded(local: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for gib, most in (("0", 0), ("0.000002", 1)):
        monkeypatch.setenv("TORUSGD_CACHE_GIB", gib)
        monkeypatch.setattr("torusgd.data.tar._COUNT_EVERY", 1)
        for _ in range(2):
            train, _ = open_shards(URL, 3)
            for index in range(6):
                assert train.encoded(index) == picture(index)
        kept = [np.fromfile(file, np.uint32) for file in tmp_path.glob("cache/*/train/checksums")]
        assert sum(int((each != 0).sum()) for each in kept) in range(most, 3)
    assert len(reads) in range(20, 24)
    monkeypatch.setenv("TORUSGD_CACHE_GIB", "much")
    with refused("a cache of much", TMP=tmp_path):
        open_shards(URL, 3)
    monkeypatch.setenv("TORUSGD_CACHE_GIB", "1")
    monkeypatch.setenv("TORUSGD_CACHE", "/dev/null")
    with pytest.raises(UserError):
        open_shards(URL, 3)


def test_reads_that_fail_come_short_or_are_stale(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    train, _ = open_shards(URL, 3)
    cat, faults = MemoryFileSystem.cat_file, list[str]()

    def faulty(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        fault = faults.pop() if faults else ""
        if fault == "fails":
            raise RuntimeError("500 Internal Server Error")
        data: bytes = cat(self, path, start=start, end=end, **more)
        return data[: len(data) // 2] if fault == "short" else bytes(len(data)) if fault == "stale" else data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", faulty)
    for index, planned in enumerate((["fails"], ["short", "fails"], ["stale"] * 3)):
        faults[:] = planned
        assert train.encoded(index) == picture(index)
        assert not faults
    faults[:] = ["fails"] * 3
    with refused("a shard in a bucket that fails", kind=OSError):
        train.encoded(5)
    faults[:] = ["stale"] * 4
    with refused("a shard in a bucket that stays stale"):
        train.encoded(5)


def test_mistakes_are_one_line(local: Path, mistake: Any) -> None:
    write_tar(local / "train-0001.tar", samples(range(2)))
    upload(local, "memory://bucket/a set")
    with refused("a shard in a bucket that was changed"):
        open_shards(URL, 3)
    Store("memory://bucket/a set").delete("val-0000.tar")
    with pytest.raises(UserError):
        open_shards(URL, 3)
    with refused("a bucket without an index"):
        open_shards(Path("memory://bucket/none"), 3)
    mistake("train", "folder", "--data", "memory://bucket/a set", "--out", local / "run", TMP=local)


@pytest.mark.parametrize(("url", "package"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs")])
def test_a_missing_package_is_one_line(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = import_module("fsspec.registry")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(registry, "_registry", {})  # of those imported already
    monkeypatch.setattr(registry, "registry", registry._registry)
    with refused(f"a bucket without {package}", REASON=re.compile(r"\([^()]*\)(?=;)")):
        Store(url)
