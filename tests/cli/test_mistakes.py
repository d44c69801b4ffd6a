"""Mistakes that no single command is about, one line and exit code 2; and what commands write and print."""

import io
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.commands import command, ran
from tests.data.tars import write_shards
from tests.messages import assert_sentence, refused, refuses

from torusgd import cli
from torusgd.cli.output import check_writable, console, write_file, write_json
from torusgd.errors import UserError
from torusgd.weights import load_weights

NO_COMMAND_CAN_MEAN = [
    *("train digits --out=", "train digits --out ftp://host/run", "train digits --out s3://", "train --nothing"),
    "train digits --time-limit inf",
    *("data info s4://bucket/x", "eval run --json=file:///tmp/x"),
]
WRITTEN_HERE_ALONE = [
    *("data pack images", "data index", "data index shards --out", "data prepare imagenet", "tune --out"),
    *("data fetch fashion-mnist --out", "eval run --json", "polish run --out", "export run --out", "report run --out"),
    "plan digits --json",
]


def test_a_word_that_a_command_can_not_mean_leaves_no_folder_and_a_recipe_is_a_file_of_any_name(
    mistake: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("data", "info", ""), ("train", "digits", "--out", "")):
        mistake(*words)
    mistake("recipes", "digits", "--keys")
    for line in (*NO_COMMAND_CAN_MEAN, *(f"{line} s3://b/x" for line in WRITTEN_HERE_ALONE)):
        mistake(*line.split())
    assert not list(tmp_path.iterdir())
    Path("mine.txt").write_text("sed: 1\n")
    for name in ("mine.txt", "mine"):
        mistake("simulate", name, NAMES=re.compile("digits, .*"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_that_holds_no_weights_is_reported_without_an_unpicklers_words(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    for content in (b"", b"hello\n", b"\x80\x04"):
        path.write_bytes(content)
        refuses("a file without weights", load_weights, path, about=f"{path}:", TMP=tmp_path)
    for tensor in (torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")):
        torch.save({"weight": tensor}, path)
        refuses("a file of tensors that are not dense", load_weights, path, about=f"{path}:", TMP=tmp_path)


def test_a_wrong_profile_is_reported_before_ranks_are_started_and_a_file_is_no_folder(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr("torusgd.ranks.supervisor.Supervisor.__init__", None)
    (tmp_path / "profile.json").write_text("{}")
    for words in (("train", "digits", "--out"), ("bench", "allreduce", "--json")):
        for name in ("missing.json", "profile.json"):
            mistake(*words, tmp_path / "out", "--workers", 2, "--profile", tmp_path / name, TMP=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    (tmp_path / "file").touch()
    mistake("data", "fetch", "fashion-mnist", "--out", tmp_path / "file", TMP=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    mistake("data", "index", write_shards(tmp_path / "shards"), "--out", tmp_path / "pipe", TMP=tmp_path)
    assert (tmp_path / "pipe").is_fifo()


@contextmanager
def full_disk(most: int = 1000) -> Iterator[None]:
    """Files can't grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("flag", "write"), [
    ("--out", lambda path: write_file("--out", path, 5000 * "x")),
    ("--json", lambda path: write_json(path, 5000 * [1])),
])  # fmt: skip
def test_a_full_disk_leaves_the_old_file_and_no_cut_one(tmp_path: Path, flag: str, write: Any) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    with refused("a full disk", f"{flag} {path}:", FLAG=flag, TMP=tmp_path), full_disk():
        write(path)
    assert (path.read_text(), [file.name for file in tmp_path.iterdir()]) == ("old", ["page"])
    write(path)
    assert len(path.read_text()) >= 5000


def test_a_name_that_is_too_long_is_refused_before_the_work() -> None:
    with pytest.raises(UserError, match=r"^--json a+: can't be written: File name too long$"):
        check_writable("--json", Path("a" * 300))


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
    for stream, told in ((write, ""), (full, "torusgd: standard output can't be written: No space left on device\n")):
        done = subprocess.run(command("recipes"), stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
        os.close(stream)
        assert (done.returncode, done.stderr) == (1, told)


def test_a_run_whose_standard_files_are_closed_trains_and_one_whose_output_is_full_says_so(tmp_path: Path) -> None:
    words = shlex.join(command("train", "digits", "--workers", "1", "--max-steps", "1", "--out", tmp_path / "run"))
    ran(["sh", "-c", f"exec {words} <&- >&- 2>&-"])
    done = ran(["sh", "-c", f"exec {words} --fresh > /dev/full"], code=1)
    assert done.stderr == "torusgd: standard output can't be written: No space left on device\n"


def test_a_library_that_a_limit_on_memory_keeps_out_is_one_line(run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's under `ulimit -v 2500000`; a module that is missing where none may be is a defect, with traceback."""

    def failing(text: str) -> None:
        def load(words: object) -> None:
            raise ImportError(text)

        monkeypatch.setattr(cli, "app", load)

    failing("libtorch_cpu.so: failed to map segment from shared object")
    code, out, error = run_cli("recipes")
    assert (code, out) == (1, "")
    assert_sentence("a library under a limit on memory", "torusgd: a library", error[:-1])
    failing("cannot import name 'nothing'")
    with pytest.raises(ImportError):
        cli.main()


def test_a_limit_on_threads_is_one_line(run_cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other error of that kind is."""
    load = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(cli, "app", load)
    code, out, error = run_cli("recipes")
    assert (code, out) == (1, "")
    assert_sentence("a limit on threads", "torusgd: can't start", error[:-1])
    load.side_effect = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main()


def test_a_current_folder_that_is_gone_is_named(run_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the temporary folder, where the fork server's socket is, nor the library that oneMKL can't find then."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, out, error = run_cli("eval", tmp_path)
    assert (code, out) == (2, "")
    assert_sentence("a current folder that is gone", "torusgd: the current folder", error[:-1])


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
