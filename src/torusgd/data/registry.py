"""The two sources of a recipe, training and held-out, by the name in `data.source`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..hub import hub_name
from ..importing import import_factory
from ..recipe.data_schema import Data
from ..recipe.section import sides
from ..storage import url_of
from .arrays import open_arrays, open_digits
from .file_lists import Once, make_here
from .frames import open_frames
from .idx import open_idx
from .lists import open_folders, open_list
from .parquet import open_tables
from .pictures import open_folder
from .synthetic import open_synthetic
from .tar import open_shards
from .types import ArraySource, FileSource, ForeseeingSource, GpuSource, MarkedSource, RegionSource, Source


class First:
    """The first `count` images of a source, with whatever the source can do beyond `read`."""

    def __init__(self, source: Source, count: int) -> None:
        self.classes = source.classes
        self.labels = source.labels[:count]
        self.read = source.read
        if isinstance(source, ArraySource):
            self.shape = source.shape
            self.read_many = source.read_many
        if isinstance(source, RegionSource):
            self.read_region = source.read_region
        if isinstance(source, GpuSource):
            self.decode_with, self.together = source.decode_with, source.together
        if isinstance(source, FileSource):
            self.names, self.file = source.names[:count], source.file
        if isinstance(source, MarkedSource):
            self.mark = source.mark
        if isinstance(source, ForeseeingSource):
            self.expect = source.expect

    def __len__(self) -> int:
        return len(self.labels)


Pair = tuple[Source, Source]


def _digits(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    if path is not None:
        raise UserError(f"data.source: digits come with scikit-learn and take no --data, got {path}")
    return open_digits(**options(data))


def _synthetic(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    height, width = sides(data.resize or data.image_size)
    return open_synthetic(*_amounts(data), (height, width, data.channels), seed, **options(data, "noise"))


def _frames(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    if data.resize is not None:
        raise UserError("data.resize: frames are made at data.image_size, [frames, values of a frame]; leave it null")
    return open_frames(*_amounts(data), sides(data.image_size), seed, **options(data, "noise"))


def _amounts(data: Data) -> tuple[int, int, int]:
    """Training and held-out images and classes, for a source that makes as many as the recipe asks for."""
    if data.train_images is None or data.eval_images is None or data.classes is None:
        raise UserError(f"data.source: {data.source} needs data.train_images, data.eval_images and data.classes")
    return data.train_images, data.eval_images, data.classes


def _idx(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    return open_idx(needed(path, data.source), **options(data, "names"))


def _arrays(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    return open_arrays(needed(path, data.source), once=once, **options(data, "names"))


def _folder(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    return open_folder(needed(path, data.source), data.channels, once=once, **options(data, "classes"))


def _tar(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    return open_shards(needed(path, data.source), data.channels, **options(data, "index"))


def _list(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    return open_list(needed(path, data.source), data.channels, once=once, **options(data, "train", "eval", "classes"))


def _folders(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    return open_folders(needed(path, data.source), data.channels, once=once, **options(data, "classes"))


def _hf(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    return open_tables(needed(path, data.source), data.channels, **options(data, "image", "label", "subset"))


def _factory(data: Data, path: Path | None, seed: int, once: Once) -> Pair:
    factory = import_factory(data.source, key="data.source")
    pair = tuple(factory(path, split=split, **data.options) for split in ("train", "eval"))
    for source in pair:
        if not isinstance(source, Source):
            raise UserError(
                f"data.source: {data.source} gave a {type(source).__name__}, which is no torusgd.data.Source"
                " (classes, labels, __len__, read)"
            )
    return pair[0], pair[1]


SOURCES: dict[str, Callable[[Data, Path | None, int, Once], Pair]] = {
    "digits": _digits,
    "synthetic": _synthetic,
    "frames": _frames,
    "idx": _idx,
    "arrays": _arrays,
    "folder": _folder,
    "folders": _folders,
    "list": _list,
    "tar": _tar,
    "hf": _hf,
}
PICTURES = ("folder", "folders", "list", "tar", "hf")
"""those of JPEG and PNG files"""


def open_sources(data: Data, path: Path | None, seed: int, once: Once = make_here) -> Pair:
    """The training and the held-out images that a recipe's `data` names.

    Args:
        data: The recipe's section.
        path: The folder or file of `--data`; None where the source needs none.
        seed: The recipe's seed; it makes the images of `synthetic` and `frames` and touches no other source.
        once: Who lists files and unpacks arrays, of several processes that open the same.

    Raises:
        UserError: The path, its layout, an option, the number of images, classes or channels is not what the
            recipe says, or a package is missing.
    """
    if data.source not in SOURCES and ":" not in data.source:
        raise UserError(
            f"data.source: no source {data.source!r}; take {', '.join(SOURCES)}, or package.module:factory of your own"
        )
    for place, reads in ((url_of(path), "tar"), (hub_name(path), "hf")):
        if place is not None and data.source != reads:
            raise UserError(f"--data {place}: only data.source {reads} reads from there, not {data.source}")
    if path is not None and url_of(path) is None and hub_name(path) is None and not path.exists():
        raise UserError(f"--data {path}: there is no such file or folder")
    train, held_out = SOURCES.get(data.source, _factory)(data, path, seed, once)
    for source, word in ((train, "training"), (held_out, "held-out")):
        _check(source, word, data)
    if train.classes != held_out.classes:
        raise UserError(f"data.source: {data.source} has other classes in training than in held-out images")
    return _first(train, data.train_images, "train_images"), _first(held_out, data.eval_images, "eval_images")


def _check(source: Source, word: str, data: Data) -> None:
    classes, labels = len(source.classes), source.labels
    if len(source) == 0:
        raise UserError(f"data.source: {data.source} has no {word} images")
    if data.classes is not None and classes != data.classes:
        raise UserError(f"data.classes: the recipe says {data.classes}, the {word} images have {classes}")
    if len(labels) != len(source) or labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"data.source: labels of the {word} images must be {len(source)} numbers in 0..{classes - 1}")
    if isinstance(source, ArraySource) and 0 in source.shape:
        raise UserError(
            f"data.source: the {word} images of {data.source} have no pixels, their shape is {source.shape}"
        )
    if isinstance(source, ArraySource) and source.shape[2] != data.channels:
        raise UserError(
            f"data.channels: the recipe says {data.channels}, the {word} images have {source.shape[2]};"
            f" set data.channels, data.mean and data.std for {source.shape[2]}"
        )


def _first(source: Source, count: int | None, key: str) -> Source:
    if count is None or count == len(source):
        return source
    if count > len(source):
        raise UserError(f"data.{key}: the recipe wants {count} images, the source has {len(source)}")
    return First(source, count)


def options(data: Data, *known: str) -> dict[str, Any]:
    """The recipe's options for a source that knows these names."""
    for key in data.options:
        if key not in known:
            allowed = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UserError(f"data.options.{key}: the source {data.source} has no such option; {allowed}")
    return dict(data.options)


def needed(path: Path | None, source: str) -> Path:
    """The path, for a source that can't do without."""
    if path is None:
        raise UserError(f"data.source: {source} reads files; say where they are with --data PATH")
    return path
