"""The console script, also as `python -m torusgd`: a stop that comes while modules are imported is one line, too."""

import signal

from .errors import end
from .signals import Stopped, exit_code, leave_within, raise_on_stop


def main() -> None:
    raise_on_stop()
    try:
        from .cli import main as run_command

        run_command()
    except SystemExit as done:
        leave_within(25.0, done.code if isinstance(done.code, int) else 1)
        raise
    except Stopped as stop:
        signal.signal(stop.number, signal.SIG_IGN)  # it would be sent once more
        end(exit_code(stop.number), f"stopped by {signal.Signals(stop.number).name}")


if __name__ == "__main__":
    main()
