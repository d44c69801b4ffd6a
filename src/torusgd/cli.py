"""The command line: sub-commands only, no logic."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __doc__ as about
from .errors import RunError, UserError

app = typer.Typer(help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in recipe's name, or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a key of the recipe; repeatable.")
]


@app.command()
def train(
    recipe: RecipeName,
    data: Annotated[Path | None, typer.Option(help="Folder or file of the data set.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/RECIPE.")] = None,
    workers: Annotated[int | None, typer.Option(help="Ranks to start here. Default: GPUs, else cores.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is a GPU.")] = None,
    overrides: Overrides = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps in all.")] = None,
    checkpoint_every: Annotated[str | None, typer.Option(help="Such as 50st, 1ep, 1e6sa. Default: 1ep.")] = None,
    init: Annotated[Path | None, typer.Option(help="Weights to start from, .safetensors or .pth.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier run in --out and begin anew.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")] = False,
) -> None:
    """Train a classifier from a recipe; the same command again resumes."""
    from .train.command import train as run

    flags = {
        "device": device, "workers": workers, "checkpoint_every": checkpoint_every, "tensorboard": tensorboard or None,
    }  # fmt: skip
    raise typer.Exit(run(recipe, overrides or [], flags, data, out, max_steps, init, fresh))


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Show this one with its source.")] = None) -> None:
    """List the built-in recipes, or show one with its source."""
    from .recipes import load_recipe, recipe_names, recipe_source

    if name is not None:
        typer.echo(recipe_source(name), nl=False)
        return
    width = max(map(len, recipe_names()))
    for each in recipe_names():
        typer.echo(f"{each:{width}}  {load_recipe(each).recipe.description}")


def main() -> None:
    """Runs the command line; a user's mistake is one line and exit code 2, another end of a run is 1."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app()
    except UserError as error:
        print(f"torusgd: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"torusgd: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
