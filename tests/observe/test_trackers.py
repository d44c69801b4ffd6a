"""Trackers get every step and evaluation once, however often a run is stopped and resumed."""

import json
import os
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.messages import assert_sentence, refuses
from tests.run.runs import events, run_here
from tests.step.trainers import job_of, run_of

from torusgd.errors import UserError
from torusgd.observe import trackers
from torusgd.observe.trackers import Tracker, Trackers, figures_of
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.rundir.run_dir import TRACKING_ID

Sent = Counter[tuple[str, int]]


class Memory(Tracker):
    """A tracker that keeps what it was sent, as a server does, or forgets what it has, as files do."""

    def __init__(self, sent: Sent, fails: bool = False, forgets: bool = False) -> None:
        self.sent, self.fails, self.forgets = sent, fails, forgets

    def has(self, kind: str, step: int) -> bool:
        return not self.forgets and (kind, step) in self.sent

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        if self.fails:
            raise ConnectionError("gone\nand more")
        assert all(isinstance(value, float) for value in figures.values())
        self.sent[kind, step] += 1

    def close(self, code: int) -> None:
        pass


def opened(names: list[str], folder: Path, warn: Callable[[str], object] = pytest.fail) -> Trackers:
    found = Trackers(names, warn)
    found.open(folder, {})
    return found


def train(out: Path, name: str, max_steps: int | None = None, fresh: bool = False) -> None:
    """In this process, with a tracker."""
    options = RuntimeOptions.model_validate({"track": (name,), "checkpoint_every": "2st"})
    run_of(job_of(options=options, out=out, max_steps=max_steps), fresh=fresh).run()


WHOLE = {("train", 1), ("train", 2), ("train", 3), ("train", 4), ("eval", 2), ("eval", 4), ("polished", 4)}


@pytest.fixture(scope="module")
def lines_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_here(folder)
    return folder / "events.jsonl"


def go_on(found: Trackers, folder: Path, held: list[str], taken: list[str]) -> None:
    """As a run does whose events have these lines, and then gets those."""
    (folder / "events.jsonl").write_text("".join(line + "\n" for line in held))
    found.open(folder, {})
    found.catch_up(folder / "events.jsonl")
    for line in taken:
        found.feed(json.loads(line))


def test_what_a_tracker_lacks_is_sent_and_nothing_twice(lines_of_a_run, tmp_path: Path, monkeypatch) -> None:
    sent, lines = Sent(), lines_of_a_run.read_text().splitlines()
    monkeypatch.setitem(trackers.MAKERS, "wandb", lambda folder, config: Memory(sent))
    for held, taken in ((0, 2), (1, 6), (2, len(lines))):  # a run goes back, takes steps again, and some new ones
        if held == 1:
            del sent["train", 1]  # it was under way when the process was killed
        found = Trackers(["wandb", "wandb"], pytest.fail)
        go_on(found, tmp_path, [*lines[:held], "damaged", "[]"], lines[held:taken])
        found.close()
    assert sent == dict.fromkeys(WHOLE, 1)


def test_trackers_stay_open_while_ranks_change(lines_of_a_run, tmp_path: Path, monkeypatch) -> None:
    sent, lines = Sent(), lines_of_a_run.read_text().splitlines()
    made = Mock(side_effect=lambda folder, config: Memory(sent, forgets=True))
    monkeypatch.setitem(trackers.MAKERS, "tensorboard", made)
    found = Trackers(["tensorboard"], pytest.fail)
    for held, taken in ((0, 3), (2, 5), (5, len(lines))):  # the second time a step back, and then on
        go_on(found, tmp_path, lines[:held], lines[held:taken])
        found.flush()
    found.close()
    made.assert_called_once()
    assert sent == dict.fromkeys(WHOLE, 1)


def test_a_tracker_that_fails_is_left_aside_with_one_line(lines_of_a_run, tmp_path: Path, monkeypatch) -> None:
    sent, lines = Sent(), list[str]()
    monkeypatch.setitem(trackers.MAKERS, "wandb", lambda folder, config: Memory(sent, fails=True))
    monkeypatch.setitem(trackers.MAKERS, "mlflow", lambda folder, config: Memory(sent))
    found = opened(["wandb", "mlflow"], tmp_path, lines.append)
    found.catch_up(lines_of_a_run)
    found.close()
    assert (set(sent), len(lines)) == (WHOLE, 1)
    assert_sentence("a tracker that fails", "--track wandb", lines[0])


def test_figures_of_a_diverged_step_are_left_out() -> None:
    event = {"step": 1, "loss": None, "lr": 0.1, "momentum": 0.9, "batch": 8, "epoch": 0.1}
    found = figures_of({**event, "step_seconds": 0.0, "data_seconds": 0.0, "sync_seconds": 0.0})
    assert found is not None
    assert "loss" not in found[1]
    assert figures_of({"event": "initial", "step": 0}) is None


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_one_line(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    for module in ("torch.utils.tensorboard", "wandb", "mlflow", "mlflow.entities"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    refuses(f"{name} is not installed", opened, [name], tmp_path, about=f"--track {name}")


def resumed_twice(out: Path, name: str) -> None:
    train(out, name, max_steps=2)
    train(out, name, max_steps=3)
    train(out, name)


def test_tensorboard_has_every_step_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    resumed_twice(tmp_path / "run", "tensorboard")
    board = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = board.Scalars("train/loss")
    assert [each.step for each in losses] == [1, 2, 3, 4]
    steps = [event for event in events(tmp_path / "run") if "event" not in event]
    assert [each.value for each in losses] == pytest.approx([step["loss"] for step in steps], rel=1e-6)
    assert [each.step for each in board.Scalars("eval/top1")] == [2, 3, 4]
    assert [each.step for each in board.Scalars("polished/top1")] == [4]


def records_of(data: bytes) -> Iterator[bytes]:
    """Of a .wandb file, which is a log as LevelDB writes it: blocks of 32 KiB of records or fragments of them."""
    whole, at = b"", 7
    while at + 7 <= len(data):
        left = (1 << 15) - at % (1 << 15)
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if left < 7 or kind == 0:
            at += left
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last fragment of one
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_offline_leaves_one_folder_with_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    resumed_twice(tmp_path / "run", "wandb")
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert path.stem == f"run-{(tmp_path / 'run' / TRACKING_ID).read_text().strip()}"
    sent = Sent()
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for kind in ("train", "eval", "polished"):
            if f"{kind}/step" in items:
                sent[kind, json.loads(items[f"{kind}/step"])] += 1
    assert sent == dict.fromkeys(WHOLE | {("eval", 3)}, 1)
    torch.manual_seed(0)
    train(tmp_path / "run", "wandb", fresh=True)
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
def test_mlflow_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    resumed_twice(tmp_path / "run", "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name(trackers.PROJECT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.params["recipe.name"]) == ("FINISHED", "digits")
    for name, steps in (("train/loss", [1, 2, 3, 4]), ("eval/top1", [2, 3, 4])):
        assert sorted(each.step for each in client.get_metric_history(run.info.run_id, name)) == steps


@pytest.mark.slow
def test_mlflow_wants_a_server_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    refuses("mlflow without an address", opened, ["mlflow"], tmp_path, about="--track mlflow")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")  # no pauses: the attempts are counted
    attempts = []

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            attempts.append(self.client_address)  # and hangs up

    with socketserver.TCPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(UserError) as caught:
            opened(["mlflow"], tmp_path)
        assert str(caught.value).startswith("--track mlflow")
        assert address in str(caught.value)
        server.shutdown()
    assert len(attempts) == 3
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ, "for a server that is busy later MLflow's own number"
