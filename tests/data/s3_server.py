"""A real S3 server on loopback (moto), and before it a proxy that fails now and then as networks do."""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .gcs_server import BUCKET


class FaultyProxy(ThreadingHTTPServer):
    """Hands requests on to a server. Of the reads of tar files and checkpoints some go wrong, every so many one.

    Args:
        port: Of the server.
        every: How many reads of each there are for one that fails so; none: all goes well.
    """

    daemon_threads = True

    def __init__(self, port: int, every: dict[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port, self.every = port, every
        self.reads, self.faults = 0, Counter[str]()
        self.lock = threading.Lock()

    def fault(self) -> str:
        """What goes wrong with the next read; empty: nothing."""
        with self.lock:
            self.reads += 1
            found = next((kind for kind, every in self.every.items() if self.reads % every == 0), "")
            self.faults[found] += 1
            return found


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def _hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        inner = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
        inner.request(self.command, self.path, body, headers)
        answer = inner.getresponse()
        data = answer.read()
        is_read = self.command == "GET" and (".tar" in self.path or "safetensors" in self.path)
        fault = self.server.fault() if is_read else ""
        if fault == "slow":
            time.sleep(0.5)
        if fault == "http_500":
            answer.status, data = 500, b"<Error><Code>InternalError</Code></Error>"
        if fault == "stale":
            data = bytes(len(data))
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(key, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        if fault == "cut":
            self.close_connection = True
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
    proxy = FaultyProxy(port, every)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    variables = {
        "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}",
    }  # fmt: skip
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield proxy, variables
    finally:
        proxy.shutdown()
        server.stop()
