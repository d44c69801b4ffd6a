"""Disks that fail a moment, for tests."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def blind(*paths: Path, number: int = errno.EIO) -> Iterator[None]:
    """In this block nobody can see whether these files are there; `Path` says of them, as from Python 3.14 on, no."""
    stat, hidden = os.stat, set(map(str, paths))

    def failing(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and str(path) in hidden:
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *arguments, **options)

    def says_no(real: Any) -> Any:
        return lambda self: str(self) not in hidden and real(self)

    asking = {name: says_no(getattr(Path, name)) for name in ("exists", "is_file", "is_dir")}
    with patch.object(os, "stat", failing), patch.multiple(Path, **asking):
        yield
