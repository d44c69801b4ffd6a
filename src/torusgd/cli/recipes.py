"""`torusgd recipes`: the built-in recipes, and every key that a recipe has."""

from typing import Annotated

import typer
from typer import Argument

from .options import option


def recipes(
    name: Annotated[str | None, Argument(help="Show this one with its source.")] = None,
    keys: Annotated[
        bool, option("--keys", "Print every key of a recipe, and what does not go with what, as Markdown.")
    ] = False,
) -> None:
    """List the built-in recipes, show one with its source, or print every key."""
    from ..recipe.load import load_recipe, recipe_names, recipe_source
    from ..recipe.reference import reference

    if keys:
        typer.echo(reference(), nl=False)
        return
    if name is not None:
        typer.echo(recipe_source(name), nl=False)
        return
    width = max(map(len, recipe_names()))
    for each in recipe_names():
        typer.echo(f"{each:{width}}  {load_recipe(each).recipe.description}")
