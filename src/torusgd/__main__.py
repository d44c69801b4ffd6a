"""The console script, also as `python -m torusgd`: a stop that comes while modules are imported is one line, too."""

import signal

from .errors import end
from .signals import Stopped, end_on_stop, exit_code, leave_within, raise_on_stop


def main() -> None:
    came = raise_on_stop()
    try:
        from .cli import main as run_command

        run_command()
    except SystemExit as done:
        end_on_stop()
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
