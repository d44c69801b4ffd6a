"""Experiment trackers, all fed from one stream: the lines of events.jsonl. TensorBoard, Weights & Biases, MLflow.

A run that is resumed takes the steps after its last checkpoint again, and a killed process may not have sent its last
ones. So a tracker is never trusted to be where the run is: a server says what it has (MLflow, W&B), files (TensorBoard,
W&B offline) are written anew. One that fails later is switched off with a line: the next resume finds what it lacks.
"""

import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line, needs
from ..rundir.run_dir import TRACKING_ID
from ..untrusted import is_there, parse_json
from ..weights import write_text

# Of W&B, and the experiment of MLflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME is set.
PROJECT = "torusgd"


class Tracker(ABC):
    _sent: Mapping[str, int] = {}  # the last step of each kind that it got from earlier processes

    def has(self, kind: str, step: int) -> bool:
        """Whether figures of this kind (train, eval, polished) and step have been sent before."""
        return step <= self._sent.get(kind, -1)

    @abstractmethod
    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Takes figures, by their name without the kind."""

    def flush(self) -> None:  # noqa: B027 - for those that hold something back
        """Sends what is still under way, as far as this process holds it; more may follow."""

    @abstractmethod
    def close(self, code: int) -> None:
        """Sends what is still under way, and ends, as finished (0), failed (1) or stopped: the command's exit code."""


class Trackers:
    """The trackers of a run, opened once by the process that is rank 0; `warn` takes a line if one fails."""

    # To begin anew then would cost seconds, while all ranks wait, and a look through all events. Only if that very
    # process is lost does another one open them.

    def __init__(self, names: Sequence[str] = (), warn: Callable[[str], object] = lambda line: None) -> None:
        self._names, self._warn = tuple(dict.fromkeys(names)), warn
        self._open: dict[str, Tracker] | None = None
        # The last step of each kind that this process has handed over.
        self._fed: dict[str, int] = {}

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Opens all of them, unless they are open; UserError if one is not installed, or its server doesn't answer."""
        if self._open is None:
            self._open = {name: MAKERS[name](folder, config) for name in self._names}

    def catch_up(self, events: Path) -> None:
        """Sends what is missing of a run's events so far."""
        # The run has cut events.jsonl to its checkpoint. It is read from the start, and what a tracker lacks is sent;
        # from then on the run's events follow, again without those that it has.
        if self._open and is_there(events):
            with events.open() as file:
                for line in file:
                    with suppress(ValueError, KeyError, TypeError, AttributeError):  # somebody has changed the file
                        self.feed(parse_json(line))

    def feed(self, event: Mapping[str, Any]) -> None:
        """Sends an event to every tracker that does not have it."""
        found = figures_of(event) if self._open else None
        if found is None:
            return
        (kind, figures), step = found, event["step"]
        if step <= self._fed.get(kind, -1):  # taken again, since ranks were lost, or read from the file again
            return
        self._fed[kind] = step

        def log(tracker: Tracker) -> None:
            if not tracker.has(kind, step):
                tracker.log(kind, step, figures)

        self._each(log)

    def flush(self) -> None:
        """Sends what is under way; this process may end before it feeds them again."""
        self._each(lambda tracker: tracker.flush())

    def close(self, code: int = 0) -> None:
        self._each(lambda tracker: tracker.close(code))
        self._open = None

    def _each(self, call: Callable[[Tracker], object]) -> None:
        for name, tracker in list((self._open or {}).items()):
            try:
                call(tracker)
            except Exception as error:  # of any library: a run does not end because its tracker does
                assert self._open is not None
                del self._open[name]
                rest = "events.jsonl holds everything, and the next resume sends what is missing"
                self._warn(f"--track {name}: switched off, since it failed: {first_line(error)}; {rest}")


def figures_of(event: Mapping[str, Any]) -> tuple[str, dict[str, float]] | None:
    """Kind and figures of a line of events.jsonl; None if it has none."""
    name = event.get("event")
    if name is None:
        seconds = event["step_seconds"]
        figures = {key: event[key] for key in ("loss", "lr", "momentum", "batch", "epoch")}
        taken = event["batch"] - event.get("images_left_out", 0)
        figures |= {"images_per_second": taken / seconds if seconds else None}
        figures |= {f"{part}_wait_share": event[f"{part}_seconds"] / max(seconds, 1e-9) for part in ("data", "sync")}
        figures |= {"hidden_share": event.get("hidden_share")}
        kind = "train"
    elif name in ("evaluation", "polished"):
        figures = {key: event[key] for key in ("top1", "top5", "loss")}
        kind = "eval" if name == "evaluation" else name
    else:
        return None
    return kind, {key: float(value) for key, value in figures.items() if value is not None}


