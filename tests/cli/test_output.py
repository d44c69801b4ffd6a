"""What commands write and print: whole files, and names in letters that a terminal lacks."""

import io
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.commands import command, ran
from tests.messages import refused

from torusgd import cli
from torusgd.cli.output import console, write_file, write_json


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can't grow beyond 1,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


WRITES: dict[str, Callable[[Path], None]] = {
    "--out": lambda path: write_file("--out", path, 5000 * "x"),
    "--json": lambda path: write_json(path, 5000 * [1]),
}


@pytest.mark.parametrize(("flag", "write"), WRITES.items())
def test_a_full_disk_leaves_the_old_file_and_no_cut_one(tmp_path: Path, flag: str, write: Any) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    with refused("a full disk", f"{flag} {path}:", FLAG=flag, TMP=tmp_path), full_disk():
        write(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["page"]
    write(path)
    assert len(path.read_text()) >= 5000


def test_a_device_takes_what_is_written_and_a_link_stays_one(tmp_path: Path) -> None:
    write_file("--json", Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link").symlink_to(tmp_path / "page")
    for text in ("one", "two"):
        write_file("--out", tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "page").read_text() == text


def test_a_closed_pipe_and_a_full_disk_end_a_command_without_a_second_complaint() -> None:
    """As by `torusgd recipes | head -1`; Python itself would flush the output at its end, and exit with code 120."""
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    for stream, told in ((write, ""), (full, "torusgd: [Errno 28] No space left on device\n")):
        done = subprocess.run(command("recipes"), stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
        os.close(stream)
        assert (done.returncode, done.stderr) == (1, told)


def test_names_in_letters_that_the_terminal_lacks_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal := io.BytesIO(), encoding="latin-1"))
    monkeypatch.setattr(sys, "argv", ["torusgd", "recipes"])
    with pytest.raises(SystemExit):
        cli.main()
    console().print("gr\u00fcn, \u8d64")
    sys.stdout.flush()
    assert terminal.getvalue().endswith(b"gr\xfcn, \\u8d64\n")


def test_a_plan_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """Parts of torch make a folder there for compiled code as soon as they are imported."""
    ran(command("plan", "digits", "--cluster", "abci", "--devices", "4"), env=os.environ | {"TMPDIR": str(tmp_path)})
    assert not list(tmp_path.iterdir())
