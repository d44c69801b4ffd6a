"""The kinds of data sets: how each is opened and recognised, which options it takes, what it holds, and its hash."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import UserError, as_user_error
from ..hub import hub_name
from ..recipe.data_schema import Data
from ..recipe.load import import_factory, load_recipe, recipe_names
from ..recipe.section import Options, sides
from ..rng import DATA_SAMPLE, VALIDATION, keyed_integer, keyed_permutation
from ..storage import url_of
from ..text import plural
from .arrays import open_digits, open_mnist, open_numpy
from .decode import EncodedImages, Undecodable, nvjpeg, picture_size
from .file_lists import Once, make_here
from .parquet import SUFFIXES, TableImages, check_memory, open_tables
from .pictures import open_csv, open_folder, open_folders
from .synthetic import Frames, Synthetic
from .tar import open_shards
from .types import ArraySource, CorruptImage, Int64, Pixels, RegionSource, Source

Pair = tuple[Source, Source]  # training and held-out images
_SAMPLE = 200  # pictures whose size `describe` reads
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # where a list names one
_HASHED = 32  # images in the sample of each split


class Files(NamedTuple):
    open: Callable[..., Pair]  # parameters: path, and channels and once if it needs them; all others are options
    is_at: Callable[[Path], bool]  # recognises the layout
    has_pictures: bool = True  # JPEG and PNG bytes


def _holds(*patterns: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and any(any(path.glob(pattern)) for pattern in patterns)


_TABLES = tuple(f"{folder}*{suffix}" for folder in ("", "*/") for suffix in SUFFIXES)
# In the order in which a layout is looked for: a folder of lists or of tables may have a folder `train` as well.
FILES = {
    "csv": Files(open_csv, _holds("train.csv")),
    "tar": Files(open_shards, _holds("*.tar", "*/*.tar")),
    "parquet": Files(open_tables, _holds(*_TABLES)),
    "folder": Files(open_folder, _holds("train/")),
    "folders": Files(open_folders, _holds("*/train/")),
    "numpy": Files(open_numpy, lambda path: path.suffix == ".npz" or (path / "train_images.npy").is_file(), False),
    "mnist": Files(open_mnist, _holds("train-images*idx3-ubyte*"), False),
}
PICTURES = tuple(name for name, kind in FILES.items() if kind.has_pictures)


def _made(data: Data, seed: int, noise: float = 0.5) -> Pair:
    """Training and held-out images of the same classes, as many as the recipe says."""
    if data.train_images is None or data.eval_images is None or data.classes is None:
        raise UserError(f"data.source: {data.source} needs data.train_images, data.eval_images and data.classes")
    if isinstance(noise, bool | str) or not 0 <= noise <= 1:
        raise UserError(f"data.options.noise: a number from 0 to 1, got {noise!r}")
    if data.source == "frames" and data.resize is not None:
        raise UserError("data.resize: frames are made at data.image_size, [frames, values of a frame]; leave it null")
    kind, size = Synthetic if data.source == "synthetic" else Frames, sides(data.resize or data.image_size)
    shape, amount = (*size, data.channels), round(noise * 256)
    key = data.classes, shape, seed
    return kind(data.train_images, *key, 0, amount), kind(data.eval_images, *key, 1, amount)


# Sources that need no path; parameters other than data and seed are options.
MADE: dict[str, Callable[..., Pair]] = {"digits": open_digits, "synthetic": _made, "frames": _made}
SOURCES = (*MADE, *FILES)


def check_path(name: str, path: Path | None) -> None:
    """UserError if the source of this name can't read from the path of `--data`, or nothing is there."""
    for place, reader in ((url_of(path), "tar"), (hub_name(path), "parquet")):
        if place is not None and name != reader:
            raise UserError(f"--data {place}: only data.source {reader} reads from there, not {name}")
    if path is not None and url_of(path) is None and hub_name(path) is None and not path.exists():
        raise UserError(f"--data {path}: there is no such file or folder")
    if name == "digits" and path is not None:
        raise UserError(f"data.source: digits come with scikit-learn and take no --data, got {path}")


