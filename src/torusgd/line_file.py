"""Files that a run appends lines to, and that nobody else may change meanwhile."""

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path

from .errors import RunError, as_run_error


class LineFile:
    """A file to append lines to, from byte `size` on; what stands behind it is dropped. None: from the end on.

    RunError, here and in `write`, if the disk doesn't take it, or somebody has deleted, moved, replaced or changed the
    file: then the run's folder is not what it seems, and nothing more may be written there.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        with self._writing():
            # Without O_NONBLOCK, opening a pipe would wait for its reader.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
            if size is not None:
                os.truncate(self._file, size)
            self._size = os.fstat(self._file).st_size

    def write(self, line: bytes) -> None:
        """Appends a line by one write, so that what was written survives a killed process."""
        with self._writing():
            self._check()
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    def close(self) -> None:
        os.close(self._file)

    def _check(self) -> None:
        # Two calls of a few microseconds each: a file that was deleted takes everything that is written to it.
        mine = os.fstat(self._file)
        try:
            is_there = os.path.samestat(mine, os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        if not is_there:
            raise RunError(
                f"{self.path}: was deleted, moved or replaced while the run wrote to it, so the run ends and writes "
                "nothing more: put its folder back, or give --out where it is now, and the same command goes on from "
                "the last checkpoint in it"
            )
        if mine.st_size != self._size:
            raise RunError(
                f"{self.path}: has {mine.st_size} bytes where the run has written {self._size}: somebody else changes "
                "it; the same command goes on from the last checkpoint, if there is one"
            )

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "free space or mend the folder, and give the same command again"
        return as_run_error(
            f"{self.path}: can't be written", f"{remedy}: it goes on from the last checkpoint, if there is one"
        )
