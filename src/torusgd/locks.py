"""One command at a time writes into a folder, and others can name it."""

# No torch here: `status` should not wait for its import.
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_NB, LOCK_SH, flock
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import UserError
from .untrusted import is_there

LOCK, HOLDER = ".lock", ".holder"  # files in the folder: the lock, and the name of its holder
LOCK_SECONDS = 10.0


@contextmanager
def held(folder: Path, name: str) -> Iterator[None]:
    """Locks an existing folder, `name` to the user, for the time of a block; the file LOCK stays there.

    UserError if another process, which it names, holds the lock for 10 s; OSError if the folder can't be written.
    """
    lock, holder = FileLock(folder / LOCK, timeout=LOCK_SECONDS), folder / HOLDER
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text().strip() if holder.exists() else "another command"
        raise UserError(f"{name}: in use by {who}; wait for it or choose another folder") from None
    try:
        holder.write_text(f"{this_process()}\n")
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"


def is_locked(folder: Path) -> bool:
    if not is_there(folder / LOCK):
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # this user may not write there, and a holder that was killed has left its name
        with suppress(OSError), (folder / LOCK).open("rb") as file:
            try:
                flock(file, LOCK_SH | LOCK_NB)
            except BlockingIOError:
                return True
            return False
        return (folder / HOLDER).exists()
