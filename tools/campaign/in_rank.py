"""Imported by the process that ranks are forked from: stacks on a signal, and a disk that a file makes slow."""

import faulthandler
import os
import signal
import time

FOLDER = "TORUSGD_CAMPAIGN"
"""variable of the environment with the folder of the two files"""

_folder = os.environ.get(FOLDER, "")
_fsync = os.fsync


def _slow_fsync(file: int) -> None:
    if os.path.exists(f"{_folder}/slow"):
        time.sleep(0.2)
    _fsync(file)


if _folder:
    faulthandler.register(signal.SIGUSR2, file=open(f"{_folder}/stacks", "a"), all_threads=True)  # noqa: SIM115
    os.fsync = _slow_fsync  # type: ignore[assignment]
