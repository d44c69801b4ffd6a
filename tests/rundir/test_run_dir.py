"""The run's folder: whose it is, what may be deleted in it, and who may write to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.messages import refused, refuses

from torusgd.errors import RunError, UserError
from torusgd.recipe.load import load_recipe, read_run_recipe
from torusgd.recipe.schema import Recipe
from torusgd.rundir import run_dir as module
from torusgd.rundir.run_dir import RunDir

RECIPE = load_recipe("digits").recipe


def run_in(path: Path, recipe: Recipe = RECIPE) -> RunDir:
    """A folder as a run leaves it, with a file of the user's in each place."""
    folder = RunDir(path)
    with folder.lock():
        folder.claim(recipe, fresh=False)
    files = "events.jsonl model.safetensors notes.txt tensorboard/events.out.tfevents.1 .summary.json.0123abcd"
    parts = "checkpoints/notes.txt checkpoints/step-00000004/a checkpoints/.step-00000008.partial/a"
    for name in (*files.split(), *parts.split()):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    folder.summary.write_text(json.dumps({"steps": 30, "top1": 0.5}))
    return folder


def files(path: Path) -> list[str]:
    found = (each for each in path.rglob("*") if each.is_file() and each.name not in (".lock", ".holder"))
    return sorted(str(each.relative_to(path)) for each in found)


def test_a_new_folder_gets_the_whole_recipe_goes_on_with_it_and_is_swept(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "a" / "b")
    with folder.lock():
        folder.claim(RECIPE, fresh=False)
    assert (read_run_recipe(folder.recipe), files(folder.path)) == (RECIPE, ["recipe.yaml"])
    run_in(folder.path)
    (folder.path / ".summary.json.swp").touch()  # an editor's, not torusgd's
    before = files(folder.path)
    folder.claim(RECIPE, fresh=False)
    assert set(before) - set(files(folder.path)) == {".summary.json.0123abcd", "checkpoints/.step-00000008.partial/a"}


@pytest.mark.parametrize("change", ["rate.lr=3.5", "stages.1.images_per_worker=24"])
def test_another_recipe_is_refused_by_its_first_different_key(tmp_path: Path, change: str) -> None:
    folder, other = run_in(tmp_path), load_recipe("digits", [change]).recipe
    before = files(tmp_path)
    with refused("a folder of another recipe", f"--out {tmp_path}", TMP=tmp_path, KEY=change.partition("=")[0]):
        folder.claim(other, fresh=False)
    assert files(tmp_path) == before
    folder.claim(other, fresh=True)
    assert read_run_recipe(folder.recipe) == other
    assert files(tmp_path) == ["checkpoints/notes.txt", "notes.txt", "recipe.yaml"]


def test_a_run_that_ended_before_its_first_step_makes_room_for_its_mended_recipe(tmp_path: Path) -> None:
    folder, mended = RunDir(tmp_path), load_recipe("digits", ["rate.lr=3.5"]).recipe
    folder.claim(RECIPE, fresh=False)
    (tmp_path / "notes.txt").write_text("mine")
    folder.claim(mended, fresh=False)
    assert (read_run_recipe(folder.recipe), files(tmp_path)) == (mended, ["notes.txt", "recipe.yaml"])
    folder.events.write_text("")
    with refused("a folder of another recipe", f"--out {tmp_path}", TMP=tmp_path, KEY="rate.lr"):
        folder.claim(RECIPE, fresh=False)


def test_a_strangers_folder_is_refused_and_with_fresh_only_added_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    folder = RunDir(tmp_path)
    refuses("a stranger's folder", folder.claim, RECIPE, fresh=False, about=f"--out {tmp_path}", TMP=tmp_path)
    folder.claim(RECIPE, fresh=True)
    assert files(tmp_path) == ["recipe.yaml", "thesis.tex"]


@pytest.mark.parametrize("name", ["checkpoints/epoch-1.pt", "recipe.yaml", "model.safetensors", "events.jsonl"])
def test_what_only_has_the_name_of_a_runs_file_is_never_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("flour: 500 g\n")
    (top,) = (path.name for path in tmp_path.iterdir())
    for fresh in (False, True):
        with refused("a stranger's file of a run's name", f"--out {tmp_path}", TMP=tmp_path, NAME=top):
            RunDir(tmp_path).claim(RECIPE, fresh)
    assert (tmp_path / name).read_text() == "flour: 500 g\n"


