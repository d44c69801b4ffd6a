"""Imported by the process that ranks are forked from: stacks on a signal, a slow disk, ranks that wait to be struck."""

import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import torch._dynamo  # noqa: F401  # which portable arithmetic imports: each rank took most of its time for it

from torusgd.ranks.liveness import Heartbeat

FOLDER = "TORUSGD_CAMPAIGN"
"""variable of the environment with the folder of all files"""
_folder = Path(os.environ.get(FOLDER, ""))
_fsync, _progress = os.fsync, Heartbeat.progress


def _slow_fsync(file: int) -> None:
    if (_folder / "slow").exists():
        time.sleep(0.2)
    _fsync(file)


def _await_event(self: Heartbeat, phase: str, step: int, unit: int) -> None:
    """A rank's progress. From the drawn moment on each unit takes longer: small runs would be over before the event."""
    _progress(self, phase, step, unit)
    try:
        wanted, at, seconds = json.loads((_folder / "moment").read_text())
    except OSError:  # there is no event, or it has struck
        return
    if step > at or (step == at and wanted in (phase, "any")):
        (_folder / "reached").touch()
        until = time.monotonic() + seconds
        while (_folder / "moment").exists() and time.monotonic() < until:
            time.sleep(0.005)


if os.environ.get(FOLDER):
    faulthandler.register(signal.SIGUSR2, file=(_folder / "stacks").open("a"), all_threads=True)
    os.fsync = _slow_fsync  # type: ignore[assignment]
    Heartbeat.progress = _await_event  # type: ignore[method-assign]
