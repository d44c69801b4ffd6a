"""A server on loopback that speaks what gcsfs asks of Google Cloud Storage, and fails now and then as networks do.

Unlike the emulators that packages bring it keeps the condition ifGenerationMatch=0 of a write.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.faulty_server import FaultyHandler, FaultyServer

BUCKET = "images"


class Gcs(FaultyServer):
    """One bucket; some reads of tar files and weights go wrong (`FaultyServer`)."""

    def __init__(self, every: dict[str, int]) -> None:
        super().__init__(_Handler, every)
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


class _Handler(FaultyHandler):
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
