"""Notes each call and return of a function in the folder WAYS_PACKAGE, in every process that finds this on its path.

Python imports a module of this name when it starts. A line goes to the file WAYS/PID: nanoseconds of the clock that all
processes share, thread, `>` for a call and `<` for a return (`!` if it gives None, as a return by an exception does),
file, function. Ranks are forked from a process that has been started like this, and go on to a file of their own.
Lines are written one by one, so what a killed process did is there too.
"""

import os
import sys
import threading
import time
from types import FrameType

_PACKAGE = os.environ["WAYS_PACKAGE"] + os.sep
_files: dict[str, str] = {}
"""by path, the part of it within the package; empty for other code"""


def _open() -> None:
    global _file  # noqa: PLW0603 - a profile function has no other place for it
    _file = os.open(f"{os.environ['WAYS']}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _note(frame: FrameType, event: str, value: object) -> None:
    if event in {"call", "return"}:
        path = frame.f_code.co_filename
        if (file := _files.get(path)) is None:
            file = _files[path] = path.removeprefix(_PACKAGE) if path.startswith(_PACKAGE) else ""
        if file:
            kind = ">" if event == "call" else "!" if value is None else "<"
            line = f"{time.monotonic_ns()}\t{threading.get_ident()}\t{kind}\t{file}\t{frame.f_code.co_qualname}\n"
            os.write(_file, line.encode())


_file = -1
_open()
os.register_at_fork(after_in_child=_open)
sys.setprofile(_note)
threading.setprofile(_note)
