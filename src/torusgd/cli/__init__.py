"""The command line: a function a command, which reads its options, calls the library, and prints.

Modules here import torch, pydantic and what needs them only once a command runs, so that --help takes no seconds.
"""

import atexit
import os
import sys
from collections.abc import Callable, Container, Mapping
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from ..errors import RunError, UserError, as_user_error, end, limit_failure, output_failure, write_exit
from ..ranks.slurm import adopt_step
from ..signals import remove_empty_cache
from ..storage import check_scheme
from ..text import NOT_INSTALLED, version_of
from . import bench, control, data, doctor, eval, export, plan, rehearse, train, verify
from .help import Command, Group
from .options import expand

ABOUT = "Train image classifiers with large mini-batches: the same weights, bit for bit, on any number of workers."

# By these oneDNN, which reads them when torch is imported, computes float32 in fewer bits than a recipe's.
OTHER_PRECISION = ("DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE")

Commands = Mapping[str, "Callable[..., object] | Commands"]
COMMANDS: Commands = {
    "train": train.train, "join": train.join, "replay": train.replay, "verify": verify.verify,
    "status": control.status, "stop": control.stop, "resize": control.resize,
    "eval": eval.evaluate, "polish": eval.polish, "report": export.report, "export": export.export,
    "plan": plan.plan, "rehearse": rehearse.rehearse, "simulate": rehearse.simulate, "recipes": data.recipes,
    "tune": bench.tune, "bench": {"allreduce": bench.allreduce, "scaling": bench.scaling},
    "data": {"fetch": data.fetch, "index": data.index, "pack": data.pack, "prepare": data.prepare, "info": data.info},
    "doctor": doctor.doctor,
}  # fmt: skip
HELP = {"bench": "Measure what a run is made of, on these ranks.", "data": "Get and look at data sets."}


def app(words: Container[str] = COMMANDS) -> typer.Typer:
    """The command line, with the options of the commands that are among the words."""
    # The others have only the line that `torusgd --help` shows, so that it takes no seconds.
    found = typer.Typer(cls=Group, rich_markup_mode=None, pretty_exceptions_enable=False)
    found.callback(help=ABOUT)(common)
    for name, command in COMMANDS.items():
        if name not in words:
            text = command.__doc__ if callable(command) else HELP[name]
            found.command(name, cls=Command, help=text)(lambda: None)
        elif callable(command):
            found.command(name, cls=Command)(expand(command, name))
        else:
            group = typer.Typer(cls=Group, help=HELP[name])
            for inner, each in command.items():
                assert callable(each)
                group.command(inner, cls=Command)(expand(each, f"{name} {inner}"))
            found.add_typer(group, name=name)
    return found


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"torusgd {version_of() or NOT_INSTALLED}")
        raise typer.Exit


def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """The options before a command."""


_UsageError: Any = typer.BadParameter.__base__  # click's, of which some versions of typer hold a copy of their own


def main() -> None:
    """Runs the command line. No traceback but a defect's: a mistake is one line and exit code 2, another end is 1."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what goes wrong there comes back as an exception
    for name in OTHER_PRECISION:
        if os.environ.pop(name, None) is not None and os.environ.get("RANK", "0") == "0":
            print(f"torusgd: {name} is ignored: the recipe decides the precision", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":  # a name may have letters that it lacks
            stream.reconfigure(errors="backslashreplace")
    atexit.register(remove_empty_cache)  # parts of torch make a folder in /tmp when they are imported
    try:
        with as_user_error("the current folder can't be used", "cd to one that is there"):
            os.getcwd()  # without one the fork server fails, and oneMKL ends whoever imports torch by a line of its own
        for word in sys.argv[1:]:
            # An empty word would be taken for the folder in which one stands.
            flag, is_flag, value = word.partition("=") if word.startswith("--") else ("an argument", "=", word)
            if is_flag and not value:
                raise UserError(f"{flag}: is empty, as if a shell variable is not set; fill it in or leave it out")
            check_scheme(value)
        adopt_step()
        # Typer would end the process itself, before the line for schedulers is written.
        # A shell that completes a line hands the line over by its variables.
        words = [*sys.argv[1:], *os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()]
        code = app(words)(standalone_mode=False) or 0
        sys.stdout.flush()
        write_exit(code, "stopped; a checkpoint is written" if code else "done")
        sys.exit(code)
    except _UsageError as error:
        end(2, f"{error.format_message().rstrip('.')} (--help says what there is)")
    except (UserError, RunError) as error:
        end(2 if isinstance(error, UserError) else 1, str(error))
    except (ImportError, RuntimeError) as error:  # a module that is missing is named where it is needed
        if (line := limit_failure(error)) is None:
            raise
        end(1, line)
    except BrokenPipeError:  # the reader, such as head, has seen enough: no word about it
        _drop_output()
        sys.exit(1)
    except OSError as error:
        line = output_failure(error) or str(error)
        _drop_output()
        end(1, line)


def _drop_output() -> None:
    """Lets what can't be written go nowhere: Python would try again at its end, and complain of it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
