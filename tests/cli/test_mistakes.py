"""Mistakes on the command line that no single command is about: one line that says how to mend it, and exit code 2."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.data.tars import write_shards
from tests.messages import refused

from torusgd.weights import load_weights

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("data", "info", ""), "an argument: is empty, as if a shell variable is not set"),
        (("train", "digits", "--out", ""), "an argument: is empty"),
        (("train", "digits", "--out="), "--out: is empty"),
        (("train", "digits", "--out", "ftp://host/run"), "ftp://host/run: ftp:// is not known; there are s3://"),
        (("train", "digits", "--out", "s3://"), "s3://: names no bucket; wanted is such as s3://BUCKET/FOLDER"),
        (("data", "info", "s4://bucket/x"), "s4://bucket/x: s4:// is not known"),
        (("eval", "run", "--json=file:///tmp/x"), "file:///tmp/x: file:// is not known"),
        (("train", "--nothing"), "No such option: --nothing (--help says what there is)"),
    ],
)
def test_a_word_that_no_command_can_mean(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, error = run_cli(*words)
    assert (code, out) == (2, "")
    assert error.startswith(f"torusgd: {line}")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("data", "pack", "images", "s3://b/x"), "OUT"),
        (("data", "index", "s3://b/x"), "PATH"),
        (("data", "index", "shards", "--out", "s3://b/x"), "--out"),
        (("data", "prepare", "imagenet", "s3://b/x"), "PATH"),
        (("data", "fetch", "fashion-mnist", "--out", "s3://b/x"), "--out"),
        (("eval", "run", "--json", "s3://b/x"), "--json"),
        (("polish", "run", "--out", "s3://b/x"), "--out"),
        (("export", "run", "--out", "s3://b/x"), "--out"),
        (("report", "run", "--out", "s3://b/x"), "--out"),
        (("tune", "--out", "s3://b/x"), "--out"),
        (("plan", "digits", "--json", "s3://b/x"), "--json"),
    ],
)
def test_what_is_written_here_alone_is_not_put_into_a_folder_named_as_a_bucket(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], flag: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run_cli(*words)
    assert (code, error) == (
        2,
        f"torusgd: {flag} s3://b/x: must be on this machine, not in a bucket; name a place here\n",
    )
    assert not list(tmp_path.iterdir())


def test_a_recipe_may_be_a_file_of_any_name(run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("sed: 1\n")
    assert run_cli("simulate", "mine.txt")[2].startswith("torusgd: recipe mine.txt: ")
    assert run_cli("simulate", "mine")[2].startswith("torusgd: recipe 'mine': no built-in recipe of that name; there")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x80\x04"])
def test_a_file_that_holds_no_weights_is_reported_without_an_unpicklers_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with refused("a file without weights", f"{path}:", TMP=tmp_path):
        load_weights(path)


@pytest.mark.parametrize("words", [("train", "digits", "--out"), ("bench", "allreduce", "--json")])
def test_a_wrong_profile_is_reported_before_ranks_are_started(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("torusgd.ranks.supervisor.Supervisor.__init__", None)
    profile = tmp_path / "profile.json"
    for content, why in ((None, "No such file or directory"), ("{}", "")):
        if content is not None:
            profile.write_text(content)
        code, _, error = run_cli(*words, tmp_path / "out", "--workers", 2, "--profile", profile)
        assert (code, error.count("\n")) == (2, 1)
        assert error.startswith(f"torusgd: profile {profile}: {why}")
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_the_systems_numbers_of_errors_are_left_out(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = run_cli("data", "fetch", "fashion-mnist", "--out", tmp_path / "file")[2]
    assert f"can't write to {tmp_path / 'file'} (File exists: " in error


def test_a_device_is_not_replaced_by_a_file(run_cli: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    root = write_shards(tmp_path / "shards")
    code, _, error = run_cli("data", "index", root, "--out", pipe)
    line = f"torusgd: {pipe}: can't be written: Is a device or a pipe; choose another place with --out\n"
    assert (code, error) == (2, line)
    assert pipe.is_fifo()
