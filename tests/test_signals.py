"""Signals that ask for a stop, as a process of its own gets them."""

import os
import re
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

LASTING = """
import threading, time
from torusgd.signals import leave_within

threading.Thread(target=time.sleep, args=(60,)).start()
leave_within(0.1, 3)
"""


BROKEN = """
import os, signal, sys, types

def run_command():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
    raise AttributeError("what a stopped import left undone")

sys.modules["torusgd.cli"] = types.SimpleNamespace(main=run_command)
from torusgd.__main__ import main
main()
"""


def test_an_error_that_a_swallowed_stop_leads_to_is_a_stop() -> None:
    assert ran([sys.executable, "-c", BROKEN], code=143).stderr == "torusgd: stopped by SIGTERM\n"
    # One that ranks report comes without a signal to this process.
    reported = BROKEN.replace("os.kill(os.getpid(), signal.SIGTERM)", "0").replace(
        "raise Attrib", "raise Stopped(15) #"
    )
    script = f"from torusgd.signals import Stopped\n{reported}"
    assert ran([sys.executable, "-c", script], code=143).stderr == "torusgd: stopped by SIGTERM\n"
    failed = ran([sys.executable, "-c", BROKEN.replace("os.kill", "0 and os.kill")], code=1)
    assert "AttributeError: what a stopped import left undone" in failed.stderr


def test_a_thread_that_lasts_ends_with_a_line_a_swallowed_stop_comes_again_and_a_called_command_ends_nothing() -> None:
    kept = ran([sys.executable, "-c", LASTING], code=3, env=os.environ | {"RANK": "2"})
    assert re.fullmatch(r"torusgd: rank 2 on \S+ ends only now, 0.1 s after its work was done\n", kept.stderr)
    assert ran([sys.executable, "-c", SWALLOWED]).stdout == "2\n"
    called = "from torusgd import cli; import sys, threading\nsys.argv = ['torusgd', '--version']\n"
    ran([sys.executable, "-c", called + "try: cli.main()\nexcept SystemExit: assert threading.active_count() == 1"])