def open_sources(data: Data, path: Path | None, seed: int, once: Once = make_here) -> Pair:
    """The training and the held-out images that a recipe's `data` names; `path` is that of `--data`, if it needs one.

    Only `synthetic` and `frames` use the seed. `once` decides which of several processes lists files and unpacks
    arrays. UserError if the data are not what the recipe says, or a package is missing.
    """
    name = data.source
    check_path(name, path)
    if name in FILES:
        if path is None:
            raise UserError(f"data.source: {name} reads files; say where they are with --data PATH")
        pair = _opened(data, path, once)
        check_memory(path, [each for each in pair if isinstance(each, TableImages)])
    elif name in MADE:
        make = MADE[name]
        pair = make(**_arguments(make, name, data.options, data=data, seed=seed))
    elif ":" in name:
        pair = _own(data, path)
    else:
        own = "or package.module:factory of your own"
        raise UserError(f"data.source: no source {name!r}; take {', '.join(SOURCES)}, {own}")
    for source, word in zip(pair, ("training", "held-out"), strict=True):
        _check(source, word, name)
        _check_recipe(source, word, data)
    if pair[0].classes != pair[1].classes:
        raise UserError(f"data.source: {name} has other classes in training than in held-out images")
    train = _first(pair[0], data.train_images, "train_images")
    held_out = _first(pair[1], data.eval_images, "eval_images")
    return (train, held_out) if data.validation_images is None else _validation(train, data.validation_images)


def _opened(data: Data, path: Path, once: Once) -> Pair:
    files = FILES[data.source]
    arguments = _arguments(files.open, data.source, data.options, path=path, channels=data.channels, once=once)
    try:
        return files.open(**arguments)
    except UserError as error:
        kind = None if files.is_at(path) else _kind_at(path)
        if kind in (None, data.source):  # a name of the hub and a URL can't be looked into
            raise
        remedy = f"the files are laid out for data.source {kind}: give --set data.source={kind}"
        raise UserError(f"{error}; {remedy}") from None


def _arguments(open_: Callable[..., Pair], source: str, options: Options, **ours: Any) -> dict[str, Any]:
    """By name, those of ours that an opener has, and the options, which are its other parameters."""
    parameters = signature(open_).parameters
    known = [name for name in parameters if name not in ours]
    for key in options:
        if key not in known:
            allowed = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UserError(f"data.options.{key}: the source {source} has no such option; {allowed}")
        if source in FILES and not isinstance(options[key], str | None):
            raise UserError(f"data.options.{key}: takes a text, got {options[key]!r}")
    return {name: value for name, value in ours.items() if name in parameters} | options


def _own(data: Data, path: Path | None) -> Pair:
    factory = import_factory(data.source, key="data.source")
    with as_user_error(
        f"data.source: {data.source} can't be called with a path, split and data.options", of=(TypeError, ValueError)
    ):
        signature(factory).bind(path, split="train", **data.options)
    train, held_out = (factory(path, split=split, **data.options) for split in ("train", "eval"))
    for source in (train, held_out):
        if not isinstance(source, Source):
            what = f"{data.source} gave a {type(source).__name__}, which is no torusgd.data.Source"
            raise UserError(f"data.source: {what} (classes, labels, __len__, read)")
    return train, held_out


def _check(source: Source, word: str, name: str) -> None:
    classes, labels = len(source.classes), source.labels
    if len(source) == 0:
        raise UserError(f"data.source: {name} has no {word} images")
    if classes < 2:
        raise UserError(f"data.source: {name} has the classes {[*source.classes]} alone; a classifier needs two")
    if len(labels) != len(source) or labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"data.source: labels of the {word} images must be {len(source)} numbers in 0..{classes - 1}")
    if isinstance(source, ArraySource) and 0 in source.shape:
        raise UserError(f"data.source: the {word} images of {name} have no pixels, their shape is {source.shape}")


