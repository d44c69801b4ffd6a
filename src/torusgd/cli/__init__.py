"""The command line: one file a command, which reads its options, calls the library, and prints.

Modules here import torch, pydantic and what needs them only once a command runs, so that --help takes no seconds.
"""

import atexit
import os
import sys
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from ..errors import RunError, UserError, end, write_exit
from ..importing import remove_empty_cache
from ..ranks.slurm import adopt_step
from ..storage import check_scheme
from . import bench, control, data, eval, export, join, plan, recipes, rehearse, replay, report, simulate, train, tune

ABOUT = "Train image classifiers with large mini-batches on many machines, without losing accuracy."

OTHER_PRECISION = ("DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE")
"""with these oneDNN, which reads them when torch is imported, computes float32 in fewer bits than a recipe asks for"""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def show_version(asked: bool) -> None:
    """Prints the version of the installed package and ends the command."""
    if asked:
        print(f"torusgd {version('torusgd')}")
        raise typer.Exit


@app.callback(help=ABOUT)
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """What stands before a command."""


app.command()(train.train)
app.command()(join.join)
app.command()(replay.replay)
app.command()(control.status)
app.command()(control.stop)
app.command()(control.scale)
app.command("eval")(eval.evaluate)
app.command()(eval.polish)
app.command()(report.report)
app.command()(export.export)
app.command()(plan.plan)
app.command()(rehearse.rehearse)
app.command()(simulate.simulate)
app.command()(recipes.recipes)
app.command()(tune.tune)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")

_UsageError: Any = typer.BadParameter.__base__  # click's, of which some versions of typer hold a copy of their own


def main() -> None:
    """Runs the command line. No traceback but a defect's: a mistake is one line and exit code 2, another end is 1."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what goes wrong there comes back as an exception
    for name in OTHER_PRECISION:
        if os.environ.pop(name, None) is not None and os.environ.get("RANK", "0") == "0":
            print(f"torusgd: {name} is left aside: the recipe decides the precision", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":  # a name may have letters that it lacks
            stream.reconfigure(errors="backslashreplace")
    atexit.register(remove_empty_cache)
    try:
        for word in sys.argv[1:]:
            _check_word(word)
        adopt_step()
        code = app(standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        write_exit(code, "stopped; a checkpoint is written" if code else "done")
        sys.exit(code)
    except _UsageError as error:
        if not error.format_message():  # no command was given: typer has printed the help
            sys.exit(2)
        end(2, f"{error.format_message().rstrip('.')} (--help says what there is)")
    except UserError as error:
        end(2, str(error))
    except RunError as error:
        end(1, str(error))
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        _drop_output()
        end(1, str(error))


def _drop_output() -> None:
    """Lets what can't be written go nowhere: Python would try again at its end, and complain of it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_word(word: str) -> None:
    """UserError for a word of the command line that is none: it would be taken for the folder in which one stands."""
    flag, is_flag, value = word.partition("=") if word.startswith("--") else ("an argument", "=", word)
    if is_flag and not value:
        raise UserError(f"{flag}: is empty, as where a variable of the shell is not set; fill it in or leave it out")
    check_scheme(value)
