"""A run whose folder is in a bucket: fsspec's in memory here; the slow tests have real servers that fail."""

import errno
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.commands import command, ran

pytest.importorskip("fsspec")

import torch
from tests.data.buckets import KINDS, bucket
from tests.disks import blind
from tests.messages import refuses
from tests.polling import until
from tests.run.processes import Process
from tests.run.runs import DIGITS_NET, TINY, run_here, sets

from torusgd.errors import RunError, UserError
from torusgd.recipe.load import load_recipe
from torusgd.report.read_run import read_run
from torusgd.rundir import lease
from torusgd.rundir.checkpoint import Checkpoint, CheckpointWriter, list_checkpoints, read_checkpoint, write_checkpoint
from torusgd.rundir.mirror import NAME, Mirror
from torusgd.rundir.run_dir import RunDir
from torusgd.rundir.run_view import REQUEST_OBJECT, STATUS, STOP, WORKERS, RunView, local_run
from torusgd.storage import Store
from torusgd.weights import write_text

URL = "memory://runs/digits one"


@pytest.fixture
def move(memory_bucket: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Moves to another machine, which is one with another cache; the run's mirror there."""
    monkeypatch.setattr(lease, "RENEW", 0.05)

    def to(name: str) -> Mirror:
        monkeypatch.setenv("TORUSGD_CACHE", str(tmp_path / name))
        return Mirror(URL, print)

    return to


@pytest.fixture
def machines(move: Any) -> Any:
    """Makes a mirror on a machine of its own, which has fetched what is in the bucket."""

    def machine(name: str, fresh: bool = False) -> Mirror:
        mirror: Mirror = move(name)
        with mirror.held(fresh):
            return mirror

    return machine


def advance(mirror: Mirror, step: int, keep: int = 2) -> None:
    RunDir(mirror.folder).claim(load_recipe("digits").recipe, fresh=False)
    with (mirror.folder / "events.jsonl").open("a") as file:
        file.write(f"{step}\n")
    checkpoint = Checkpoint({"model/w": torch.full((3,), 1.0), "momentum": torch.ones(3)}, {"step": step})
    mirror.put_checkpoint(write_checkpoint(mirror.folder / "checkpoints", checkpoint, {}), keep)


def requests_there() -> list[str]:
    return [name for name in Store(URL).sizes() if REQUEST_OBJECT.fullmatch(name)]


def newest(mirror: Mirror) -> int:
    return read_checkpoint(list_checkpoints(mirror.folder / "checkpoints")[0]).step


def test_another_machine_goes_on(machines: Any) -> None:
    first = machines("a")
    for step in (1, 2, 3):
        advance(first, step)
    steps = {name.split("/")[1] for name in Store(URL).sizes() if name.startswith("checkpoints")}
    assert steps == {"step-00000002", "step-00000003"}
    second = machines("b")
    assert (newest(second), (second.folder / "events.jsonl").read_text()) == (3, "1\n2\n3\n")
    advance(second, 4)
    assert (newest(machines("a")), (first.folder / "events.jsonl").read_text()) == (4, "1\n2\n3\n4\n")
    assert not (first.folder / "summary.json").exists()
    (first.folder / "summary.json").write_text("{}")
    first.put_result()
    assert (machines("c").folder / "summary.json").read_text() == "{}"


def test_a_machine_that_is_ahead_of_the_bucket_stays_so(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machines("a")
    advance(first, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "put_checkpoint", lambda *each: None)
        advance(first, 2)
    assert (newest(machines("a")), newest(machines("b"))) == (2, 1)


def test_what_cannot_be_looked_for_a_moment_is_neither_left_out_nor_replaced(machines: Any) -> None:
    first = machines("a")
    advance(first, 1)
    with (first.folder / "events.jsonl").open("a") as file:
        file.write("newer\n")
    with blind(first.folder / "events.jsonl"):
        refuses("a working folder that can't be looked at", machines, "a", kind=RunError, FOLDER=first.folder)
    assert (first.folder / "events.jsonl").read_text() == "1\nnewer\n"
    for name in ("summary.json", "model.safetensors"):
        (first.folder / name).write_text("{}")
    for name in ("summary.json", "model.safetensors"):
        with blind(first.folder / name), pytest.raises(RunError, match=f"{URL}: can't be written: Input/output error"):
            first.put_result()
        assert "summary.json" not in Store(URL).sizes()


def test_what_is_not_whole_is_not_taken(machines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first = machines("a")
    for step in (1, 2, 3):
        advance(first, step, keep=3)
    Store(URL).delete("checkpoints/step-00000003/manifest.json")  # it is being written, or deleted
    Store(URL).write("checkpoints/step-00000002/model.safetensors", b"stale")
    assert newest(machines("b")) == 1
    assert re.fullmatch(".*step-00000002.*is damaged.*\n", capsys.readouterr().out)
    Store(URL).delete("checkpoints/step-00000001/state.json")
    refuses("a bucket without a good checkpoint", machines, "c", about=URL, kind=RunError)


def test_a_run_that_was_begun_anew_elsewhere_is_another(machines: Any) -> None:
    for step in (1, 2, 3):
        advance(machines("a"), step)
    Store(URL).write("notes.txt", b"mine")
    second = machines("b", fresh=True)
    left = {name for name in Store(URL).sizes() if not lease.OBJECT.fullmatch(name)}
    assert left == {"notes.txt"}, "only what a run wrote is deleted"
    advance(second, 1)
    assert newest(machines("a")) == 1


def test_places_that_hold_something_else_are_refused(machines: Any) -> None:
    Store(URL).write("photo.jpg", b"x")
    refuses("a stranger's bucket", machines, "a", about=f"--out {URL}")
    machines("a", fresh=True)
    Store(URL).write("recipe.yaml", b"name: of somebody\n")
    refuses("a stranger's bucket with a recipe", machines, "a", fresh=True, about=f"--out {URL}")
    assert Store(URL).read("recipe.yaml") == b"name: of somebody\n"


def test_a_bucket_that_fails_is_told(machines: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    mirror = machines("a")
    advance(mirror, 1)
    (mirror.folder / "summary.json").write_text("{}")

    def fails(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("503 Slow Down")

    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    refuses("a bucket that takes no result", mirror.put_result, about=URL, kind=RunError)
    with pytest.raises(OSError, match="503"):
        advance(mirror, 2)
    writer = CheckpointWriter(mirror.folder / "checkpoints", 2, {}, partial(mirror.put_checkpoint, keep=2))
    writer.save(Checkpoint({"model/w": torch.ones(3)}, {"step": 3}))
    writer.wait()  # the run goes on: its disk has the checkpoint
    told = f"torusgd: {URL}/.run-name: can't be written: 503 Slow Down; step-00000003 is here alone, the next one"
    assert capsys.readouterr().err.startswith(told)

    def forbidden(*arguments: Any, **more: Any) -> None:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(MemoryFileSystem, "put_file", forbidden)  # which no time mends
    writer.save(Checkpoint({"model/w": torch.ones(3)}, {"step": 4}))
    refuses("a bucket that takes no checkpoint", writer.wait, about=URL, kind=RunError, FOLDER=mirror.folder)
    writer.close()
    monkeypatch.setattr(MemoryFileSystem, "find", fails)
    # At another time it may go through.
    refuses("a bucket that can't be used", machines, "a", about=f"--out {URL}", kind=RunError)
    assert (mirror.folder / NAME).exists()


def test_a_request_to_a_run_that_ended_before_it_saw_it_is_not_the_next_ones(machines: Any) -> None:
    advance(machines("a"), 1)
    RunView(Path(URL)).request(STOP, "")
    second = machines("b")
    assert not requests_there()
    assert newest(second) == 1


def test_a_request_that_comes_before_the_ranks_is_not_lost(machines: Any) -> None:
    mirror = machines("a")
    advance(mirror, 1)
    (mirror.folder / STATUS).write_text("{}")
    with mirror.held(fresh=False):
        Store(URL).write(f"{STOP}-{1:020}", b"")
        mirror._exchange()
        RunDir(mirror.folder).claim(load_recipe("digits").recipe, fresh=False)
        write_text(mirror.folder / STATUS, "{}")
        until(lambda: not requests_there(), "the request is here")
        assert (mirror.folder / STOP).exists()


def test_a_request_that_comes_as_another_is_read_is_not_lost(machines: Any, move: Any, monkeypatch: Any) -> None:
    mirror, read = machines("a"), Store.read
    advance(mirror, 1)
    (mirror.folder / STATUS).write_text("{}")
    move("b")
    view = RunView(Path(URL))
    view.request(WORKERS, "3")

    def read_as_another_comes(self: Store, name: str, *part: int) -> bytes:
        data = read(self, name, *part)
        view.request(WORKERS, "5")
        return data

    with monkeypatch.context() as patch:
        patch.setattr(Store, "read", read_as_another_comes)
        mirror._exchange()
    assert (mirror.folder / WORKERS).read_text() == "3"
    mirror._exchange()
    assert ((mirror.folder / WORKERS).read_text(), requests_there()) == ("5", [])


def test_a_run_that_was_copied_there_from_a_disk_goes_on(machines: Any) -> None:
    first = machines("a")
    advance(first, 1)
    Store(URL).delete(NAME)  # a run in a folder has none
    second = machines("b")
    assert newest(second) == 1
    advance(second, 2)
    assert newest(machines("a")) == 2


def test_a_copy_keeps_no_checkpoint_of_a_run_that_was_begun_anew(machines: Any, move: Any) -> None:
    advance(machines("a"), 5)
    move("c")
    local_run(Path(URL))
    advance(machines("b", fresh=True), 1)
    move("c")
    assert [path.name for path in list_checkpoints(local_run(Path(URL)) / "checkpoints")] == ["step-00000001"]


def test_a_full_disk_is_not_told_as_a_full_bucket(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    advance(machines("a"), 1)

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MemoryFileSystem, "get_file", full)
    refuses("a bucket and a full disk", machines, "b", about=f"--out {URL}", kind=RunError)


def test_what_came_until_a_connection_broke_does_not_stay(machines: Any, move: Any, monkeypatch, tmp_path) -> None:
    advance(machines("a"), 1)

    def breaks(self: Store, name: str, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.EIO, "the connection was cut")

    monkeypatch.setattr(Store, "get", breaks)
    move("b")
    with pytest.raises(UserError, match="the connection was cut"):
        local_run(Path(URL))
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []


def test_a_run_at_work_is_seen_though_a_clock_is_wrong(move: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(lease, "POLL", 0.05)
    mirror, modified = move("a"), MemoryFileSystem.modified
    with mirror.held(fresh=False):
        RunDir(mirror.folder).claim(load_recipe("digits").recipe, fresh=False)
        write_text(mirror.folder / STATUS, "{}")
        move("b")
        until(lambda: STATUS in Store(URL).sizes(), "its status is there")
        monkeypatch.setattr(MemoryFileSystem, "modified", lambda *each: modified(*each) - timedelta(hours=1))
        assert RunView(Path(URL)).read().state == "running"
    assert RunView(Path(URL)).read().state == "gone"


def test_parts_that_a_killed_run_left_go_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORUSGD_CACHE", str(tmp_path))
    monkeypatch.setattr(lease, "RENEW", 0.05)
    with bucket("s3", monkeypatch) as (_, root):
        client: Any = importlib.import_module("boto3").client("s3")
        for name in ("checkpoints/step-00000004/model.safetensors", "model.safetensors", "notes/model.safetensors"):
            about = {"Bucket": root.removeprefix("s3://"), "Key": f"a run/{name}"}
            upload = client.create_multipart_upload(**about)["UploadId"]
            client.upload_part(**about, UploadId=upload, PartNumber=1, Body=b"half")
        with Mirror(f"{root}/a run").held(fresh=False):
            left = client.list_multipart_uploads(Bucket=about["Bucket"])["Uploads"]
    assert [each["Key"] for each in left] == ["a run/notes/model.safetensors"], "a stranger's alone"


def test_a_web_server_holds_no_run(mistake: Any) -> None:
    mistake("train", "digits", "--out", "https://localhost/run")
    mistake("status", "https://localhost/run")
    mistake("eval", "http://localhost/model.safetensors")


def begin(mirror: Mirror) -> Path:
    """Two steps of a run that has not ended; the folder of their checkpoint, which the bucket has not."""
    run_here(mirror.folder, max_steps=2)
    for name in ("summary.json", "model.safetensors"):
        (mirror.folder / name).unlink()
    return mirror.folder / "checkpoints" / "step-00000002"


def test_what_a_finished_run_left_is_used_by_its_url(move, tmp_path: Path, run_cli, mistake) -> None:
    mirror = move("a")
    with mirror.held(fresh=False):
        summary, _ = run_here(mirror.folder, DIGITS_NET)
        mirror.put_result()
    move("b")
    assert RunView(Path(URL)).read().reported["weights_sha256"] == summary["weights_sha256"]
    record = read_run(local_run(Path(URL)))
    assert (record.name, record.state, len(record.steps)) == ("digits one", "finished", 4)
    for words, line in (
        (["eval", URL, "--json", tmp_path / "told.json"], f"{URL}/model.safetensors: top-1 {summary['top1']:.2%}"),
        (["eval", f"{URL}/model.safetensors"], f"{URL}/model.safetensors: top-1"),
        (["status", URL], "finished: 4 steps"),
        (["report", URL, "--out", tmp_path / "report.html"], ""),
    ):
        code, out, _ = run_cli(*words)
        assert (code, line in out) == (0, True)
    for name in ("polish", "export", "replay", "stop"):
        mistake(name, URL)
    Store(URL).delete("records.jsonl")
    mistake("verify", URL)
    Store(URL).write("events.jsonl", b"")
    Store(URL).write("model.safetensors", b"none")
    made = ["--out", tmp_path / "made"]
    for words in (["eval", URL], ["report", URL, "--mistakes", *made], ["export", URL, "--format", "torch", *made]):
        mistake(*words, TMP=tmp_path)
    mistake("export", URL, "--format", "mlperf", *made, TMP=tmp_path)
    mistake("eval", "memory://runs/none")


def test_a_checkpoint_serves_until_the_run_is_done(move: Any) -> None:
    mirror = move("a")
    with mirror.held(fresh=False):
        mirror.put_checkpoint(begin(mirror), 2)
    move("b")
    assert (local_run(Path(URL)) / "checkpoints" / "step-00000002" / "model.safetensors").is_file()
    assert (local_run(Path(f"{URL}/checkpoints/step-00000002")) / "model.safetensors").is_file()
    assert RunView(Path(URL)).read().state == "gone"


def test_a_run_at_work_elsewhere_is_seen_and_asked(move: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = move("a")
    with mirror.held(fresh=False):
        begin(mirror)
        with RunDir(mirror.folder).lock():
            assert RunView(Path(URL)).read().state == "running", "on the machine itself its folder's own lock tells"
        move("b")
        until(lambda: STATUS in Store(URL).sizes(), "its status is there")
        view = RunView(Path(URL))
        assert view.running("stop").reported["virtual_workers"] == 4
        view.request(STOP, "")
        view.request(WORKERS, "3")
        until(lambda: all((mirror.folder / name).exists() for name in (STOP, WORKERS)), "requests are here")
        assert (mirror.folder / WORKERS).read_text() == "3"
        assert not requests_there()
        assert not any(name.startswith("checkpoints/") for name in Store(URL).sizes()), "all that was before the first"
    with Mirror(URL).held(fresh=False):
        pass  # another machine takes over a run that has no checkpoint yet
    refuses("a request to a run that is gone", view.running, "scale", about=view.name)


def slowly(pause: float) -> list[str]:
    """What makes a run of 60 steps, whose images take `pause` seconds each; that changes no weight."""
    images = "image_size: 8, channels: 1, mean: [0.5], std: [0.25]"
    source = f"data={{source: 'tests.run.slow:Slow', options: {{pause: {pause}}}, {images}}}"
    return [source, "stages=[{until: 60st, images_per_worker: 3}]", "evaluate.every=null"]


def slow_run(out: str, pause: float, checkpoint_every: str) -> list[str]:
    """The words of such a run on two ranks."""
    changes = [*sets(*TINY, *slowly(pause)), "--workers", "2"]
    return ["train", "digits", *changes, "--out", out, "--checkpoint-every", checkpoint_every]


@pytest.fixture
def on(tmp_path: Path) -> Any:
    """Gives a command to another machine, which is one with another cache."""

    def run(machine: str, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return ran(command(*words), code=code, timeout=300, env=os.environ | {"TORUSGD_CACHE": str(tmp_path / machine)})

    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_a_bucket_on_another_machine(kind: str, on: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A real server that fails now and then; another launcher is kept out; a machine and its disk are lost."""
    expected = run_here(tmp_path / "folder", *slowly(0.0))[0]["weights_sha256"]
    with bucket(kind, monkeypatch, http_500=4, cut=6, stale=9, slow=5) as (_, root):
        out = f"{root}/a run"
        run = slow_run(out, 0.1, "5st")
        first = subprocess.Popen(command(*run), env={**os.environ, "TORUSGD_CACHE": str(tmp_path / "machine 1")})
        until(lambda: any(name.endswith("manifest.json") for name in Store(out).sizes()), "a checkpoint", pause=0.5)
        assert f"--out {out}: in use by process {first.pid} on " in on("machine 2", *run, code=2).stderr
        assert ", step " in on("machine 2", "status", out).stdout
        first.send_signal(signal.SIGKILL)
        first.wait(240)
        shutil.rmtree(tmp_path / "machine 1")
        done = on("machine 2", *run)
        assert "waiting 60 s for a sign of life" in done.stderr
        assert "resumed from the checkpoint of step" in done.stdout
        assert json.loads(Store(out).read("summary.json"))["weights_sha256"] == expected
        assert f"in {out}: model.safetensors" in done.stdout
        assert {"model.safetensors", "events.jsonl", "recipe.yaml"} <= Store(out).sizes().keys()
        assert expected in on("machine 3", *run).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_at_work_is_seen_scaled_and_stopped_from_another_machine(on: Any, tmp_path: Path, monkeypatch) -> None:
    expected = run_here(tmp_path / "folder", *slowly(0.0))[0]["weights_sha256"]
    with bucket("s3", monkeypatch) as (_, root):
        out = f"{root}/a run"
        run = slow_run(out, 0.4, "50st")
        first = Process(tmp_path / "told", *command(*run), environment={"TORUSGD_CACHE": str(tmp_path / "machine 1")})

        def status() -> str:
            return str(on("machine 2", "status", out, code=None).stdout)

        until(lambda: ", step " in status(), "a step", first, pause=3)
        assert "2 ranks, virtual workers " in status()
        assert on("machine 2", "resize", out, "--workers", "3").stderr == ""
        until(lambda: "3 ranks, virtual workers " in status(), "a third rank", first, pause=3)
        on("machine 2", "resize", out, "--workers", "9", code=2)
        done = on("machine 2", "stop", out)
        assert (done.stderr, f"{out}: the run was stopped after step " in done.stdout) == ("", True)
        assert first.end() == 128 + signal.SIGINT
        assert "stopped by torusgd stop; the same command goes on" in first.err
        assert ": the run was stopped after step " in status()
        done = on("machine 3", *run, "--workers", "4")
        assert "resumed from the checkpoint of step" in done.stdout
        assert expected in done.stdout
