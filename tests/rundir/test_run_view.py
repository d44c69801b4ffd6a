"""Runs in a bucket, looked at and used from another machine; the bucket is fsspec's in memory."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from tests.messages import refused
from tests.polling import until
from tests.run.runs import run_here

from torusgd.report.read_run import read_run
from torusgd.rundir import lease
from torusgd.rundir.mirror import Mirror
from torusgd.rundir.run_dir import RunDir
from torusgd.rundir.run_view import STATUS, STOP, WORKERS, RunView, local_run
from torusgd.storage import Store

URL = "memory://runs/digits one"


@pytest.fixture
def elsewhere(memory_bucket: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Moves to another machine, which is one with another cache."""
    monkeypatch.setattr(lease, "RENEW", 0.05)

    def move(name: str) -> None:
        monkeypatch.setenv("TORUSGD_CACHE", str(tmp_path / name))

    return move


def begin(mirror: Mirror) -> Path:
    """Two steps of a run that has not ended; the folder of their checkpoint, which the bucket has not."""
    run_here(mirror.folder, max_steps=2)
    for name in ("summary.json", "model.safetensors"):
        (mirror.folder / name).unlink()
    return mirror.folder / "checkpoints" / "step-00000002"


def test_what_a_finished_run_left_is_used_by_its_url(elsewhere, tmp_path: Path, run_cli, mistake) -> None:
    elsewhere("a")
    mirror = Mirror(URL)
    with mirror.held(fresh=False):
        summary, _ = run_here(mirror.folder)
        mirror.put_result()
    elsewhere("b")
    assert RunView(Path(URL)).read().reported["weights_sha256"] == summary["weights_sha256"]
    record = read_run(local_run(Path(URL)))
    assert (record.name, record.state, len(record.steps)) == ("digits one", "finished", 4)
    told = tmp_path / "told.json"
    code, out, _ = run_cli("eval", URL, "--json", told)
    assert code == 0
    assert f"top-1 {summary['top1']:.2%}" in out
    assert run_cli("eval", f"{URL}/model.safetensors")[0] == 0
    code, out, _ = run_cli("status", URL)
    assert (code, out.startswith("finished: 4 steps")) == (0, True)
    assert run_cli("report", URL, "--out", tmp_path / "report.html")[0] == 0
    for command in ("polish", "export", "replay", "stop"):
        mistake(command, URL)
    mistake("eval", "memory://runs/none")


def test_a_checkpoint_serves_until_the_run_is_done(elsewhere: Any) -> None:
    elsewhere("a")
    mirror = Mirror(URL)
    with mirror.held(fresh=False):
        mirror.put_checkpoint(begin(mirror), 2)
    elsewhere("b")
    assert (local_run(Path(URL)) / "checkpoints" / "step-00000002" / "model.safetensors").is_file()
    assert (local_run(Path(f"{URL}/checkpoints/step-00000002")) / "model.safetensors").is_file()
    assert RunView(Path(URL)).read().state == "gone"


def test_a_run_at_work_elsewhere_is_seen_and_asked(elsewhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere("a")
    mirror = Mirror(URL)
    with mirror.held(fresh=False):
        begin(mirror)
        with RunDir(mirror.folder).lock():
            assert RunView(Path(URL)).read().state == "running", "on the machine itself its folder's own lock tells"
        elsewhere("b")
        until(lambda: STATUS in Store(URL).sizes(), "its status is there")
        view = RunView(Path(URL))
        assert view.running("stop").reported["virtual_workers"] == 4
        view.request(STOP, "")
        view.request(WORKERS, "3")
        until(lambda: all((mirror.folder / name).exists() for name in (STOP, WORKERS)), "requests are here")
        assert (mirror.folder / WORKERS).read_text() == "3"
        assert {STOP, WORKERS}.isdisjoint(Store(URL).sizes())
        assert not any(name.startswith("checkpoints/") for name in Store(URL).sizes()), "all that was before the first"
    with Mirror(URL).held(fresh=False):
        pass  # another machine takes over a run that has no checkpoint yet
    with refused("a request to a run that is gone", view.name):
        view.running("scale")
