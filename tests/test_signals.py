"""Signals that ask for a stop, as a process of its own gets them."""

import sys

from tests.commands import ran

SWALLOWED = """
import os, signal, time
from torusgd.signals import Stopped, raise_on_stop

raise_on_stop(again=0.1)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except:  # as a module does that tries to import another one
    pass
try:
    time.sleep(60)
except Stopped as stop:
    print(stop.number)
"""


def test_a_stop_that_a_library_swallows_comes_again() -> None:
    assert ran([sys.executable, "-c", SWALLOWED]).stdout == "2\n"
