"""What commands print on and write to: the terminal, and the file of --json."""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import UserError, as_user_error
from ..storage import url_of
from ..text import json_text
from ..untrusted import is_there


def console() -> Console:
    """The terminal; lines are neither coloured nor wrapped, so that they can be searched, nor read as markup."""
    return Console(highlight=False, soft_wrap=True, markup=False)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (), bold: Collection[int] = ()
) -> Table:
    """A table of figures: columns stand to the right but for those of `left`, rows of `bold` are bold."""
    found = Table(box=box.SIMPLE, pad_edge=False)
    for number, heading in enumerate(headings):
        found.add_column(heading, justify="left" if number in left else "right", overflow="fold")
    for number, row in enumerate(rows):
        found.add_row(*row, style="bold" if number in bold else None)
    return found


def check_here(flag: str, path: Path | None) -> None:
    """UserError if the path is in a bucket."""
    if (url := url_of(path)) is not None:
        raise UserError(f"{flag} {url}: must be on this machine, not in a bucket; name a place here")


def check_out(out: Path | None, run: Path) -> None:
    """UserError if --out is in a bucket, or is missing and the run, beside which the result would lie, is in one."""
    check_here("--out", out)
    if out is None and (url := url_of(run)) is not None:
        raise UserError(f"{url}: what is made of it is written to this machine; say where with --out")


def check_writable(flag: str, path: Path | None) -> Path | None:
    """The path; UserError, before minutes of work, if it is a folder, in one that can't be written, or in a bucket."""
    check_here(flag, path)
    with as_user_error(f"{flag} {path}: can't be written"):  # its name may be too long
        if path is not None and ((is_there(path) and path.is_dir()) or not os.access(path.absolute().parent, os.W_OK)):
            raise UserError(f"{flag} {path}: can't be written; name a file in a folder that can")
    return path


def write_file(flag: str, path: Path, text: str) -> None:
    """Writes the file of a flag; UserError if it can't be written."""
    from ..weights import write_text  # imports torch, as the command that computed this has

    with as_user_error(f"{flag} {path}: can't be written"):
        if path.exists() and not path.is_file():  # a device or a pipe takes the text as it comes
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            write_text(path, text)


def write_json(path: Path | None, value: Any) -> None:
    """Writes a value to the file of --json, if there is one; UserError if it can't be written."""
    if path is not None:
        write_file("--json", path, json_text(value, indent=2) + "\n")
