"""Buckets in real servers on loopback, by the scheme of their URLs, which fail now and then as networks do."""

import base64
import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.faulty_server import FaultyHandler, FaultyServer
from torusgd.storage import Store

KINDS = ("s3", "gs")


@contextmanager
def bucket(kind: str, monkeypatch: pytest.MonkeyPatch, **every: int) -> Iterator[tuple[Any, str]]:
    """A server (`FaultyServer`) of one of `KINDS`, to which the environment leads, and its bucket's URL."""
    for package in ("s3fs", "moto") if kind == "s3" else ("gcsfs",):
        if find_spec(package) is None:  # not imported: gcsfs reads the environment then
            pytest.skip(f"needs {package}")
    with (s3_server if kind == "s3" else gcs_server)(**every) as (server, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield server, f"{kind}://{BUCKET}"


def upload(folder: Path, url: str) -> Path:
    """Puts the files of a folder below a URL; returns that."""
    for file in folder.iterdir():
        Store(url).put(file, file.name)
    return Path(url)


BUCKET = "images"


class Gcs(FaultyServer):
    """One bucket of Google's storage, as gcsfs asks for it; some reads of tar files and weights go wrong.

    Unlike the emulators that packages bring it keeps the condition ifGenerationMatch=0 of a write.
    """

    def __init__(self, every: dict[str, int]) -> None:
        super().__init__(_GcsHandler, every)
        self.objects: dict[str, tuple[bytes, int, str]] = {}  # bytes, generation, and when it was written
        self.generation = 0

    def store(self, name: str, data: bytes, query: dict[str, str]) -> bool:
        """Makes or replaces an object; False where the write's condition doesn't hold."""
        with self.lock:
            if query.get("ifGenerationMatch") == "0" and name in self.objects:
                return False
            self.generation += 1
            self.objects[name] = data, self.generation, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
            return True


class _GcsHandler(FaultyHandler):
    server: Gcs

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = self.body()
        found = re.fullmatch(rf"(/upload|/download)?/storage/v1/b/{BUCKET}/o(?:/(.+))?", url.path)
        if found is None:
            self.answer_json(404, {})
        elif found[1] == "/upload":
            self._upload(query, body)
        elif found[2] is None:
            self._list(query)
        else:
            self._object(unquote(found[2]), is_read=found[1] == "/download" or query.get("alt") == "media")

    do_GET = do_PUT = do_POST = do_DELETE = _handle

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        """In one piece, as of all that tests write."""
        _, about, rest = body.split(b"--==0==", 2)
        name = json.loads(about.partition(b"\n\n")[2])["name"]
        if self.server.store(name, rest.partition(b"\n\n")[2].removesuffix(b"\n--==0==--"), query):
            self.answer_json(200, self._about(name))
        else:
            self.answer_json(412, {"error": {"code": 412, "message": "conditionNotMet"}})

    def _list(self, query: dict[str, str]) -> None:
        names = [name for name in sorted(self.server.objects) if name.startswith(query.get("prefix", ""))]
        self.answer_json(200, {"kind": "storage#objects", "items": [self._about(name) for name in names]})

    def _object(self, name: str, is_read: bool) -> None:
        if name not in self.server.objects:
            self.answer_json(404, {"error": {"code": 404, "message": "Not Found"}})
        elif self.command == "DELETE":
            with self.server.lock:
                self.server.objects.pop(name, None)
            self.answer_json(204, {})
        elif not is_read:
            self.answer_json(200, self._about(name))
        else:
            self._read(name, self.server.objects[name][0])

    def _read(self, name: str, data: bytes) -> None:
        fault = self.fault() if name.endswith((".tar", ".safetensors")) else ""
        if fault == "http_500":
            self.answer_json(500, {"error": {"code": 500, "message": "backendError"}})
            return
        code, headers, length = 200, {}, len(data)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            code, data = 206, data[int(wanted[1]) : int(wanted[2]) + 1 if wanted[2] else None]
            headers = {"Content-Range": f"{self.headers['Range'].replace('=', ' ')}/{length}"}
        self.answer(code, bytes(len(data)) if fault == "stale" else data, headers, fault == "cut")

    def _about(self, name: str) -> dict[str, Any]:
        data, generation, written = self.server.objects[name]
        return {
            "kind": "storage#object", "name": name, "bucket": BUCKET, "size": str(len(data)),
            "generation": str(generation), "metageneration": "1", "contentType": "application/octet-stream",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(), "updated": written,
            "timeCreated": written,
        }  # fmt: skip


@contextmanager
def gcs_server(**every: int) -> Iterator[tuple[Gcs, dict[str, str]]]:
    """The server at work, and the variables of the environment that lead to it."""
    no_questions = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # to Google's own servers about the bucket
    with Gcs(every).at_work() as server:
        yield server, {"STORAGE_EMULATOR_HOST": server.url, **no_questions}


class FaultyProxy(FaultyServer):
    """Hands requests on to the server at a port; some reads of tar files and weights go wrong (`FaultyServer`)."""

    def __init__(self, port: int, every: dict[str, int]) -> None:
        super().__init__(_ProxyHandler, every)
        self.port = port


class _ProxyHandler(FaultyHandler):
    server: FaultyProxy

    def _hand_on(self) -> None:
        inner = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
        inner.request(self.command, self.path, self.body(), headers)
        answer = inner.getresponse()
        data = answer.read()
        fault = self.fault() if self.command == "GET" and (".tar" in self.path or "safetensors" in self.path) else ""
        kept = {
            key: value
            for key, value in answer.getheaders()
            if key.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date")
        }
        if self.command == "HEAD":
            kept["Content-Length"] = answer.getheader("Content-Length") or "0"
        if fault == "http_500":
            self.answer(500, b"<Error><Code>InternalError</Code></Error>", kept)
        else:
            self.answer(answer.status, bytes(len(data)) if fault == "stale" else data, kept, fault == "cut")
        inner.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _hand_on


@contextmanager
def s3_server(**every: int) -> Iterator[tuple[FaultyProxy, dict[str, str]]]:
    """The proxy, and the variables of the environment that lead to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    reset = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    reset.request("POST", "/moto-api/reset")  # all servers of a process hold the same objects
    assert reset.getresponse().status == 200
    reset.close()
    known = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", **known)
    client.create_bucket(Bucket=BUCKET)
    variables = {"AWS_DEFAULT_REGION": "us-east-1", **{key.upper(): value for key, value in known.items()}}
    try:
        with FaultyProxy(port, every).at_work() as proxy:
            yield proxy, {**variables, "AWS_ENDPOINT_URL": proxy.url}
    finally:
        server.stop()