class TensorBoard(Tracker):
    """Files under `folder/tensorboard`, written anew whenever the run is resumed."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        with needs("--track tensorboard: not installed", "tensorboard (the extra tensorboard)"):
            from torch.utils.tensorboard import SummaryWriter
        for path in (folder / "tensorboard").glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, code: int) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of W&B, by WANDB_MODE=offline in a folder of its own under `folder/wandb`, which `wandb sync` uploads."""

    # Each kind has its step beside its figures, and not W&B's own step: that one refuses what comes a second time for
    # the same step, as an evaluation does. A process of W&B's own has all figures at once.
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        with needs("--track wandb: not installed", "wandb (the extra wandb)"):
            import wandb
        # Offline W&B can't resume: each process would leave another folder, and to upload all would double steps.
        for path in (folder / "wandb").glob("offline-run-*"):
            shutil.rmtree(path)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), id=_run_id(folder), name=folder.resolve().name,
                dir=str(folder), config=dict(config), resume="allow",
                settings=wandb.Settings(silent=True, console="off", disable_git=True),
            )  # fmt: skip
        except Exception as error:
            why = first_line(error).rstrip(".")
            raise UserError(f"--track wandb: {why}; give: wandb login, or set WANDB_MODE=offline") from None
        for kind in ("train", "eval", "polished"):
            self._run.define_metric(f"{kind}/step", hidden=True)
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        self._sent = {kind: int(self._run.summary.get(f"{kind}/step") or 0) for kind in ("train", "eval", "polished")}

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/step": step, **{f"{kind}/{name}": value for name, value in figures.items()}})

    def close(self, code: int) -> None:
        self._run.finish(exit_code=code)


class MLflow(Tracker):
    """A run on the server, or in the store, that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        with needs("--track mlflow: not installed", "mlflow-skinny (the extra mlflow)"):
            from mlflow.entities import Metric
            from mlflow.tracking import MlflowClient
        uri = "MLFLOW_TRACKING_URI"
        if not os.environ.get(uri):
            raise UserError(f"--track mlflow: say where the server is, such as {uri}=http://localhost:5000")
        self._metric, name = Metric, os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        try:
            self._client = MlflowClient()
            with _few_attempts():
                experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
            self._id = self._find_or_create(number, folder, config)
            self._client.update_run(self._id, status="RUNNING")
            self._sent = {kind: self._last(f"{kind}/{key}") for kind, key in _MARKS.items()}
        except Exception as error:
            raise UserError(f"--track mlflow: {first_line(error)}; {uri} is {os.environ[uri]}") from None

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        now = int(1e3 * time.time())
        metrics = [self._metric(f"{kind}/{name}", value, now, step) for name, value in figures.items()]
        # A thread of MLflow's own sends them in their order, so that no step waits for a server.
        self._client.log_batch(self._id, metrics=metrics, synchronous=False)

    def flush(self) -> None:
        import mlflow

        mlflow.flush_async_logging()

    def close(self, code: int) -> None:
        self.flush()
        self._client.set_terminated(self._id, {0: "FINISHED", 1: "FAILED"}.get(code, "KILLED"))

    def _find_or_create(self, experiment: str, folder: Path, config: Mapping[str, Any]) -> str:
        own = _run_id(folder)
        found = self._client.search_runs([experiment], f"tags.torusgd_run = '{own}'", max_results=1)
        if found:
            return found[0].info.run_id
        run = self._client.create_run(experiment, tags={"torusgd_run": own}, run_name=folder.resolve().name)
        for key, value in _flat(config):
            self._client.log_param(run.info.run_id, key, value[:500])
        return run.info.run_id

    def _last(self, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._id, name)), default=0)


@contextmanager
def _few_attempts() -> Iterator[None]:
    # MLflow would try eight times, in four minutes, which is meant for a busy server; a wrong address should be
    # reported at once. So it tries three times, in some 10 s, unless the environment says otherwise.
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    is_ours = name not in os.environ
    os.environ.setdefault(name, "2")
    try:
        yield
    finally:
        if is_ours:
            del os.environ[name]


# Of each kind a figure that every event has.
_MARKS = {"train": "lr", "eval": "top1", "polished": "top1"}

MAKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def _run_id(folder: Path) -> str:
    """The run's name with servers; drawn when it is first needed."""
    path = folder / TRACKING_ID
    if not is_there(path):
        write_text(path, secrets.token_hex(8) + "\n")
    return path.read_text().strip()


def _flat(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in tree.items():
        found += _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else [(f"{path}{key}", str(value))]
    return found