def _check_recipe(source: Source, word: str, data: Data) -> None:
    if data.classes not in (None, classes := len(source.classes)):
        raise UserError(f"data.classes: the recipe says {data.classes}, the {word} images have {classes}")
    if isinstance(source, ArraySource) and (channels := source.shape[2]) != data.channels:
        both = f"the recipe says {data.channels}, the {word} images have {channels}"
        raise UserError(f"data.channels: {both}; set data.channels, data.mean and data.std for {channels}")


def _first(source: Source, count: int | None, key: str) -> Source:
    if count is None or count == len(source):
        return source
    if count > len(source):
        raise UserError(f"data.{key}: the recipe wants {count} images, the source has {len(source)}")
    return source.first(count) if isinstance(source, EncodedImages) else subset(source, np.arange(count))


def _validation(train: Source, count: int) -> Pair:
    """The images to train on, and `count` others by which choices are made."""
    if count >= len(train):
        raise UserError(f"data.validation_images: {count} of {len(train)} training images leave none to train on")
    # By the number of images alone, so that arms and seeds that are compared are so on the same images.
    drawn = keyed_permutation(len(train), VALIDATION, 0)
    return subset(train, np.sort(drawn[count:])), subset(train, np.sort(drawn[:count]))


def decode_on_gpu(sources: Pair, device: torch.device) -> Pair:
    """The sources of a recipe with `data.decoder: nvjpeg`, with JPEGs decoded by this rank's GPU."""
    train, held_out = sources
    if not (isinstance(train, EncodedImages) and isinstance(held_out, EncodedImages)):
        raise UserError(f"data.decoder: nvjpeg decodes the pictures of {', '.join(PICTURES)} only")
    decoder = nvjpeg(device)
    return train.decoded_by(decoder), held_out.decoded_by(decoder)


def _kind_at(path: Path) -> str | None:
    # A name of the hub or a URL can't be looked into, and only one kind reads from each.
    kind = "parquet" if hub_name(path) is not None else "tar" if url_of(path) is not None else None
    return kind or next((name for name, files in FILES.items() if files.is_at(path)), None)


def open_any(path: Path) -> tuple[str, Source, Source]:
    """The kind of a data set, by its layout or by a built-in recipe's name, and its training and held-out images."""
    if not path.exists() and str(path) in recipe_names():
        recipe = load_recipe(str(path)).recipe
        return recipe.data.source, *open_sources(recipe.data, None, recipe.seed)
    kind = _kind_at(path)
    if kind is None:
        what = "no data set that is known" if path.exists() else "there is no such file or folder"
        raise UserError(
            f"{path}: {what}; wanted is a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, one of"
            " such folders, one with lists (train.csv, val.csv), with tar files (train-0000.tar ...), with Parquet or"
            " Arrow files, with MNIST's files (train-images-idx3-ubyte.gz ...), or with train_images.npy ...; an .npz"
            " file; hf:ORG/NAME on the hub; or a built-in recipe that makes its own images, such as digits"
        )
    open_ = FILES[kind].open
    train, held_out = open_(**_arguments(open_, kind, {}, path=path, channels=3, once=make_here))
    for source, word in ((train, "training"), (held_out, "held-out")):
        _check(source, word, str(path))
    return kind, train, held_out


