"""Tar shards in real servers of S3, Google's storage and the web: slow, failing, cut short, out of date."""

import errno
import socket
from pathlib import Path

import pytest

from tests.data.buckets import KINDS, bucket, upload
from tests.data.pictures import picture
from tests.data.tars import write_indexed
from tests.faulty_server import file_server
from tests.run.runs import sets, train
from torusgd import storage
from torusgd.data.tar import open_shards
from torusgd.errors import UserError
from torusgd.storage import Store

pytestmark = pytest.mark.slow

SETTINGS = sets(
    "virtual_workers=3", "stages=[{until: 4st, images_per_worker: 4}]", "polish={images_per_batch: 5}",
    "data={source: tar, image_size: 8, resize: 10, channels: 1, mean: [0.5], std: [0.25]}",
)  # fmt: skip


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORUSGD_CACHE", str(tmp_path / "cache"))
    return write_indexed(tmp_path / "set")


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
        with pytest.raises(UserError, match="^" + kind):
            open_shards(url, 3)


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


def test_a_web_server(local: Path) -> None:
    pytest.importorskip("aiohttp")
    with file_server(local.parent) as url:
        source, _ = open_shards(Path(url) / "set", 3)
        assert [source.encoded(index) for index in (7, 3, 11)] == [picture(number) for number in (7, 3, 11)]
        with pytest.raises(UserError, match="/none/"):
            open_shards(Path(url) / "none", 3)
    with pytest.raises(UserError, match=r"^http://127"):
        open_shards(Path("http://127.0.0.1:9/x"), 3)
