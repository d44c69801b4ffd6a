"""What the process that ranks are forked from imports: all that ranks need, so that none of them takes the time."""

import gc

from . import local  # noqa: F401

gc.freeze()  # modules are no garbage: ranks share their pages, and the exit need not look through them (1 s)
