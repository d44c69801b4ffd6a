"""A server on loopback that speaks what huggingface_hub asks of the hub, and fails now and then as networks do."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.faulty_server import FaultyHandler, FaultyServer

COMMITS = ("1" * 40, "2" * 40)


class Hub(FaultyServer):
    """Repositories by kind and name; of each the files by revision, `main` being the last of `COMMITS` it has.

    Of the requests some go wrong (`FaultyServer`).
    """

    def __init__(self, every: dict[str, int]) -> None:
        super().__init__(_Handler, every)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.gated: set[str] = set()

    def push(self, repository: str, files: dict[str, bytes]) -> str:
        """Adds a commit to `datasets/ORG/NAME` or `models/ORG/NAME`; returns it."""
        commits = self.repositories.setdefault(repository, [])
        commits.append(files)
        return COMMITS[len(commits) - 1]


class _Handler(FaultyHandler):
    server: Hub

    def do_GET(self) -> None:
        fault = self.fault()
        if fault == "http_500":
            self._answer(500, b"{}")
            return
        path = unquote(urlsplit(self.path).path)
        handlers: tuple[tuple[str, Callable[..., None]], ...] = (
            (r"/api/((?:datasets|models)/[^/]+/[^/]+)(?:/revision/(.+))?", self._info),
            (r"/api/((?:datasets|models)/[^/]+/[^/]+)/tree/([^/]+)", self._tree),
            (r"/(datasets/[^/]+/[^/]+)/resolve/([^/]+|refs/\w+/\w+)/(.+)", self._file),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
        )
        for pattern, handle in handlers:
            if found := re.fullmatch(pattern, path):
                repository = found[1] if found[1].startswith(("datasets/", "models/")) else f"models/{found[1]}"
                if repository in self.server.gated:
                    self._refuse(403, "GatedRepo")
                elif repository not in self.server.repositories:
                    self._refuse(401, "RepoNotFound")
                elif (number := self._commit(repository, found[2])) is None:
                    self._refuse(404, "RevisionNotFound")
                else:
                    handle(repository, number, *found.groups()[2:], is_cut=fault == "cut")
                return
        self._answer(404, b"{}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Which of some paths there are."""
        asked = parse_qs(self.body().decode())
        found = re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)/paths-info/([^/]+)", unquote(self.path))
        number = self._commit(found[1], found[2]) if found and found[1] in self.server.repositories else None
        if found is None or number is None:
            self._refuse(404, "RevisionNotFound")
            return
        files = self.server.repositories[found[1]][number]
        self._answer(200, json.dumps([_entry(name, files[name]) for name in asked["paths"] if name in files]).encode())

    def _commit(self, repository: str, revision: str | None) -> int | None:
        count = len(self.server.repositories[repository])
        if revision in (None, "main"):
            return count - 1
        number = COMMITS.index(revision) if revision in COMMITS else count
        return number if number < count else None

    def _info(self, repository: str, number: int, is_cut: bool) -> None:
        files = self.server.repositories[repository][number]
        told = {
            "id": repository.partition("/")[2], "sha": COMMITS[number], "private": False, "disabled": False,
            "gated": False, "tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": name} for name in files],
        }  # fmt: skip
        self._answer(200, json.dumps(told).encode(), is_cut=is_cut)

    def _tree(self, repository: str, number: int, is_cut: bool) -> None:
        listed = [_entry(name, data) for name, data in self.server.repositories[repository][number].items()]
        self._answer(200, json.dumps(listed).encode(), is_cut=is_cut)

    def _file(self, repository: str, number: int, name: str, is_cut: bool) -> None:
        data = self.server.repositories[repository][number].get(name)
        if data is None:
            self._refuse(404, "EntryNotFound", COMMITS[number])
            return
        wanted = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=")
        begin, end = int(wanted.partition("-")[0]), int(wanted.partition("-")[2] or len(data) - 1) + 1
        headers = {
            "ETag": f'"{_sum(data)}"', "X-Repo-Commit": COMMITS[number], "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{_sum(data)}"', "Accept-Ranges": "bytes",
        }  # fmt: skip
        is_part = (begin, end) != (0, len(data))
        if is_part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._answer(206 if is_part else 200, data[begin:end], headers, is_cut)

    def _refuse(self, code: int, why: str, commit: str = "") -> None:
        self._answer(code, b"{}", {"X-Error-Code": why, **({"X-Repo-Commit": commit} if commit else {})})

    def _answer(self, code: int, data: bytes, headers: dict[str, str] | None = None, is_cut: bool = False) -> None:
        kind = "application/json" if code != 206 else "application/octet-stream"
        self.answer(code, data, {"Content-Type": kind, **(headers or {})}, is_cut)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {
        "type": "file", "path": name, "size": len(data), "oid": _sum(data)[:40],
        "lfs": {"oid": _sum(data), "size": len(data), "pointerSize": 130},
    }  # fmt: skip


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
