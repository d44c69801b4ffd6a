"""The index of a data set in tar files: the offset of each image, so that one read fetches any of them.

WebDataset's layout: the files of a sample stand side by side in a tar file and have the same name up to the first dot
(0001.jpg, 0001.cls). `torusgd data index` writes the index once, as a safetensors file of plain arrays.
A tar file is untrusted: nothing is extracted, a name is only ever a text, and headers are bounded (`_MOST_HEADER`).
"""

import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from ..errors import UserError, as_user_error, in_one_line
from ..untrusted import check_regular, parse_json
from ..weights import save_weights
from .file_lists import SPLITS, Arrays, Names, Progress, files_by_split, files_under, number_labels

FILE = "index.safetensors"  # the index's name, beside the tar files
# WebDataset's own two indices do not serve: wids' JSON has no offsets, and the other one would have to be unpickled.
FORMAT = 2
BLOCK = tarfile.BLOCKSIZE  # bytes of a member's header, which stands before its content
# The arrays of a split, and their dtypes.
KINDS = {
    "names text": "uint8", "names ends": "int64", "shards text": "uint8", "shards ends": "int64",
    "shard sizes": "int64", "shard": "int32", "offset": "int64", "size": "int64", "header": "uint32", "labels": "int64",
}  # fmt: skip
COLUMNS = ("shard", "offset", "size", "header")  # the keys of what `_Image` has of each image, in its order
PICTURES = ("jpg", "jpeg", "png")
CLASSES = "classes.txt"  # a list of the classes beside the tar files, for `read_classes`

_MOST_HEADER = 1 << 20
_MOST_LABEL = 1 << 16
_MOST_NESTED = 8  # tar files within each other
_EVERY = 1000  # images between two reports of progress
_COMPRESSED = (".tgz", *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "lz4")))
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class _Image(NamedTuple):
    name: str
    label: str
    shard: int
    offset: int
    size: int
    header: int  # CRC-32 of the member's header


class _Member(NamedTuple):
    name: str
    offset: int
    size: int
    is_link: bool


def make_index(
    path: Path, listed: Mapping[str, str] | None = None, given: Mapping[str, str] | None = None,
    shards: Mapping[str, list[str]] | None = None, progress: Progress = lambda done: None,
) -> Arrays:  # fmt: skip
    """Walks through the headers of all tar files of a folder; UserError if one can't be used, or an image has no label.

    The label of an image is the content of the file `.cls` beside it, or `label` or `cls` in its `.json`; or its label
    in `given`, by the names of files; or else the name of the folder, or of the tar file within the tar file, that it
    lies in. `listed` are the classes, from `read_classes`; `shards` the tar files of each split, by default those that
    `find_shards` finds.
    """
    texts, done, are_names = dict[str, list[str]](), 0, False
    arrays: Arrays = {"format": np.array([FORMAT])}
    for split, names in (shards or find_shards(path)).items():
        images, sizes = list[_Image](), list[int]()
        for number, name in enumerate(names):
            file = path / name
            try:
                with as_user_error(f"{file}: can't be read"), check_regular(file).open("rb") as stream:
                    head = stream.read(8)
                    sizes.append(os.fstat(stream.fileno()).st_size)
                    walk = _Walk(stream, file, number, given or {})
                    for image in walk.images(0, sizes[-1], ""):
                        images.append(image)
                        if (done := done + 1) % _EVERY == 0:
                            progress(done)
                    are_names |= walk.has_folders
            except UserError:
                raise
            except (tarfile.TarError, ValueError, OverflowError) as error:
                kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
                packed = f"is compressed ({kind}), so no image in it can be read by itself; unpack it"
                raise UserError(f"{file}: {packed if kind else f'no whole tar file ({in_one_line(error)})'}") from None
        if not images:
            raise UserError(f"{path}: the tar files of {split} hold no JPEG or PNG file")
        texts[split] = [image.label for image in images]
        arrays |= Names.arrays(f"{split} names", [[image.name for image in images]])
        arrays |= Names.arrays(f"{split} shards", [names])
        arrays[f"{split} shard sizes"] = np.array(sizes, dtype=np.int64)
        columns = np.array([image[2:] for image in images], dtype=np.int64).T
        arrays |= {f"{split} {key}": column.astype(KINDS[key]) for key, column in zip(COLUMNS, columns, strict=True)}
    classes, labels = number_labels(texts, listed, str(path), are_names)
    return arrays | Names.arrays("classes", [classes]) | {f"{split} labels": labels[split] for split in texts}


