"""The index of a data set in tar files: where each image lies in them, so that one read fetches any of them.

WebDataset's layout: the files of a sample stand side by side in a tar file and have the same name up to the first dot
(0001.jpg, 0001.cls). The index is a file of plain arrays, written once by `torusgd data index`; of WebDataset's own
two, wids' JSON has no offsets, and what lies beside it would have to be unpickled.

Everything that a tar file says is a stranger's word: nothing is extracted, a name is only ever a text, and no header
makes this process read more than `_MOST_HEADER` bytes.
"""

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from ..errors import UserError, in_one_line
from ..untrusted import parse_json
from ..weights import replacing
from .classes import number_labels
from .listing import Arrays, Progress, files_by_split, files_under, names_as_arrays

FILE = "index.npz"
"""the index's name, beside the tar files"""
FORMAT = 1
BLOCK = tarfile.BLOCKSIZE
"""bytes of a member's header, which stands before its content"""
SPLITS = ("train", "eval")
PICTURES = ("jpg", "jpeg", "png")
CLASSES = "classes.txt"
"""a list of the classes beside the tar files, see `classes.read_classes`"""

_MOST_HEADER = 1 << 20
_MOST_LABEL = 1 << 16
_COMPRESSED = (".tgz", *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "lz4")))
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass
class _Found:
    """What is known of the images of one split, in the order of their tar files."""

    shards: list[str]
    sizes: list[int] = field(default_factory=list)
    """bytes of each tar file"""
    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    places: list[tuple[int, int, int, int]] = field(default_factory=list)
    """of each image the number of its tar file, its offset and its bytes there, and the CRC-32 of its header"""

    def arrays(self) -> Arrays:
        """As the index holds them, but for the labels."""
        shard, offset, size, header = np.array(self.places, dtype=np.int64).reshape(-1, 4).T
        names, ends = names_as_arrays([self.names])
        shards, shard_ends = names_as_arrays([self.shards])
        return {
            "names text": names, "names ends": ends, "shards text": shards, "shards ends": shard_ends,
            "shard sizes": np.array(self.sizes, dtype=np.int64),
            "shard": shard.astype(np.int32), "offset": offset.copy(), "size": size.copy(),
            "header": header.astype(np.uint32),
        }  # fmt: skip


@dataclass(frozen=True)
class _Member:
    name: str
    offset: int
    size: int


def make_index(
    path: Path,
    listed: Mapping[str, str] | None = None,
    given: Mapping[str, str] | None = None,
    shards: Mapping[str, list[str]] | None = None,
    progress: Progress = lambda done: None,
) -> Arrays:
    """Walks through the headers of all tar files of a folder.

    The label of an image is what the file `.cls` beside it says, or the value of `label` or `cls` in its `.json`; what
    `given` says of its name; or else the name of the folder, or of the tar file within the tar file, that it lies in.

    Args:
        path: The folder. A tar file's own name, or that of its sub-folder, says its split: train; val, validation or
            eval; test where there is none of these.
        listed: The classes, as `read_classes` gives them.
        given: Labels by the names of files.
        shards: The tar files of each split; None: those that `find_shards` finds.
        progress: Called with the number of images found so far.

    Returns:
        Arrays as `write_index` takes them.

    Raises:
        UserError: There are no tar files of both splits, one is damaged or compressed, or an image has no label.
    """
    found = {split: _Found(names) for split, names in (shards or find_shards(path)).items()}
    for each in found.values():
        for number, name in enumerate(each.shards):
            file = path / name
            try:
                each.sizes.append(file.stat().st_size)
                with file.open("rb") as stream:
                    _walk(stream, file, number, each, given or {})
            except UserError:
                raise
            except (tarfile.TarError, ValueError, OverflowError) as error:
                raise UserError(f"{file}: {_why_no_tar(file, error)}") from None
            except OSError as error:
                raise UserError(f"{file}: can't be read: {error.strerror or error}") from error
            progress(sum(len(each.names) for each in found.values()))
    for word, each in found.items():
        if not each.names:
            raise UserError(f"{path}: the tar files of {word} hold no JPEG or PNG file")
    classes, numbers = number_labels({split: each.labels for split, each in found.items()}, listed, str(path))
    arrays: Arrays = {"format": np.array([FORMAT])}
    arrays["classes text"], arrays["classes ends"] = names_as_arrays([classes])
    for split, each in found.items():
        arrays |= {f"{split} {key}": array for key, array in each.arrays().items()}
        arrays[f"{split} labels"] = numbers[split]
    return arrays


def count_images(arrays: Arrays) -> dict[str, int]:
    """How many images an index has, by split."""
    return {split: len(arrays[f"{split} labels"]) for split in SPLITS}


def write_index(file: Path, arrays: Arrays) -> None:
    """Writes an index whole or not at all; UserError where the folder can't be written."""
    try:
        with replacing(file) as temporary, temporary.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
    except OSError as error:
        raise UserError(f"{file}: can't be written: {error.strerror}; choose another place with --out") from error


