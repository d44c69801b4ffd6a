"""The index of a data set in tar files: where each image lies in them, so that one read fetches any of them.

WebDataset's layout: the files of a sample stand side by side in a tar file and have the same name up to the first dot
(0001.jpg, 0001.cls). The index is a file of plain arrays, written once by `torusgd data index`; of WebDataset's own
two, wids' JSON has no offsets, and what lies beside it would have to be unpickled.

Everything that a tar file says is a stranger's word: nothing is extracted, a name is only ever a text, and no header
makes this process read more than `_MOST_HEADER` bytes.
"""

import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from ..errors import UserError, in_one_line
from ..untrusted import parse_json
from ..weights import replacing
from .classes import number_labels
from .file_lists import Arrays, Progress, files_by_split, files_under, names_as_arrays
from .tar_pieces import Images, Pieces

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
    """What is known of one split."""

    shards: list[str]
    sizes: list[int] = field(default_factory=list)
    """bytes of each tar file"""
    images: list[Images] = field(default_factory=list)
    """of each tar file"""

    def __len__(self) -> int:
        return sum(len(each.names) for each in self.images)

    def labels(self) -> list[str]:
        """Of all images."""
        return [label for each in self.images for label in each.labels]

    def arrays(self) -> Arrays:
        """As the index holds them, but for the labels."""
        places = [np.array(each.places, dtype=np.int64).reshape(-1, 3) for each in self.images]
        offset, size, header = np.concatenate(places).T
        names, ends = names_as_arrays([each.names for each in self.images])
        shards, shard_ends = names_as_arrays([self.shards])
        return {
            "names text": names, "names ends": ends, "shards text": shards, "shards ends": shard_ends,
            "shard sizes": np.array(self.sizes, dtype=np.int64),
            "shard": np.repeat(np.arange(len(places), dtype=np.int32), [len(each) for each in places]),
            "offset": offset.copy(), "size": size.copy(), "header": header.astype(np.uint32),
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
    pieces: Pieces | None = None,
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
        pieces: Keeps what tar files within the tar files hold, for the next call; None: nothing is kept. What the other
            arguments say of their images must then be the same each time.

    Returns:
        Arrays as `write_index` takes them.

    Raises:
        UserError: There are no tar files of both splits, one is damaged or compressed, or an image has no label.
    """
    found = {split: _Found(names) for split, names in (shards or find_shards(path)).items()}
    for each in found.values():
        for name in each.shards:
            file, before = path / name, sum(map(len, found.values()))
            try:
                with file.open("rb") as stream:
                    walk = _Walk(stream, file, given or {}, pieces, progress, before)
                    each.images.append(walk.images(0, walk.status.st_size, ""))
                    each.sizes.append(walk.status.st_size)
            except UserError:
                raise
            except (tarfile.TarError, ValueError, OverflowError) as error:
                raise UserError(f"{file}: {_why_no_tar(file, error)}") from None
            except OSError as error:
                raise UserError(f"{file}: can't be read: {error.strerror or error}") from error
            progress(sum(map(len, found.values())))
    for word, each in found.items():
        if not len(each):
            raise UserError(f"{path}: the tar files of {word} hold no JPEG or PNG file")
    classes, numbers = number_labels({split: each.labels() for split, each in found.items()}, listed, str(path))
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


class _Walk:
    """Through one tar file, and those in it, sample by sample.

    Args:
        stream: The tar file.
        file: Its path.
        given, pieces: See `make_index`.
        progress: See there.
        before: Images that were found before, in other tar files.
    """

    def __init__(
        self,
        stream: IO[bytes],
        file: Path,
        given: Mapping[str, str],
        pieces: Pieces | None,
        progress: Progress,
        before: int,
    ) -> None:
        self._stream, self._file, self._given, self._pieces = stream, file, given, pieces
        self._progress, self._before = progress, before
        self.status = os.fstat(stream.fileno())

    def images(self, begin: int, end: int, folder: str) -> Images:
        """The images from one place of the file to another, whose names begin with `folder`."""
        found = Images()
        sample: dict[str, _Member] = {}
        last = ""
        for member in _members(self._stream, begin, end, folder):
            folder_of, _, name = member.name.rpartition("/")
            stem, _, kind = name.partition(".")
            if name.lower().endswith(".tar"):
                self._add(found, last, sample)
                sample, last = {}, ""
                found.extend(self._within(member))
                self._progress(self._before + len(found.names))
                continue
            if stem.startswith("__") and stem.endswith("__"):  # of the tar file, not of a sample
                continue
            if (key := f"{folder_of}/{stem}") != last:
                self._add(found, last, sample)
                sample, last = {}, key
            sample[kind.lower()] = member
        self._add(found, last, sample)
        return found

    def _within(self, member: _Member) -> Images:
        """Those of a tar file within this one."""
        inner = f"{member.name[: -len('.tar')]}/"
        if inner.count("/") > 8:
            raise ValueError("tar files in tar files without end")
        walk = partial(self.images, member.offset, member.offset + member.size, inner)
        if self._pieces is None:
            return walk()
        # Another file of the same name has other times, or another size.
        key = f"{FORMAT}-{self._file.name}-{self.status.st_size}-{self.status.st_mtime_ns}-{member.offset}"
        return self._pieces.find(key, walk)

    def _add(self, found: Images, key: str, sample: Mapping[str, _Member]) -> None:
        picture = _picture(sample)
        if picture is not None:
            found.labels.append(self._label(key, sample, picture))
            self._stream.seek(picture.offset - BLOCK)
            found.places.append((picture.offset, picture.size, zlib.crc32(self._stream.read(BLOCK))))
            found.names.append(picture.name)

    def _label(self, key: str, sample: Mapping[str, _Member], picture: _Member) -> str:
        for kind in ("cls", "json"):
            if kind in sample:
                text = _read(self._stream, sample[kind]).strip()
                value: Any = text
                if kind == "json":
                    tree = parse_json(text)
                    value = tree.get("label", tree.get("cls")) if isinstance(tree, dict) else None
                is_label = isinstance(value, int | str) and not isinstance(value, bool)
                if is_label and str(value) and "\0" not in str(value):
                    return str(value)
                raise UserError(f"{self._file}: {sample[kind].name} holds no label")
        folder, _, name = picture.name.rpartition("/")
        label = self._given.get(name, folder.rpartition("/")[2])
        if not label:
            raise UserError(
                f"{self._file}: {picture.name} has no label: wanted is {key.strip('/')}.cls or .json beside it, or a "
                "folder in the tar file, which is its class"
            )
        return label


def _picture(sample: Mapping[str, _Member]) -> _Member | None:
    """The image of a sample: its jpg, jpeg or png; a file that stands alone may have more dots in its name."""
    for kind in PICTURES:
        if kind in sample:
            return sample[kind]
    if len(sample) == 1:
        ((kind, member),) = sample.items()
        return member if kind.rpartition(".")[2] in PICTURES else None
    return None


def _read(stream: IO[bytes], member: _Member) -> str:
    if member.size > _MOST_LABEL:
        raise ValueError(f"{member.name} has {member.size} bytes, too many for a label")
    stream.seek(member.offset)
    return stream.read(member.size).decode()


def _members(stream: IO[bytes], begin: int, end: int, folder: str) -> Iterator[_Member]:
    """The plain files from one place of a tar file to another, tar files within it among them.

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
