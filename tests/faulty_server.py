"""A server on loopback that fails now and then as networks do, from which those of buckets and of the hub are made."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


class FaultyServer(ThreadingHTTPServer):
    """Answers requests, some of which go wrong, every so many one.

    Args:
        handler: Makes what answers a request.
        every: How many of the requests that may fail there are for one that goes wrong so: http_500, cut, slow, stale.
    """

    daemon_threads = True

    def __init__(self, handler: Callable[..., "FaultyHandler"], every: dict[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.every, self.lock = every, threading.Lock()
        self.requests, self.faults = 0, Counter[str]()
        """those that may fail, and how many failed in which way"""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def at_work(self) -> Iterator[Self]:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *arguments: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def fault(self) -> str:
        """What goes wrong with this request, empty: nothing; the pause of a slow one is over already."""
        server = self.server
        with server.lock:
            server.requests += 1
            found = next((kind for kind, every in server.every.items() if server.requests % every == 0), "")
            server.faults[found] += 1
        if found == "slow":
            time.sleep(0.5)
        return found

    def answer(self, code: int, data: bytes, headers: dict[str, str] | None = None, is_cut: bool = False) -> None:
        """Answers, to HEAD without the data; `is_cut`: hangs up after half of them."""
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(OSError):  # whoever asks need not wait for it
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
        if is_cut:
            self.close_connection = True

    def answer_json(self, code: int, tree: object, headers: dict[str, str] | None = None, is_cut: bool = False) -> None:
        data = b"" if code == 204 else json.dumps(tree).encode()
        self.answer(code, data, {"Content-Type": "application/json", **(headers or {})}, is_cut)


class _Files(FaultyHandler, SimpleHTTPRequestHandler):
    """A web server that gives parts of files, as those of the net do and Python's own does not."""

    def send_head(self) -> Any:
        if self.fault() == "http_500":
            self.answer(503, b"")
            return None
        return super().send_head()

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if "Range" not in self.headers or not file.is_file():
            super().do_GET()
            return
        begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = file.read_bytes()[begin : end + 1]
        self.answer(206, data, {"Content-Range": f"bytes {begin}-{begin + len(data) - 1}/{file.stat().st_size}"})


class _WholeFiles(FaultyHandler, SimpleHTTPRequestHandler):
    pass


@contextmanager
def file_server(folder: Path, ranges: bool = True, **every: int) -> Iterator[str]:
    """The address of a web server at work with the files of a folder, whole ones without `ranges`."""
    with FaultyServer(partial(_Files if ranges else _WholeFiles, directory=folder), every).at_work() as server:
        yield server.url
