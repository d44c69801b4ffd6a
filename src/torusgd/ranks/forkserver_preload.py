"""What the process that ranks are forked from does once it has imported all that they need (`forkserver.PRELOAD`)."""

import atexit
import gc
import multiprocessing.forkserver
import os
from contextlib import suppress

from ..signals import remove_empty_cache

_PROCESS = os.getpid()


@atexit.register
def _leave_nothing() -> None:
    """Removes torch's own folder and the socket of this process, even if the launcher was killed."""
    if os.getpid() != _PROCESS:  # a rank, forked from here
        return
    remove_empty_cache()
    address = multiprocessing.forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if address:
        with suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))


gc.freeze()  # modules are no garbage: ranks share their pages, and the exit need not look through them (1 s)
