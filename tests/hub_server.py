"""A server on loopback that speaks what huggingface_hub asks of the hub, and fails now and then as networks do."""

import hashlib
import re
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.faulty_server import FaultyHandler, FaultyServer

COMMITS = ("1" * 40, "2" * 40)
# The repository, what is asked of it, of which revision and file.
_PATH = re.compile(
    r"/(?:api/)?((?:(?:datasets|models)/)?[^/]+/[^/]+)"
    r"(?:/(revision|tree|paths-info|resolve)/(refs/\w+/\w+|[^/]+)(?:/(.+))?)?"
)


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
        fault = self.fault() if self.command != "POST" else ""
        found = _PATH.fullmatch(unquote(urlsplit(self.path).path))
        if fault == "http_500" or found is None:
            self.answer_json(404 if found is None else 500, {})
            return
        repository = found[1] if found[1].startswith(("datasets/", "models/")) else f"models/{found[1]}"
        commits = self.server.repositories.get(repository, [])
        known = dict(zip(COMMITS, commits, strict=False))
        commit = COMMITS[len(commits) - 1] if found[3] in (None, "main") else found[3]
        if repository in self.server.gated:
            self._refuse(403, "GatedRepo")
        elif not commits:
            self._refuse(401, "RepoNotFound")
        elif commit not in known:
            self._refuse(404, "RevisionNotFound")
        elif found[2] == "resolve":
            self._file(commit, known[commit].get(found[4]), fault == "cut")
        elif found[2] == "tree":
            self.answer_json(200, [_entry(*each) for each in known[commit].items()], is_cut=fault == "cut")
        elif found[2] == "paths-info":  # which of some paths there are
            asked = parse_qs(self.body().decode())["paths"]
            self.answer_json(200, [_entry(name, known[commit][name]) for name in asked if name in known[commit]])
        else:
            about = {
                "id": repository.partition("/")[2], "sha": commit, "private": False, "disabled": False, "gated": False,
                "tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": name} for name in known[commit]],
            }  # fmt: skip
            self.answer_json(200, about, is_cut=fault == "cut")

    do_HEAD = do_POST = do_GET

    def _file(self, commit: str, data: bytes | None, is_cut: bool) -> None:
        if data is None:
            self._refuse(404, "EntryNotFound", commit)
            return
        wanted = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=")
        begin, end = int(wanted.partition("-")[0]), int(wanted.partition("-")[2] or len(data) - 1) + 1
        headers = {
            "ETag": f'"{_sum(data)}"', "X-Repo-Commit": commit, "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{_sum(data)}"', "Accept-Ranges": "bytes",
        }  # fmt: skip
        is_part = (begin, end) != (0, len(data))
        if is_part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self.answer(206 if is_part else 200, data[begin:end], headers, is_cut)

    def _refuse(self, code: int, why: str, commit: str = "") -> None:
        self.answer_json(code, {}, {"X-Error-Code": why, **({"X-Repo-Commit": commit} if commit else {})})


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {
        "type": "file", "path": name, "size": len(data), "oid": _sum(data)[:40],
        "lfs": {"oid": _sum(data), "size": len(data), "pointerSize": 130},
    }  # fmt: skip


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
