"""The console script, also as `python -m torusgd`: a stop that comes while modules are imported is one line, too."""

import os
import signal
import sys
from contextlib import suppress

from .errors import end
from .signals import Stopped, end_on_stop, exit_code, leave_within, raise_on_stop


def _open_standard_files() -> None:
    """Opens /dev/null as what was closed of standard input, output and error: else another file takes its number."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        os.set_inheritable(number, True)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115 - to the end


def main() -> None:
    _open_standard_files()
    came = raise_on_stop()
    try:
        from .cli import main as run_command

        run_command()
    except SystemExit as done:
        end_on_stop()
        with suppress(RuntimeError):  # no thread may be started: none is there that could keep this process
            leave_within(25.0, done.code if isinstance(done.code, int) else 1)
        raise
    except (Stopped, Exception) as error:
        # Else a module that was being imported has caught the stop, and failed by what it left undone.
        stops = [error.number] if isinstance(error, Stopped) else came
        if not stops:
            raise
        number = stops[0]
        signal.signal(number, signal.SIG_IGN)  # it would be sent once more
        end(exit_code(number), f"stopped by {signal.Signals(number).name}")


if __name__ == "__main__":
    main()
