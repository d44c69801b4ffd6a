"""A run's files that grow: each line is one write, and whoever else changes, deletes or moves one is noticed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from torusgd.errors import RunError
from torusgd.line_file import LineFile


def test_lines_are_appended_behind_what_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo\nhal")
    file = LineFile(path, 8)
    file.write(b"three\n")
    file.close()
    LineFile(path).write(b"four\n")
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\n"


CHANGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink, "moved": lambda path: path.rename(path.with_name("y")),
    "its folder deleted": lambda path: shutil.rmtree(path.parent),
    "replaced": lambda path: (path.rename(path.with_name("y")), path.write_text("one\n")),
    "cut": lambda path: os.truncate(path, 2), "longer": lambda path: path.write_text("one\nmore\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_somebody_else_changes_takes_no_more(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run" / "x"
    path.parent.mkdir()
    file = LineFile(path)
    file.write(b"one\n")
    CHANGES[name](path)
    words = {"cut": "has 2 bytes where the run has written 4", "longer": "has 9 bytes where the run has written 4"}
    with pytest.raises(RunError, match=words.get(name, "was deleted, moved or replaced")):
        file.write(b"two\n")
    file.close()


def test_a_full_disk_and_a_folder_in_its_place_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No space left on device; free space"):
        LineFile(Path("/dev/full")).write(b"one\n")
    with pytest.raises(RunError, match="Is a directory"):
        LineFile(tmp_path)
