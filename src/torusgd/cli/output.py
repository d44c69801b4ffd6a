"""What commands print on and write to: the terminal, and the file of --json."""

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UserError
from ..storage import url_of


def console() -> Console:
    """The terminal; lines are neither coloured nor wrapped, so that they can be searched."""
    return Console(highlight=False, soft_wrap=True)


def check_here(flag: str, path: Path | None) -> None:
    """UserError if a bucket is given for what must lie on this machine."""
    if (url := url_of(path)) is not None:
        raise UserError(f"{flag} {url}: must be on this machine, not in a bucket; name a place here")


def check_out(out: Path | None, run: Path) -> None:
    """UserError if --out is a bucket, or is missing and the result can't lie beside its run, which is in one."""
    check_here("--out", out)
    if out is None and (url := url_of(run)) is not None:
        raise UserError(f"{url}: what is made of it is written to this machine; say where with --out")


def check_writable(flag: str, path: Path | None) -> None:
    """Raises before minutes of work, not after them.

    Raises:
        UserError: `path` is a folder, in one that can't be written, or in a bucket.
    """
    check_here(flag, path)
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UserError(f"{flag} {path}: can't be written; name a file in a folder that can")


def write_file(flag: str, path: Path, text: str) -> None:
    """Writes the file of a flag, whole or not at all; a device or a pipe takes it as it comes.

    Raises:
        UserError: The file can't be written.
    """
    from ..weights import write_text  # imports torch, as the command that computed this has

    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            write_text(path, text)
    except OSError as error:
        raise UserError(f"{flag} {path}: can't be written: {error.strerror}") from None


def write_json(path: Path | None, value: Any) -> None:
    """Writes a value to the file of --json, if there is one. UserError as by `write_file`."""
    if path is not None:
        from ..weights import json_text

        write_file("--json", path, json_text(value, indent=2) + "\n")
