"""A real S3 server on loopback (moto), and before it a proxy that fails now and then as networks do."""

import http.client
from collections.abc import Iterator
from contextlib import contextmanager

from tests.data.gcs_server import BUCKET
from tests.faulty_server import FaultyHandler, FaultyServer


class FaultyProxy(FaultyServer):
    """Hands requests on to the server at a port; some reads of tar files and weights go wrong (`FaultyServer`)."""

    def __init__(self, port: int, every: dict[str, int]) -> None:
        super().__init__(_Handler, every)
        self.port = port


class _Handler(FaultyHandler):
    server: FaultyProxy

    def _hand_on(self) -> None:
        inner = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
        inner.request(self.command, self.path, self.body(), headers)
        answer = inner.getresponse()
        data = answer.read()
        is_read = self.command == "GET" and (".tar" in self.path or "safetensors" in self.path)
        fault = self.fault() if is_read else ""
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