def count_images(arrays: Arrays) -> dict[str, int]:
    return {split: len(arrays[f"{split} labels"]) for split in SPLITS}


def checksum(arrays: Arrays) -> int:
    """The CRC-32 of an index: a flipped bit in the labels would show nowhere else."""
    value = 0
    for key in sorted(arrays.keys() - {"checksum"}):
        value = zlib.crc32(np.ascontiguousarray(arrays[key]).data, value)
    return value


def write_index(file: Path, arrays: Arrays) -> None:
    """Writes an index whole or not at all; UserError if the folder can't be written."""
    whole = arrays | {"checksum": np.array([checksum(arrays)])}
    with as_user_error(f"{file}: can't be written", "choose another place with --out"):
        save_weights(file, {key: torch.from_numpy(array) for key, array in whole.items()}, {})


def find_shards(path: Path) -> dict[str, list[str]]:
    """The names of a folder's tar files by split, sorted; UserError if a split has none."""
    names = files_under(path)
    if any(name.lower().endswith(".tar") for name in names):  # else a folder of compressed ones may be of one split
        names = [name for each in files_by_split(path, names, (".tar", *_COMPRESSED)).values() for name in each]
    packed = next((name for name in names if name.lower().endswith(_COMPRESSED)), None)
    if packed is not None:
        raise UserError(f"{path / packed}: is compressed, so no image in it can be read by itself; unpack it")
    return files_by_split(path, names, (".tar",))


class _Walk:
    """A walk through one tar file, and those in it, sample by sample; `given` as of `make_index`."""

    def __init__(self, stream: IO[bytes], file: Path, shard: int, given: Mapping[str, str]) -> None:
        self._stream, self._file, self._shard, self._given = stream, file, shard, given
        self.has_folders = False  # whether the label of an image was the name of a folder

    def images(self, begin: int, end: int, folder: str) -> Iterator[_Image]:
        """The images between two offsets of the file, whose names begin with `folder`."""
        sample, last = list[tuple[str, _Member]](), ""
        for member in _members(self._stream, begin, end, folder):
            folder_of, _, name = member.name.rpartition("/")
            stem, _, kind = name.partition(".")
            is_tar = name.lower().endswith(".tar")
            # Hidden ones, as in folders: macOS packs a ._1.jpg beside each 1.jpg, which is no picture.
            if any(part.startswith(".") and part.strip(".") for part in member.name.split("/")):
                continue
            if member.is_link:
                if name.rpartition(".")[2].lower() in PICTURES:
                    remedy = "pack the picture itself (tar --dereference --hard-dereference)"
                    raise UserError(f"{self._file}: {member.name} is a link, which nobody follows; {remedy}")
                continue
            # A sample ends when a member has another name up to its first dot.
            if is_tar or (key := f"{folder_of}/{stem}") != last:
                yield from self._sample(last, sample)
                sample, last = [], "" if is_tar else key
            if is_tar:
                inner = f"{member.name[: -len('.tar')]}/"
                if inner.count("/") > _MOST_NESTED:
                    raise ValueError("tar files in tar files without end")
                yield from self.images(member.offset, member.offset + member.size, inner)
            else:
                sample.append((kind.lower(), member))
        yield from self._sample(last, sample)

    def _sample(self, key: str, sample: Sequence[tuple[str, _Member]]) -> Iterator[_Image]:
        kinds = dict(sample)
        apart = kinds.get("cls") or kinds.get("json")
        if apart is None:
            yield from self._unlabelled(key, sample)
            return
        pictures = [member for kind, member in sample if kind in PICTURES]
        if not pictures and apart.size <= _MOST_LABEL and not _is_about_the_file(key):
            label = ""
            with suppress(ValueError):  # it holds no label, and may be about anything
                label = self._label(key, kinds, apart)
            if label or any(kind.rpartition(".")[2] in PICTURES for kind in kinds):
                raise UserError(f"{self._file}: {apart.name} has no picture beside it; make the file with --sort=name")
        more = [*pictures[1:], *(member for kind, member in sample if member is not kinds[kind])]
        if pictures and more:
            what = f"{more[0].name} comes second in the sample of {apart.name}, which has one picture"
            raise UserError(f"{self._file}: {what}, and one file of each kind; rename it or leave it out")
        for picture in pictures:
            yield self._image(picture, self._label(key, kinds, picture))

    def _unlabelled(self, key: str, sample: Sequence[tuple[str, _Member]]) -> Iterator[_Image]:
        """Each picture by itself, of its folder's class: the names of photographs may have any dots."""
        pictures = [member for kind, member in sample if kind.rpartition(".")[2] in PICTURES]
        stems = {member.name.rpartition(".")[0] for member in pictures}
        for _, member in sample:
            stem, _, kind = member.name.rpartition(".")
            if kind.lower() in ("cls", "json") and stem in stems:
                what = f"{member.name} is no label of {stem.rpartition('/')[2]}: names end at their first dot"
                raise UserError(f"{self._file}: {what}; rename both, with one dot")
        for picture in pictures:
            yield self._image(picture, self._label(key, {}, picture))

    def _image(self, picture: _Member, label: str) -> _Image:
        self._stream.seek(picture.offset - BLOCK)
        header = zlib.crc32(self._stream.read(BLOCK))
        return _Image(picture.name, label, self._shard, picture.offset, picture.size, header)

    def _label(self, key: str, sample: Mapping[str, _Member], picture: _Member) -> str:
        if (member := sample.get("cls", sample.get("json"))) is not None:
            if member.size > _MOST_LABEL:
                raise ValueError(f"{member.name} has {member.size} bytes, too many for a label")
            self._stream.seek(member.offset)
            value: Any = self._stream.read(member.size).decode().strip()
            if "cls" not in sample:
                tree = parse_json(value)
                value = tree.get("label", tree.get("cls")) if isinstance(tree, dict) else None
            # To Python a bool is an int, but no label.
            is_label = isinstance(value, int | str) and not isinstance(value, bool)
            if is_label and str(value) and "\0" not in str(value):
                return str(value)
            raise UserError(f"{self._file}: {member.name} holds no label")
        folder, _, name = picture.name.rpartition("/")
        # The folder next to the picture, or the tar file that stands for it.
        label = self._given.get(name, "")
        if not label:
            label, self.has_folders = folder.rpartition("/")[2], True
        if not label:
            wanted = f"{key.strip('/')}.cls or .json beside it, or a folder in the tar file, which is its class"
            raise UserError(f"{self._file}: {picture.name} has no label: wanted is {wanted}")
        return label


