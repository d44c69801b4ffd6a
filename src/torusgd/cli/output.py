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


def check_out(out: Path | None, run: Path) -> None:
    """UserError where --out is missing and the result can't lie beside its run, which is in a bucket."""
    if out is None and (url := url_of(run)) is not None:
        raise UserError(f"{url}: what is made of it is written to this machine; say where with --out")


def check_writable(flag: str, path: Path | None) -> None:
    """Raises before minutes of work, not after them.

    Raises:
        UserError: `path` is a folder, or in one that can't be written.
    """
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UserError(f"{flag} {path}: can't be written; name a file in a folder that can")


def write_json(path: Path | None, value: Any) -> None:
    """Writes what --json asks for; None: nothing was asked for.

    Raises:
        UserError: The file can't be written.
    """
    if path is None:
        return
    from ..weights import json_text  # imports torch, as the command that computed this has

    try:
        path.write_text(json_text(value, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: can't be written: {error.strerror}") from error
