"""What the world does to a run: disks fill up, data vanish, folders belong to others. One line, and nothing is lost."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.polling import until
from tests.run import processes
from tests.run.processes import RECIPE, Process, ended_well, last_step, pauses, results, run_alone, summary, torusgd
from tests.run.slow import Slow
from torusgd.errors import RunError
from torusgd.rundir.run_dir import RunDir


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB; only root can make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("can't mount a small disk here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def one_line(process: Process) -> str:
    """The only thing that a run said on its error stream, but for the loader's word of each new attempt."""
    (line,) = [line for line in process.err.splitlines() if not line.startswith("reading again in ")]
    return line


def train(folder: Path, out: Path, recipe: Path, *words: str | Path) -> Process:
    return torusgd(folder, out, recipe, "--workers", "2", *pauses(0.005), *words)


def train_six_steps(folder: Path, out: Path, recipe: Path) -> Process:
    """A run at work that has written its first checkpoint."""
    process = train(folder, out, recipe)
    processes.wait_for_step(out, 6, process)
    until((out / "checkpoints" / "step-00000004").is_dir, "the checkpoint of step 4", process)
    return process


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_space_lets_it_go_on(tmp_path, recipe, small_disk, undisturbed) -> None:
    out = small_disk / "out"
    process = train_six_steps(tmp_path, out, recipe)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(b"x" * 4096):
            pass
    assert process.end() == 1, process.output
    assert re.search(r"can't .*No space left on device; .*give the same command again", one_line(process))
    assert last_step(out) < 30
    assert not (out / "summary.json").exists()

    again = train(tmp_path, out, recipe)  # not even a start is possible
    assert again.end() == 1, again.output
    assert "No space left on device" in one_line(again)

    (small_disk / "ballast").unlink()
    assert ended_well(out, undisturbed, train(tmp_path, out, recipe))["resumed_from"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("is_moved", [False, True], ids=["deleted", "moved"])
def test_a_folder_that_goes_is_named_and_nothing_is_written_there(tmp_path: Path, recipe: Path, is_moved: bool) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    process = train_six_steps(tmp_path, out, recipe)
    out.rename(elsewhere)
    if not is_moved:
        shutil.rmtree(elsewhere)
    assert process.end() == 1, process.output
    assert f"{out}/events.jsonl: was deleted, moved or replaced" in one_line(process)
    assert not out.exists()
    if is_moved:  # as the line says
        assert ended_well(elsewhere, None, train(tmp_path, elsewhere, recipe))["resumed_from"] >= 4


def test_a_read_only_folder_is_one_line(recipe: Path, small_disk: Path, mistake: Callable[..., None]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for out in (small_disk, small_disk / "out"):
        mistake("train", recipe, "--out", out, "--workers", "1", RECIPE=recipe, DISK=small_disk)


@pytest.mark.slow
def test_vanished_data_end_the_run_and_their_return_lets_it_go_on(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("simplejpeg")
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    draw = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 6)):
        for name in "abcd":
            (data / split / name).mkdir(parents=True)
            for number in range(count):
                image = draw.integers(0, 256, (8, 8), dtype=np.uint8)
                cv2.imwrite(str(data / split / name / f"{number}.png"), image)
    recipe, out = tmp_path / "folder.yaml", tmp_path / "out"
    recipe.write_text(RECIPE.replace("tests.run.slow:Slow", "folder").replace("until: 30st", "until: 80st"))
    process = torusgd(tmp_path, out, recipe, "--workers", "2", "--data", data)
    processes.wait_for_step(out, 5, process)
    data.rename(elsewhere)
    assert process.end() == 1, process.output
    assert re.search(f" of 2 ranks can't read .*No such file or directory: '{data}/", one_line(process))
    again = torusgd(tmp_path, out, recipe, "--workers", "2", "--data", data)
    assert (again.end(), one_line(again)) == (2, f"torusgd: --data {data}: there is no such file or folder")
    elsewhere.rename(data)
    process = torusgd(tmp_path, out, recipe, "--workers", "2", "--data", data)
    expected = results(run_alone(tmp_path / "undisturbed", recipe, data=data))
    assert ended_well(out, expected, process)["resumed_from"] >= 4


def test_held_out_images_that_cannot_be_read(tmp_path: Path, recipe: Path, monkeypatch, undisturbed) -> None:
    read = Slow.read

    def broken(self: Slow, index: int) -> np.ndarray:
        if len(self) == 24 and index == 13:
            raise OSError(5, "Input/output error", "/data/13.png")
        return read(self, index)

    monkeypatch.setattr(Slow, "read", broken)
    with pytest.raises(RunError, match=r"'/data/13\.png'"):
        run_alone(tmp_path / "out", recipe)
    monkeypatch.undo()
    told = run_alone(tmp_path / "out", recipe)
    assert (told["resumed_from"], results(told)) == (10, undisturbed)  # from the step whose evaluation failed


def test_a_finished_run_shows_its_result_again(tmp_path: Path, recipe: Path, run_cli: Callable[..., Any]) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if not path.name.startswith(".")}

    told = run_alone(tmp_path, recipe)
    before = times()
    code, text, err = run_cli("train", recipe, "--out", tmp_path, "--workers", "2")
    assert (code, err, times()) == (0, "", before)
    assert f"weights_sha256 {told['weights_sha256']}" in text


def test_weights_that_are_gone_are_made_again(tmp_path: Path, recipe: Path, mistake: Any, undisturbed: Any) -> None:
    run_alone(tmp_path, recipe)
    (tmp_path / "model.safetensors").unlink()
    mistake("eval", tmp_path, FOLDER=tmp_path)
    assert RunDir(tmp_path).finished(processes.STEPS) is None, "its last checkpoint is there"
    assert results(run_alone(tmp_path, recipe)) == undisturbed
    (tmp_path / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "checkpoints")
    assert RunDir(tmp_path).finished(processes.STEPS) is not None, "nothing would be left of it"


def test_a_mistake_is_one_line_before_any_rank_is_started(tmp_path: Path, recipe: Path, mistake: Any) -> None:
    run_alone(tmp_path, recipe, max_steps=1)
    for words in ("--set rate.lr=0.6", "--workers 5", "--init nowhere.pth", "--data nowhere"):
        mistake("train", recipe, "--out", tmp_path, *words.split(), RECIPE=recipe, TMP=tmp_path)


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_run_with_one_line(tmp_path: Path, recipe: Path) -> None:
    words = processes.torusgd_words(tmp_path / "out", recipe, "--workers", "2", *pauses(0.005))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == "torusgd: nobody reads the output any more; the last checkpoint, if there is one, is good\n"


@pytest.mark.slow
def test_fresh_begins_anew(tmp_path: Path, recipe: Path) -> None:
    out = tmp_path / "out"
    run_alone(out, recipe, "rate.lr=0.7", max_steps=6)
    (out / "notes.txt").write_text("mine")
    process = torusgd(tmp_path, out, recipe, "--workers", "1", "--fresh", "--max-steps", "3")
    assert process.end() == 0, process.output
    assert (summary(out)["resumed_from"], summary(out)["steps"]) == (0, 3)
    assert results(summary(out)) == results(run_alone(tmp_path / "undisturbed", recipe, max_steps=3))
    assert (out / "notes.txt").read_text() == "mine"
    shutil.rmtree(out)