def describe(path: Path) -> list[str]:
    """The text of `torusgd data info`: kind, number of images, classes and sizes; no picture is decoded."""
    kind, train, held_out = open_any(path)
    counts = np.bincount(train.labels, minlength=len(train.classes))
    few, many = int(counts.min()), int(counts.max())
    sample = np.linspace(0, len(train) - 1, min(_SAMPLE, len(train))).astype(int).tolist()
    found: Counter[tuple[int, int]] = Counter()
    missing = []
    for index in sample:
        try:
            if isinstance(train, EncodedImages):
                found[picture_size(train.encoded(index))] += 1
            else:
                found[train.read(index).shape[:2]] += 1
        except Undecodable:
            pass
        except _NO_FILE as error:
            missing.append(error.filename)
    sizes = ", ".join(f"{width} x {height} ({count})" for (height, width), count in found.most_common(5))
    sizes += f", and {len(found) - 5} other sizes" if len(found) > 5 else ""
    # Encoded pictures have 3: the recipe chooses what they are converted to.
    channels = 3 if isinstance(train, EncodedImages) else train.read(0).shape[2]
    return [
        f"{url_of(path) or path}: data.source {kind}, {plural(channels, 'channel')}",
        f"images    {len(train)} for training, {len(held_out)} held out",
        f"classes   {len(train.classes)}: {', '.join(train.classes[:10])}{', ...' * (len(train.classes) > 10)}",
        f"per class {few} to {many} training images" if few != many else f"per class {few} training images",
        f"sizes     {sizes or 'none could be read'} (width x height, of {len(sample)} looked at)",
        *([f"missing   {len(missing)} of them, the first {missing[0]}; --check names all"] if missing else []),
    ]


def undecodable(path: Path) -> Iterator[str]:
    """Decodes every image of a data set and names those that are missing or can't be decoded."""
    for source in open_any(path)[1:]:
        for index in range(len(source)):
            try:
                source.read(index)
            except CorruptImage as error:
                yield error.reason
            except _NO_FILE as error:
                yield f"{error.filename}: {error.strerror}"


def data_sha256(train: Source, held_out: Source) -> str:
    """One hash of the training and the held-out images.

    It covers classes and labels; of encoded images what `EncodedImages.add_to_hash` adds; of arrays the shape, and the
    pixels of a sample. A source of your own without `read_many` adds nothing more.
    """
    # To read a data set whole takes as long as an epoch. So the hash covers what is known without opening an image, and
    # the content of a keyed sample: it finds other files, another order, other labels and another version of the
    # pictures; a single image that was changed in its place it may miss.
    digest = hashlib.sha256()
    for split, source in enumerate((train, held_out)):
        digest.update("\0".join([str(len(source)), *source.classes]).encode(errors="surrogateescape"))
        digest.update(np.ascontiguousarray(source.labels, dtype="<i8").data)
        # Keyed by the split alone, so that every run and every rank looks at the same images.
        sample: Int64 = np.unique(keyed_integer(len(source), DATA_SAMPLE, split, np.arange(_HASHED)))
        if isinstance(source, EncodedImages):
            source.add_to_hash(digest, sample)
        elif isinstance(source, ArraySource):
            digest.update(repr(source.shape).encode())
            digest.update(np.ascontiguousarray(source.read_many(sample)).data)
    return digest.hexdigest()


def subset(source: Source, indices: Int64) -> Source:
    """The images at `indices` [n] of a source, in their order, with the same ways to read them."""
    return _EncodedSubset(source, indices) if isinstance(source, EncodedImages) else _Subset(source, indices)


class _Subset:
    def __init__(self, source: Source, indices: Int64) -> None:
        self.classes, self.labels = source.classes, source.labels[indices]
        self._read, self._indices = source.read, indices
        # Only what the source has, since `isinstance` of a protocol looks for the attributes.
        if isinstance(source, ArraySource):
            self.shape = source.shape
            self.read_many = lambda positions: source.read_many(indices[positions])
        if isinstance(source, RegionSource):
            self.read_region = lambda index, choose: source.read_region(int(indices[index]), choose)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        return self._read(int(self._indices[index]))


class _EncodedSubset(EncodedImages):
    def __init__(self, source: EncodedImages, indices: Int64) -> None:
        super().__init__(source.classes, source.labels[indices], source.channels)
        self._source, self._indices, self.reads_ahead = source, indices, source.reads_ahead

    def encoded(self, index: int) -> bytes:
        return self._source.encoded(int(self._indices[index]))

    def where(self, index: int) -> str:
        return self._source.where(int(self._indices[index]))

    def add_to_hash(self, digest: Any, sample: Int64) -> None:
        digest.update(self._indices.astype("<i8").data)
        self._source.add_to_hash(digest, self._indices[sample])

    def expect(self, indices: Int64) -> None:
        self._source.expect(self._indices[indices])
