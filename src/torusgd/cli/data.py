"""`torusgd data` and `torusgd recipes`: get public data sets, and look at any, and at recipes."""

import logging
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from typer import Argument

from ..errors import UserError, printable
from .options import flag
from .output import check_here, console


def fetch(
    name: Annotated[str, Argument(metavar="NAME", help="fashion-mnist")],
    out: Path | None = flag("Put it into this folder."),
) -> None:
    """Find or fetch a public data set, and check its files."""
    from ..data.fetch import fetch as get

    check_here("--out", out)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = get(name, out)
    typer.echo(f"{name} is in {folder}; train with --data {folder}")


def index(
    path: Annotated[Path, Argument(metavar="PATH", help="A folder of tar files: train-0000.tar, val-0000.tar ...")],
    out: Path | None = flag("Write the index to this file. Default: PATH/index.safetensors."),
    classes: Path | None = flag("Read the classes from this list, one a line. Default: PATH/classes.txt, if any."),
) -> None:
    """List where each image of a set of tar files lies, once, so that training can read any of them."""
    from ..data.file_lists import read_classes
    from ..data.tar_index import CLASSES, FILE, count_images, make_index, write_index

    check_here("PATH", path)
    check_here("--out", out)
    listed = classes or (path / CLASSES if (path / CLASSES).is_file() else None)
    with console().status(f"{path}: looking for images") as status:
        names = read_classes(listed) if listed else None
        arrays = make_index(path, names, progress=lambda done: status.update(f"{path}: {done:,} images"))
        write_index(out or path / FILE, arrays)
    counts = count_images(arrays)
    typer.echo(f"{out or path / FILE}: {counts['train']} training images, {counts['eval']} held out")


def pack(
    path: Annotated[Path, Argument(metavar="PATH", help="A data set's folder or file.")],
    out: Annotated[Path, Argument(metavar="OUT", help="A folder for the tar shards; the same again goes on.")],
    size: int | None = flag("Scale larger images to this shorter side, in pixels. Default: leave them.", min=1),
    quality: int = flag("Write JPEGs of this quality.", min=1, max=100, default=90),
    png: bool = flag("Write PNGs, whose pixels are the same on any machine.", default=False),
    images_per_shard: int = flag("Put this many images into a shard.", min=1, default=5000),
) -> None:
    """Copy a data set into tar shards with their index, large images scaled once."""
    from ..data.pack import Packing, pack
    from ..data.registry import open_any

    check_here("OUT", out)
    _, train, held_out = open_any(path)
    total = len(train) + len(held_out)
    with console().status(f"{out}: 0 of {total:,} images") as status:
        counts = pack(
            train, held_out, out, Packing(size, None if png else quality, images_per_shard),
            leave_out=lambda line: typer.echo(f"left out: {printable(line)}"),
            progress=lambda done: status.update(f"{out}: {done:,} of {total:,} images"),
        )  # fmt: skip
    lacking = total - sum(counts.values())  # undecodable images are named while they are met, and counted here
    typer.echo(f"{out}: {counts['train']} training images, {counts['eval']} held out; {lacking} can't be decoded")
    typer.echo(f"train with --set data.source=tar --data {quote(str(out))}")


def prepare(
    name: Annotated[str, Argument(metavar="NAME", help="imagenet")],
    path: Annotated[Path, Argument(metavar="PATH", help="The folder with the files as they are downloaded.")],
) -> None:
    """Make a data set that one must download oneself ready for training, and check that it is whole."""
    from ..data.fetch import prepare_imagenet
    from ..data.tar_index import count_images

    if name != "imagenet":
        raise UserError(f"data prepare: no data set {name!r}; there is imagenet")
    check_here("PATH", path)
    with console().status(f"{path}: looking for images") as status:
        arrays = prepare_imagenet(path, lambda done: status.update(f"{path}: {done:,} images"))
    counts = count_images(arrays)
    typer.echo(f"{path}: {counts['train']} training images and {counts['eval']} held out, as many as there should be")
    here = quote(str(path))
    typer.echo(f"train with --set data.source=tar --data {here}, or scale copies first: torusgd data pack {here} OUT")


def info(
    path: Annotated[Path, Argument(metavar="PATH", help="A data set's folder or file, or a recipe's name.")],
    check: bool = flag("Decode every image, and name those that are missing or can't be decoded.", default=False),
) -> None:
    """Describe a data set: its images, classes and sizes."""
    from ..data.registry import describe, undecodable

    for line in describe(path):
        typer.echo(printable(line))
    if check:
        bad = 0
        for bad, reason in enumerate(undecodable(path), 1):  # noqa: B007 - counted
            typer.echo(f"undecodable: {printable(reason)}")
        typer.echo(f"undecodable images: {bad}")


def recipes(
    name: Annotated[str | None, Argument(help="Show this one with its source.")] = None,
    keys: bool = flag("Print every key of a recipe, and what does not go with what, as Markdown.", default=False),
) -> None:
    """List the built-in recipes, show one with its source, or print every key."""
    from ..recipe.load import load_recipe, recipe_names, recipe_source
    from ..recipe.reference import reference

    if keys and name is not None:
        raise UserError(f"recipes {name} --keys: the keys are those of every recipe; leave out one of them")
    if keys:
        typer.echo(reference(), nl=False)
    elif name is not None:
        typer.echo(recipe_source(name), nl=False)
    else:
        width = max(map(len, recipe_names()))
        for each in recipe_names():
            typer.echo(f"{each:{width}}  {load_recipe(each).recipe.description}")
