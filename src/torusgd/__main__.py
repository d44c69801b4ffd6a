"""The console script, also as `python -m torusgd`: a stop that comes while modules are imported is one line, too."""

import signal
import sys

from .signals import EXIT_BASE, Stopped, raise_on_stop


def main() -> None:
    """Runs the command line."""
    raise_on_stop()
    try:
        from .cli import main as run_command

        run_command()
    except Stopped as stop:
        signal.signal(stop.number, signal.SIG_IGN)  # it would be sent once more
        print(f"torusgd: stopped by {signal.Signals(stop.number).name}", file=sys.stderr)
        sys.exit(EXIT_BASE + stop.number)


if __name__ == "__main__":
    main()
