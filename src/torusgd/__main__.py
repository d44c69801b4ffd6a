"""The console script, also as `python -m torusgd`: a stop that comes while modules are imported is one line, too."""

import signal

from .errors import end
from .signals import Stopped, exit_code, raise_on_stop


def main() -> None:
    raise_on_stop()
    try:
        from .cli import main as run_command

        run_command()
    except Stopped as stop:
        signal.signal(stop.number, signal.SIG_IGN)  # it would be sent once more
        end(exit_code(stop.number), f"stopped by {signal.Signals(stop.number).name}")


if __name__ == "__main__":
    main()
