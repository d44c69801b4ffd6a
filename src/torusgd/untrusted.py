"""Files that a stranger may have written, read within bounds of time and memory.

These functions refuse a file with a ValueError, of which the caller makes its own line, before it grows beyond bounds:
a few hundred bytes can stand for gigabytes, by nested brackets, aliases, compressed zeros.
"""

import errno
import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

# Most bytes of a YAML text; the longest that ships has 5,000, and PyYAML takes some seconds for so many.
MOST_YAML = 1 << 16
MOST_TEXT = 1 << 24  # most bytes of any other text; as JSON it can become objects of twenty times the size
_SWELLS_FROM = 1 << 28
_MOST_SWELLING = 100


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """A UTF-8 file; ValueError for other text, more than `most` bytes, a device or a pipe, or a NUL in the path."""
    with check_regular(path).open("rb") as file:
        data = file.read(most + 1)  # never all of it: it may grow meanwhile
    if len(data) > most:
        raise ValueError(f"longer than {most} bytes")
    return data.decode()


def parse_json(text: str) -> Any:
    """The plain values of a JSON text; ValueError if it is none, longer than MOST_TEXT, or nested too deeply."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"longer than {MOST_TEXT} characters")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_swelling(size: int, stored: int) -> None:
    """ValueError if `stored` bytes are to be decompressed to `size`, much more than images ever are."""
    # Deflate makes a thousand bytes of one at most, of zeros. Up to 256 MiB any ratio is good.
    if size > max(_SWELLS_FROM, _MOST_SWELLING * stored):
        raise ValueError(f"{stored} bytes would become {size}, more than {_MOST_SWELLING} times as many")


def check_archive(path: Path) -> None:
    """ValueError if the members of a zip file would be larger than the file itself; other files pass."""
    # `torch.save` stores tensors without compression. There is no bound on what torch would unpack from a compressed
    # member, or from many members that lie on each other in the file.
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > (stored := path.stat().st_size):
            raise ValueError(f"{stored} bytes would become {size}; weights are stored as they are")


def is_there(path: Path) -> bool:
    """Whether a file or folder is there; OSError if that can't be known, where `Path.exists` says no from 3.14 on.

    For what is written, or taken for new, where nothing is: a disk that fails a moment must not lose a run's files.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_regular(path: Path) -> Path:
    """The path; ValueError if it leads to something without an end, such as a device or a pipe; OSError as it comes."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path.name} is no file")
    return path
