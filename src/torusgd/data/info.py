"""What lies in a folder or file of images, or what a recipe makes: `torusgd data info PATH`."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..hub import hub_name
from ..recipe.load import load_recipe, recipe_names
from ..storage import url_of
from ..text import plural
from .arrays import open_arrays
from .decode import Undecodable
from .encoded import EncodedImages
from .folder import open_folder
from .idx import open_idx
from .lists import open_folders, open_list
from .parquet import SUFFIXES, open_tables
from .shards import open_shards
from .sources import open_sources
from .types import CorruptImage, Source

_SAMPLE = 200  # pictures of which the size is read


@dataclass(frozen=True)
class DataInfo:
    """What `describe` found.

    Args:
        path: What was looked at: a path, or the name of a recipe.
        kind: The source to name in a recipe, such as folder or tar; or the one that the recipe names.
        images: Number of images by split, `train` and `eval`.
        classes: Names by label.
        per_class: Fewest and most training images of a class.
        sizes: Height and width, and how many images of the sample have them; the most frequent first.
        sampled: Images in that sample.
        channels: 1 or 3; encoded pictures count as 3, since their recipe chooses what pictures are converted to.
    """

    path: Path
    kind: str
    images: dict[str, int]
    classes: tuple[str, ...]
    per_class: tuple[int, int]
    sizes: tuple[tuple[tuple[int, int], int], ...]
    sampled: int
    channels: int

    def lines(self) -> list[str]:
        """For people."""
        names = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
        few, many = self.per_class
        sizes = ", ".join(f"{width} x {height} ({count})" for (height, width), count in self.sizes[:5])
        sizes += f", and {len(self.sizes) - 5} other sizes" if len(self.sizes) > 5 else ""
        return [
            f"{self.path}: data.source {self.kind}, {plural(self.channels, 'channel')}",
            f"images    {self.images['train']} for training, {self.images['eval']} held out",
            f"classes   {len(self.classes)}: {names}",
            f"per class {few} to {many} training images" if few != many else f"per class {few} training images",
            f"sizes     {sizes or 'none could be read'} (width x height, of {self.sampled} looked at)",
        ]


def describe(path: Path) -> DataInfo:
    """Kind, number of images, classes and sizes of a data set; pictures are not decoded.

    Args:
        path: A data set's, or the name of a built-in recipe that makes its images.

    Raises:
        UserError: The path holds no data set in a layout that is known, or a damaged one.
    """
    kind, train, held_out = open_any(path)
    counts = np.bincount(train.labels, minlength=len(train.classes))
    sample = np.linspace(0, len(train) - 1, min(_SAMPLE, len(train))).astype(int).tolist()
    sizes: Counter[tuple[int, int]] = Counter()
    for index in sample:
        try:
            sizes[train.size(index) if isinstance(train, EncodedImages) else train.read(index).shape[:2]] += 1
        except Undecodable:
            continue
    return DataInfo(
        path=path,
        kind=kind,
        images={"train": len(train), "eval": len(held_out)},
        classes=train.classes,
        per_class=(int(counts.min()), int(counts.max())),
        sizes=tuple(sizes.most_common()),
        sampled=len(sample),
        channels=3 if isinstance(train, EncodedImages) else train.read(0).shape[2],
    )


def undecodable(path: Path) -> Iterator[str]:
    """Decodes every image of a data set and names those that can't be.

    Raises:
        UserError: As `describe`.
    """
    _, *sources = open_any(path)
    for source in sources:
        for index in range(len(source)):
            try:
                source.read(index)
            except CorruptImage as error:
                yield error.reason


def open_any(path: Path) -> tuple[str, Source, Source]:
    """The kind of a data set, by its layout or by a recipe, and its training and held-out images."""
    if not path.exists() and str(path) in recipe_names():
        recipe = load_recipe(str(path)).recipe
        return recipe.data.source, *open_sources(recipe.data, None, recipe.seed)
    if hub_name(path) is not None:
        return "hf", *open_tables(path, channels=3, whole=False)
    if url_of(path) is not None:
        return "tar", *open_shards(path, channels=3)
    for kind, is_there, opened in _LAYOUTS:
        if is_there(path):
            return kind, *opened(path)
    raise UserError(
        f"{path}: no data set that is known; wanted is a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, one of"
        " such folders, one with lists (train.csv, val.csv), with tar files (train-0000.tar ...), with Parquet or Arrow"
        " files, with IDX files (train-images-idx3-ubyte.gz ...), or with train_images.npy ...; an .npz file;"
        " hf:ORG/NAME on the hub; or a built-in recipe that makes its own images, such as digits"
    )


def _holds(*patterns: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and any(any(path.glob(pattern)) for pattern in patterns)


_LAYOUTS: tuple[tuple[str, Callable[[Path], bool], Callable[[Path], tuple[Source, Source]]], ...] = (
    ("list", _holds("train.csv"), lambda path: open_list(path, channels=3)),
    ("tar", _holds("*.tar", "*/*.tar"), lambda path: open_shards(path, channels=3)),
    (
        "hf",
        _holds(*(f"{folder}*{suffix}" for folder in ("", "*/") for suffix in SUFFIXES)),
        lambda path: open_tables(path, channels=3, whole=False),
    ),
    ("folder", _holds("train/"), lambda path: open_folder(path, channels=3)),
    ("folders", _holds("*/train/"), lambda path: open_folders(path, channels=3)),
    ("arrays", lambda path: path.suffix == ".npz" or (path / "train_images.npy").is_file(), open_arrays),
    ("idx", _holds("train-images*idx3-ubyte*"), open_idx),
)
"""sources of files by their layout: the name of each, whether a path has it, and how it is opened"""