def _is_about_the_file(key: str) -> bool:
    """Whether WebDataset passes a sample over, such as __meta__, which has no picture."""
    stem = key.rpartition("/")[2]
    return stem.startswith("__") and stem.endswith("__")


def _members(stream: IO[bytes], begin: int, end: int, folder: str) -> Iterator[_Member]:
    """The plain files and links between two offsets of a tar file; tarfile.TarError or ValueError if none is whole."""
    stream.seek(begin)
    at, bounded = begin, _Bounded(stream)
    with tarfile.open(fileobj=cast(IO[bytes], bounded), mode="r:", errors="surrogateescape") as archive:
        while (member := archive.next()) is not None:
            bounded.left = _MOST_HEADER
            archive.members = []  # type: ignore[attr-defined] # a list of all members, which may be millions
            # A header may point anywhere: forwards only, or the walk would never end.
            if member.offset < at or member.offset_data <= member.offset or member.size < 0:
                raise ValueError("a member lies before the one that precedes it")
            at = member.offset_data + (member.size if member.isreg() else 0)
            if at > end:
                raise ValueError(f"cut short in {member.name}")
            is_link = member.issym() or member.islnk()
            if not (member.isreg() or is_link) or member.issparse() or "\0" in member.name:
                continue
            yield _Member(folder + member.name, member.offset_data, member.size, is_link)
        # To tarfile a damaged header is the end; at the true end there are zeros, or nothing.
        stream.seek(archive.offset)
        rest = stream.read(min(BLOCK, max(0, end - archive.offset)))
        if rest.strip(b"\0") or len(rest) % BLOCK:
            raise ValueError(f"no header of a member where one must be, at byte {archive.offset}")
        # Zeros fill the last record, of any length; `cat a.tar b.tar` has the second one's members there.
        at = archive.offset + len(rest)
        while at < end and (rest := stream.read(min(_MOST_HEADER, end - at))):
            if rest.strip(b"\0"):
                raise ValueError(f"more than zeros after its end, past byte {at}: several tar files in one?")
            at += len(rest)


class _Bounded:
    """A file with a limit on what is read of a member, `left`: a header may claim any length for a name."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.left = _MOST_HEADER
        self.tell: Callable[[], int] = stream.tell
        self.seek: Callable[[int], int] = stream.seek
        self._read = stream.read

    def read(self, size: int) -> bytes:
        self.left -= size  # the sum: newer versions of `tarfile` read a long header in pieces
        if size < 0 or self.left < 0:
            raise ValueError(f"a header of more than {_MOST_HEADER} bytes")
        return self._read(size)