def find_shards(path: Path) -> dict[str, list[str]]:
    """The names of a folder's tar files by split, sorted; UserError where a split has none."""
    names = files_under(path)
    packed = next((name for name in names if name.lower().endswith(_COMPRESSED)), None)
    if packed is not None and not any(name.lower().endswith(".tar") for name in names):
        raise UserError(f"{path / packed}: is compressed, so no image in it can be read by itself; unpack it")
    return files_by_split(path, names, (".tar",))


def _walk(stream: IO[bytes], file: Path, number: int, found: _Found, given: Mapping[str, str]) -> None:
    """Adds the images of one tar file, sample by sample."""
    sample: dict[str, _Member] = {}
    last = ""

    def add() -> None:
        picture = _picture(sample)
        if picture is not None:
            found.labels.append(_label(stream, file, last, sample, picture, given))
            stream.seek(picture.offset - BLOCK)
            found.places.append((number, picture.offset, picture.size, zlib.crc32(stream.read(BLOCK))))
            found.names.append(picture.name)

    for member in _members(stream, 0, found.sizes[number], ""):
        folder, _, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        if stem.startswith("__") and stem.endswith("__"):  # of the tar file, not of a sample
            continue
        if (key := f"{folder}/{stem}") != last:
            add()
            sample, last = {}, key
        sample[kind.lower()] = member
    add()


def _picture(sample: Mapping[str, _Member]) -> _Member | None:
    """The image of a sample: its jpg, jpeg or png; a file that stands alone may have more dots in its name."""
    for kind in PICTURES:
        if kind in sample:
            return sample[kind]
    if len(sample) == 1:
        ((kind, member),) = sample.items()
        return member if kind.rpartition(".")[2] in PICTURES else None
    return None


def _label(
    stream: IO[bytes],
    file: Path,
    key: str,
    sample: Mapping[str, _Member],
    picture: _Member,
    given: Mapping[str, str],
) -> str:
    for kind in ("cls", "json"):
        if kind in sample:
            text = _read(stream, sample[kind]).strip()
            value: Any = text
            if kind == "json":
                tree = parse_json(text)
                value = tree.get("label", tree.get("cls")) if isinstance(tree, dict) else None
            if isinstance(value, int | str) and not isinstance(value, bool) and str(value) and "\0" not in str(value):
                return str(value)
            raise UserError(f"{file}: {sample[kind].name} holds no label")
    folder, _, name = picture.name.rpartition("/")
    label = given.get(name, folder.rpartition("/")[2])
    if not label:
        raise UserError(
            f"{file}: {picture.name} has no label: wanted is {key.strip('/')}.cls or .json beside it, or a folder in "
            "the tar file, which is its class"
        )
    return label


def _read(stream: IO[bytes], member: _Member) -> str:
    if member.size > _MOST_LABEL:
        raise ValueError(f"{member.name} has {member.size} bytes, too many for a label")
    stream.seek(member.offset)
    return stream.read(member.size).decode()


def _members(stream: IO[bytes], begin: int, end: int, folder: str) -> Iterator[_Member]:
    """The plain files from one place of a file to another, those of tar files in it among them.

    Raises:
        tarfile.TarError, ValueError: What lies there is no whole tar file.
    """
    stream.seek(begin)
    at = begin
    with tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream)), mode="r:", errors="surrogateescape") as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined] # which it keeps, and a data set has millions
            if member.offset < at or member.offset_data <= member.offset or member.size < 0:
                raise ValueError("a member lies before the one that precedes it")
            at = member.offset_data + (member.size if member.isreg() else 0)
            if at > end:
                raise ValueError(f"cut short in {member.name}")
            if not member.isreg() or member.issparse() or "\0" in member.name:
                continue
            if member.name.lower().endswith(".tar"):
                inner = f"{folder}{member.name[: -len('.tar')]}/"
                if inner.count("/") > 8:
                    raise ValueError("tar files in tar files without end")
                yield from _members(stream, member.offset_data, at, inner)
            else:
                yield _Member(folder + member.name, member.offset_data, member.size)
        # The module takes a damaged header for the end; at the true end there are zeros, or nothing.
        stream.seek(archive.offset)
        rest = stream.read(min(BLOCK, max(0, end - archive.offset)))
        if rest.strip(b"\0") or len(rest) % BLOCK:
            raise ValueError(f"no header of a member where one must be, at byte {archive.offset}")


class _Bounded:
    """A file of which nobody reads much at a time: a header may claim any length for a name."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.tell: Callable[[], int] = stream.tell
        self.seek: Callable[[int], int] = stream.seek
        self._read = stream.read

    def read(self, size: int) -> bytes:
        """As a file's."""
        if not 0 <= size <= _MOST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        return self._read(size)


def _why_no_tar(file: Path, error: Exception) -> str:
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
    except OSError:
        head = b""
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return f"is compressed ({kind}), so no image in it can be read by itself; unpack it"
    return f"no whole tar file ({in_one_line(error)})"
