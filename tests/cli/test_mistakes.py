"""Mistakes on the command line that no single command is about: one line that says how to mend it, and exit code 2."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.data.tars import write_shards
from tests.messages import refused

from torusgd.weights import load_weights

Run = Callable[..., tuple[int, str, str]]
Mistake = Callable[..., None]


NO_COMMAND_CAN_MEAN = [
    *("train digits --out=", "train digits --out ftp://host/run", "train digits --out s3://", "train --nothing"),
    *("data info s4://bucket/x", "eval run --json=file:///tmp/x"),
]
WRITTEN_HERE_ALONE = [
    *("data pack images", "data index", "data index shards --out", "data prepare imagenet", "tune --out"),
    *("data fetch fashion-mnist --out", "eval run --json", "polish run --out", "export run --out", "report run --out"),
    "plan digits --json",
]


def test_a_word_that_a_command_can_not_mean_leaves_no_folder_and_a_recipe_is_a_file_of_any_name(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("data", "info", ""), ("train", "digits", "--out", "")):
        mistake(*words)
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
        with refused("a file without weights", f"{path}:", TMP=tmp_path):
            load_weights(path)


def test_a_wrong_profile_is_reported_before_ranks_are_started(mistake: Mistake, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("torusgd.ranks.supervisor.Supervisor.__init__", None)
    (tmp_path / "profile.json").write_text("{}")
    for words in (("train", "digits", "--out"), ("bench", "allreduce", "--json")):
        for name in ("missing.json", "profile.json"):
            mistake(*words, tmp_path / "out", "--workers", 2, "--profile", tmp_path / name, TMP=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_file_is_no_folder_and_a_device_is_not_replaced_by_a_file(mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mistake("data", "fetch", "fashion-mnist", "--out", tmp_path / "file", TMP=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    mistake("data", "index", write_shards(tmp_path / "shards"), "--out", tmp_path / "pipe", TMP=tmp_path)
    assert (tmp_path / "pipe").is_fifo()
