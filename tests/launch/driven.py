"""A run whose launcher is in this process, while a thread does something to it; its ranks are processes."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from tests.polling import until
from tests.run.processes import is_alive, last_step, results, wait_for_end

from torusgd.launch import local
from torusgd.launch.local import Entrance, launch
from torusgd.ranks import supervisor
from torusgd.ranks.rank import start_rank
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.job import Job
from torusgd.run.saving import RunResult
from torusgd.runtime import resolve_auto


def job_of(out: Path, recipe: Path, *overrides: str, **options: Any) -> Job:
    return Job(resolve_auto(load_recipe(str(recipe), overrides).recipe, "cpu"), RuntimeOptions(**options), "cpu", out)


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)
    wait_for_end(pids)


def noting(started: list[BaseProcess]) -> Callable[[Any], BaseProcess]:
    """`start_rank`, which notes the processes that it starts."""

    def start(spec: Any) -> BaseProcess:
        started.append(start_rank(spec))
        return started[-1]

    return start


class Driven:
    """A run in this thread, while a function in another does something to it; if that fails, the run may `give_up`."""

    def __init__(
        self, job: Job, drive: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, entrance: Entrance | None = None
    ) -> None:
        self.lines: list[str] = []
        self.job, self._drive, self._error = job, drive, list[BaseException]()
        self.started = list[BaseProcess]()
        """the launcher's ranks, by number"""
        monkeypatch.setattr(local, "warn", self.lines.append)
        monkeypatch.setattr(supervisor, "start_rank", noting(self.started))
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        self.result: RunResult = launch(job, False, entrance)
        thread.join(240)
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            self._drive(self)
        except BaseException as error:
            self._error.append(error)
            self.give_up()

    def ended_as(self, expected: dict[str, Any]) -> dict[str, Any]:
        """The run's summary, which has these results."""
        assert results(self.result.summary) == expected
        return self.result.summary

    def give_up(self) -> None:
        """Lets the run come to its end."""

    def until(self, check: Callable[[], Any]) -> Any:
        return until(check, "what was waited for", state=lambda: "\n".join([*self.lines, str(self.status())]))

    def reach(self, step: int) -> None:
        self.until(lambda: last_step(self.job.out) >= step)

    def line(self, text: str) -> str:
        """Waits for a line of the launcher that holds this text."""
        return self.until(lambda: next((line for line in self.lines if text in line), ""))

    def status(self) -> dict[str, Any]:
        """What status.json holds; nothing before it is there."""
        try:
            return json.loads((self.job.out / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def shares(self) -> dict[str, int]:
        """By rank, as `torusgd status` tells."""
        return self.status().get("shares", {})

    def pid(self, rank: int) -> int:
        self.until(lambda: len(self.started) > rank)
        return self.started[rank].pid or 0

    def ranks(self) -> list[int]:
        """The process ids of the launcher's ranks that live."""
        return [pid for each in self.started if is_alive(pid := each.pid or 0)]
