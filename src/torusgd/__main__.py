"""The console script, also as `python -m torusgd`: a stop that comes while modules are imported is one line, too."""

import signal
import sys

from .errors import tell_exit
from .signals import Stopped, exit_code, raise_on_stop


def main() -> None:
    """Runs the command line."""
    raise_on_stop()
    try:
        from .cli import main as run_command

        run_command()
    except Stopped as stop:
        signal.signal(stop.number, signal.SIG_IGN)  # it would be sent once more
        line = f"stopped by {signal.Signals(stop.number).name}"
        print(f"torusgd: {line}", file=sys.stderr)
        tell_exit(exit_code(stop.number), line)
        sys.exit(exit_code(stop.number))


if __name__ == "__main__":
    main()
