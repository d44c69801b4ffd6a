"""Buckets in real servers on loopback, by the scheme of their URLs."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.data.gcs_server import BUCKET, gcs_server
from tests.data.s3_server import s3_server
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
