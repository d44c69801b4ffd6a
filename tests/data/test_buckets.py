"""Tar shards in a bucket: in memory, and in real servers of S3, Google's storage and the web that fail as they do."""

import errno
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.data.buckets import KINDS, bucket, upload
from tests.data.pictures import folder_data, picture
from tests.data.tars import samples, write_indexed, write_tar
from tests.faulty_server import FaultyHandler, FaultyServer, file_server
from tests.messages import LIBRARY, refuses
from tests.run.runs import sets, train
from torusgd import storage
from torusgd.data import Pipeline, open_sources
from torusgd.data.registry import data_sha256, describe
from torusgd.data.tar import RemoteShards, fetch_index, open_shards
from torusgd.data.tar_index import FILE
from torusgd.errors import RunError, UserError
from torusgd.storage import Store, url_of

SETTINGS = sets(
    "virtual_workers=3", "stages=[{until: 4st, images_per_worker: 4}]", "polish={images_per_batch: 5}",
    "data={source: tar, image_size: 8, resize: 10, channels: 1, mean: [0.5], std: [0.25]}",
)  # fmt: skip


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORUSGD_CACHE", str(tmp_path / "cache"))
    return write_indexed(tmp_path / "set")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_images_come_whole_whatever_the_server_does(kind: str, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(kind, monkeypatch, http_500=8, cut=9, stale=13, slow=7) as (server, root):
        url = upload(local, f"{root}/a set")
        monkeypatch.setenv("TORUSGD_CACHE_GIB", "0")
        source, held_out = open_shards(url, 3)
        for _ in range(3):
            assert [source.encoded(index) for index in range(12)] == [picture(number) for number in range(12)]
            assert [held_out.encoded(index) for index in range(6)] == [picture(100 + number) for number in range(6)]
        assert min(server.faults[fault] for fault in ("http_500", "cut", "stale", "slow")) > 1
        with pytest.raises(UserError, match="/none/"):
            open_shards(url / "none", 3)
        with pytest.raises(UserError, match="^" + kind):
            open_shards(Path(f"{kind}://no-such-bucket/set"), 3)
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with pytest.raises(RunError, match="^" + kind):
            open_shards(url, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_a_bucket_has_the_hash_of_a_folders(kind: str, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = local.parent
    folder = train(out / "folder", "--data", local, "--workers", 1, *SETTINGS)
    with bucket(kind, monkeypatch, http_500=5, cut=7, stale=11, slow=6) as (server, root):
        url = upload(local, f"{root}/a set")
        reads = []
        for ranks in (1, 2, 3):
            summary = train(out / f"bucket {ranks}", "--data", url, "--workers", ranks, *SETTINGS)
            assert summary["weights_sha256"] == folder["weights_sha256"]
            reads.append(server.requests)
        assert reads[0] == reads[1] == reads[2], "the first run has left all images on this machine's disk"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_does_not_answer_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SECONDS", 1)
    monkeypatch.setattr(storage, "_SMALL_SECONDS", 2)
    monkeypatch.setattr(storage, "PAUSES", (0.0,))
    with bucket(kind, monkeypatch) as (_, url), socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = Store(f"{url}/run")
        for ask in (store.sizes, lambda: store.create("lock", b""), lambda: store.write("lock", b"")):
            with pytest.raises(OSError, match=rf"{kind}://") as caught:
                ask()
            assert caught.value.errno == errno.EIO
            assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_web_server(local: Path) -> None:
    pytest.importorskip("aiohttp")
    with file_server(local.parent) as url:
        source, _ = open_shards(Path(url) / "set", 3)
        assert [source.encoded(index) for index in (7, 3, 11)] == [picture(number) for number in (7, 3, 11)]
        with pytest.raises(UserError, match="/none/"):
            open_shards(Path(url) / "none", 3)
    with pytest.raises(RunError, match=r"^http://127"):
        open_shards(Path("http://127.0.0.1:9/x"), 3)
    with file_server(local.parent, ranges=False) as url:
        source, _ = open_shards(Path(url) / "set", 3)
        with pytest.raises(UserError, match="the server ignores Range"):
            source.encoded(0)


def test_a_web_server_that_fails_does_not_lack_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0))
    (tmp_path / "x").touch()
    with file_server(tmp_path, http_500=1) as url:
        refuses("a web server that fails", Store(url).size, "x", kind=OSError, URL=url)
    with file_server(tmp_path) as url:
        refuses("a web server without the file", Store(url).size, "y", kind=FileNotFoundError, URL=url)


@pytest.mark.parametrize("scheme", ["http", "gs"])
def test_a_server_behind_a_proxy_is_reached_by_it(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs" if scheme == "gs" else "aiohttp")
    monkeypatch.setattr(storage, "PAUSES", ())
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://far.invalid")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    there = {"http": "http:/far.invalid/set/x", "gs": "http:/far.invalid/storage/v1/b/set/o/x"}[scheme]
    (tmp_path / there).parent.mkdir(parents=True)  # a proxy is asked for whole URLs
    (tmp_path / there).write_bytes(b'{"size": "10", "name": "x", "bucket": "set"}')
    with file_server(tmp_path) as url:
        monkeypatch.setenv("http_proxy", url)
        assert Store({"http": "http://far.invalid/set", "gs": "gs://set"}[scheme]).size("x") in (10, 44)


class _Odd(FaultyHandler):
    """A web server of which each address is strange in another way."""

    def do_GET(self) -> None:
        if self.path == "/trickles":
            self.send_response(206)
            self.send_header("Content-Length", "100")
            self.end_headers()
            pieces, pause = [b"x"] * 100, 0.1
        else:  # sends a whole file of 256 MiB
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            pieces, pause = [bytes(1 << 16)] * (1 << 12), 0.0
        with suppress(OSError):
            for piece in pieces:
                self.wfile.write(piece)
                self.server.requests += 1
                time.sleep(pause)

    def do_HEAD(self) -> None:
        if "?" in self.path:
            self.answer(200, b"x", {"ETag": "one"})
        else:
            self.server.requests += 1
            self.answer(302, b"", {"Location": f"{self.path}?signed={self.server.requests}"})


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(storage, "PAUSES", ())
    with FaultyServer(_Odd, {}).at_work() as server:
        yield server


def test_of_a_server_that_ignores_ranges_no_more_is_read_than_the_part(odd: FaultyServer) -> None:
    refuses("a web server without ranges", Store(odd.url).read, "whole", 10, 20, URL=odd.url)
    assert odd.requests < 1 << 11


def test_a_read_that_trickles_ends(odd: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SMALL_SECONDS", 0.5)
    store = Store(odd.url)
    for part in ((), (0, 100)):
        with pytest.raises(OSError, match="/trickles"):
            store.read("trickles", *part)


def test_a_version_does_not_change_with_where_a_server_redirects_to(odd: FaultyServer) -> None:
    assert Store(odd.url).version("index") == Store(odd.url).version("index")


def test_names_in_the_web_may_have_what_urls_are_made_of(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "a folder").mkdir()
    name = "a folder/1#2?3%41.tar"
    (tmp_path / name).write_bytes(b"0123456789")
    with file_server(tmp_path) as url:
        store = Store(url)
        store.get(name, tmp_path / "copy")
        assert (store.read(name, 2, 5), store.size(name), (tmp_path / "copy").stat().st_size) == (b"234", 10, 10)


URL = Path("memory://bucket/a set")


@pytest.fixture
def copied(memory_bucket: None, local: Path) -> Path:
    """The folder of which a bucket has a copy, fsspec's in memory, which is no server."""
    upload(local, "memory://bucket/a set")
    return local


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read from the bucket."""
    names, read = list[str](), Store.read

    def counted(self: Store, name: str, *place: Any) -> bytes:
        names.append(name)
        return read(self, name, *place)

    monkeypatch.setattr(Store, "read", counted)
    return names


def test_a_bucket_gives_the_same_batches_as_the_folder(copied: Path) -> None:
    assert (url_of(Path("s3://b/x y")), url_of(Path("https://host:8000/x"))) == ("s3://b/x y", "https://host:8000/x")
    assert [url_of(each) for each in (None, Path("s3/x"), Path("c:/x"), Path("/s3:/x"))] == [None] * 4
    data = folder_data(source="tar")
    pairs = [open_sources(data, path, 0) for path in (copied, URL)]
    assert data_sha256(*pairs[0]) == data_sha256(*pairs[1])
    indices, epochs = np.array([3, 11, 0, 7]), np.array([0, 0, 1, 1])
    one, other = (Pipeline(train, data, 0).training_batch(indices, epochs, augment=True) for train, _ in pairs)
    assert one.images.equal(other.images)
    assert pairs[1][1].read(4).shape == pairs[0][1].read(4).shape
    assert describe(URL)[:2] == [
        "memory://bucket/a set: data.source tar, 3 channels",
        "images    12 for training, 6 held out",
    ]


def test_what_was_read_is_kept_on_disk_for_all_processes(copied: Path, reads: list[str], tmp_path: Path) -> None:
    train, _ = open_shards(URL, 3)
    assert isinstance(train, RemoteShards)
    (sums,) = tmp_path.glob("cache/*/train/checksums")
    assert sums.stat().st_blocks, "no hole, into which a full disk lets no one write"
    train.expect(np.arange(6))
    again, _ = open_shards(URL, 3)
    for each in (train, again):
        assert [each.encoded(index) for index in range(8)] == [picture(number) for number in range(8)]
        assert len(reads) == 8
    (kept,) = tmp_path.glob("cache/*/train/0.tar")
    kept.write_bytes(bytes(kept.stat().st_size))  # a disk that lost what was on it
    assert (again.encoded(2), len(reads)) == (picture(2), 9)
    kept.unlink()
    assert again.encoded(3) == picture(3)


def test_the_cache_is_bounded(copied: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    refuses("a cache of much", open_shards, URL, 3, TMP=tmp_path)
    monkeypatch.setenv("TORUSGD_CACHE_GIB", "1")
    monkeypatch.setenv("TORUSGD_CACHE", "/dev/null")
    with pytest.raises(UserError):
        open_shards(URL, 3)


def test_reads_that_fail_come_short_or_are_stale(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    refuses("a shard in a bucket that fails", train.encoded, 5, kind=OSError)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "find", Mock(side_effect=RuntimeError("503 Slow Down")))
        refuses("a bucket of shards that fails", open_shards, URL, 3, kind=RunError)
    faults[:] = ["stale"] * 4
    refuses("a shard in a bucket that stays stale", train.encoded, 5)


def test_names_are_names_and_the_sign_of_a_folder_is_none(memory_bucket: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    pytest.importorskip("s3fs")
    for name in ("a::b", "a?versionId=3", "a#b"):  # to fsspec, in a URL, a chain of stores and versions
        store = Store(f"s3://bucket/{name}")
        assert (store._root, store._files.version_aware) == (f"bucket/{name}", False)
    found = {"/bucket/a": {"size": 0}, "/bucket/a/": {"size": 0}, "/bucket/a/x": {"size": 1}, "/bucket/ab": {"size": 1}}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *each, **more: found)
    assert Store("memory://bucket/a").sizes() == {"x": 1}, "a console makes an empty object for a folder"


def test_a_damaged_copy_of_the_index_is_fetched_again(copied: Path) -> None:
    fetch_index(Store("memory://bucket/a set")).write_bytes(b"damaged")
    assert len(open_shards(URL, 3)[0]) == 12
    (copied / FILE).write_bytes(b"damaged")
    upload(copied, "memory://bucket/a set")
    refuses("a damaged index in a bucket", open_shards, URL, 3, FILE=re.compile(r"^.*/cache/\w+"), REASON=LIBRARY)


def test_mistakes_are_one_line(copied: Path, mistake: Any) -> None:
    write_tar(copied / "train-0001.tar", samples(range(2)))
    upload(copied, "memory://bucket/a set")
    refuses("a shard in a bucket that was changed", open_shards, URL, 3)
    Store("memory://bucket/a set").delete("val-0000.tar")
    with pytest.raises(UserError):
        open_shards(URL, 3)
    refuses("a bucket without an index", open_shards, Path("memory://bucket/none"), 3)
    mistake("train", "folder", "--data", "memory://bucket/a set", "--out", copied / "run", TMP=copied)


@pytest.mark.parametrize(("url", "package"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs")])
def test_a_missing_package_is_one_line(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(registry, "_registry", {})  # of those imported already
    monkeypatch.setattr(registry, "registry", registry._registry)
    refuses(f"a bucket without {package}", Store, url, REASON=re.compile(r"\([^()]*\)(?=;)"))