def test_ranks_that_torchrun_starts_again_with_fresh_go_on(tmp_path: Path) -> None:
    """Also where nodes have come and gone meanwhile, of which torchrun counts no restart."""
    folder = RunDir(tmp_path)
    # The last two are the user's next commands.
    for agents, goes_on in (({1, 2}, False), ({2, 3}, True), ({3}, True), ({3, 4}, True), ({5}, False), ({4}, False)):
        if folder.recipe.exists():
            folder.events.write_text("{}")
        folder.claim(RECIPE, True, agents)
        assert folder.events.exists() == goes_on


def test_a_finished_run_is_known_and_that_of_fewer_steps_makes_way(tmp_path: Path) -> None:
    folder = run_in(tmp_path)
    assert folder.finished(30) == {"steps": 30, "top1": 0.5}
    refuses("fewer steps than a finished run has", folder.finished, 20, about="--max-steps 20:", TMP=tmp_path)
    assert folder.finished(31) is None
    assert not folder.summary.exists() | folder.model.exists()
    folder.summary.write_text('{"steps": 3')
    assert folder.finished(1) is None


def test_a_second_run_is_kept_out_until_the_first_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torusgd.locks.LOCK_SECONDS", 0.2)
    code = f"""
import pathlib, sys
from torusgd.rundir.run_dir import RunDir
with RunDir(pathlib.Path({str(tmp_path)!r})).lock():
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        in_use = f"--out {tmp_path}: in use by process {holder.pid} on "
        with pytest.raises(UserError, match=in_use), RunDir(tmp_path).lock():
            pass
        holder.kill()  # no word of farewell
    with RunDir(tmp_path).lock():
        assert (tmp_path / ".holder").read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / ".holder").exists()


def test_a_run_that_is_refused_before_its_first_step_leaves_no_trace(tmp_path: Path) -> None:
    def begin_in_vain(path: Path) -> None:
        with RunDir(path).lock():
            RunDir(path).claim(RECIPE, fresh=True)
            raise UserError("no such images")

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for path in (tmp_path / "above" / "new", tmp_path / "mine"):
        with pytest.raises(UserError):
            begin_in_vain(path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["above", "mine", "mine/notes.txt"]
    begun = run_in(tmp_path / "run")
    before = files(begun.path)
    with pytest.raises(UserError), begun.lock():
        raise UserError("no such images")
    assert files(begun.path) == before


def test_a_file_in_place_of_the_folder_is_one_line_and_a_full_disk_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    for path in (tmp_path / "out", tmp_path / "out" / "below"):
        with refused(f"to lock a file's {path.name}", f"--out {path}: ", PATH=path), RunDir(path).lock():
            pass
        refuses("to read a file as a run's folder", RunDir(path).data_revision, about=f"--out {path}: ", PATH=path)
    (tmp_path / "link").symlink_to("unmounted")
    for path in (tmp_path / "link", tmp_path / "link" / "below"):
        with refused(f"to lock a dangling link's {path.name}", f"--out {path}: ", TMP=tmp_path), RunDir(path).lock():
            pass
    (tmp_path / ".holder").symlink_to("/dev/full")
    with refused("a folder on a full disk", f"--out {tmp_path}", RunError, TMP=tmp_path), RunDir(tmp_path).lock():
        pass
    with RunDir(tmp_path).lock():  # the lock was given back
        pass


@pytest.mark.parametrize(
    ("path", "option"),
    [("/nfs/run", "nolock"), ("/lustre/run", "localflock"), ("/nfs4/run", ""), ("/lustre2/run", ""), ("/home/run", "")],
)
def test_a_mount_whose_locks_stay_on_this_host_is_named(path: str, option: str) -> None:
    mounts = """/dev/vda / ext4 rw,relatime 0 0
        server:/a /nfs nfs rw,vers=3,nolock,local_lock=none 0 0
        server:/a /nfs4 nfs4 rw,vers=4.2,local_lock=none 0 0
        mgs@tcp:/b /lustre lustre rw,localflock 0 0
        mgs@tcp:/b /lustre2 lustre rw,flock 0 0"""
    found = module.local_locks(Path(path), mounts.splitlines())
    assert option in found if option else not found
