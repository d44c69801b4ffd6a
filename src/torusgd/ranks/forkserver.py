"""The process that ranks are forked from: it imports torch once for all of them, and for each restart."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import tempfile
import threading
import time

from ..errors import UserError
from ..signals import held_back
from ..text import plural

# By name, since this folder knows nothing of training: all that a run's ranks need, and what begins once it is there.
PRELOAD = ("torusgd.run.survival", "torusgd.ranks.forkserver_preload")
# Seconds for the kernel to report the end of a process whose pipes are closed.
_END_SECONDS = 2.0
# Processes and threads of a launcher, and of a rank on a CPU: of two ranks 30 suffice, and 20 don't.
_TASKS, _TASKS_OF_RANK = 8, 10


def start_forkserver(ranks: int = 1) -> None:
    """Starts it, unless it runs, before torch is imported here.

    UserError if so many ranks are more threads than are allowed, or if the temporary folder holds no socket.
    """
    check_threads(_TASKS + _TASKS_OF_RANK * ranks, f"for {plural(ranks, 'rank')}")
    multiprocessing.set_forkserver_preload([*PRELOAD])
    # Stop signals are held back in it, and in each rank until it takes them, so that a Ctrl-C, which reaches all
    # processes of a terminal, ends none of them half-way.
    with held_back():
        multiprocessing.resource_tracker.ensure_running()  # ends the holding back of two of them
    try:
        with held_back():
            multiprocessing.forkserver.ensure_running()
    except OSError as error:
        os.umask(mask := os.umask(0o077))
        if mask & 0o700:
            raise UserError(f"umask {mask:03o}: forbids you what you make yourself; umask 022 does not") from None
        what, remedy = "ranks are started by way of a socket there", "a folder with a short name that can be written"
        raise UserError(f"{tempfile.gettempdir()}: {what} ({error}); set TMPDIR to {remedy}") from None


def check_threads(wanted: int, what: str) -> None:
    """UserError if this user, service or container can't have so many threads more, for something."""
    # No number that could be read says so: limits are of a user, of a service and of each container around it. Without
    # a thread a rank dies in the middle of what it does, in torch's code or Python's.
    gate, there = threading.Event(), list[threading.Thread]()
    size = threading.stack_size(1 << 20)  # ARM refuses less than 128 KiB, and static TLS comes out of it
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=gate.wait, daemon=True)
            thread.start()
            there.append(thread)
    except RuntimeError:
        found = f"{plural(len(there), 'more thread')} can be started here, and {wanted} are needed {what}"
        raise UserError(f"ulimit -u: {found}; raise that limit, or the service's or container's of tasks") from None
    finally:
        threading.stack_size(size)
        gate.set()
        for thread in there:
            thread.join()


def forkserver_process() -> int:
    """The number of the process from which the last rank was forked; 0: there is none."""
    return multiprocessing.forkserver._forkserver._forkserver_pid or 0  # type: ignore[attr-defined]


def forkserver_has_ended(server: int) -> bool:
    """Whether somebody has ended a fork server, and so its ranks; the next start of a rank starts it anew."""
    if server != forkserver_process():  # another rank has been started since
        return True
    # Without reaping it, which is multiprocessing's business. Its pipes close a moment before its end is known.
    until, how = time.monotonic() + _END_SECONDS, os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not (has_ended := os.waitid(os.P_PID, server, how) is not None) and time.monotonic() < until:
        time.sleep(0.01)
    return has_ended
