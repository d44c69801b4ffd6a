"""Copies of a data set's images, scaled once and put into tar shards with their index: `torusgd data pack`."""

# Training decodes every image anew in every epoch, from copies with fewer pixels; and some hundreds of large files are
# easier on a file system than a million.

import errno
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RunError, UserError, as_run_error, as_user_error
from ..locks import LOCK, held
from ..text import json_text
from ..untrusted import parse_json, read_text
from ..weights import replacing, write_text
from .decode import JPEG, EncodedImages, Undecodable, decode, load_decoders, picture_size, require_specified
from .file_lists import read_classes
from .geometry import render, scaled
from .registry import data_sha256
from .tar_index import CLASSES, FILE, count_images, make_index, write_index
from .types import ArraySource, CorruptImage, Pixels, Source

SETTINGS = "pack.json"  # a file in the folder of the copies: the hash of their images, and how they were made
_AT_A_TIME = 256  # images that are encoded, and in memory, before they are written


@dataclass(frozen=True)
class Packing:
    shorter_side: int | None  # pixels to which a larger image is scaled; None: files are copied as they are
    quality: int | None  # of JPEG, 1 to 100; None: copies are PNGs, decoded and scaled alike on any machine
    images_per_shard: int


def pack(
    train: Source, held_out: Source, out: Path, packing: Packing,
    leave_out: Callable[[str], object], progress: Callable[[int], object] = lambda done: None,
) -> dict[str, int]:  # fmt: skip
    """Writes both splits of a data set as tar shards with their index, and returns the number of images of each.

    Shards that are there already stay. A JPEG that is small enough is copied as it is; any other image becomes a JPEG,
    or all a PNG. Images that can't be decoded are left out, each with a call of `leave_out`. UserError if the folder
    can't be used; RunError if the disk is full, or an image can't be read: the same call continues.
    """
    load_decoders()
    if isinstance(train, ArraySource) and train.shape[2] not in (1, 3):
        raise UserError(f"{out}: a JPEG or PNG has 1 or 3 channels here, the images have {train.shape[2]}")
    settings = {**packing.__dict__, "images": data_sha256(train, held_out)}
    with as_user_error(f"{out}: can't be used", "choose another folder"):
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    _refuse_others(out, settings)
    with as_run_error(f"{out}: can't be written", "the same command goes on"), held(out, str(out)):
        _refuse_others(out, settings)  # again: another command may have packed into it until now
        # The settings first: they say later which copies a folder with a few shards holds.
        write_text(out / SETTINGS, json_text(settings, indent=1))
        names = (" ".join(name.splitlines()) for name in train.classes)
        write_text(out / CLASSES, "".join(f"{label}\t{name}\n" for label, name in enumerate(names)))
        for partial_file in out.glob(".*.tar.*"):  # left by a command that was killed
            partial_file.unlink()
        done = 0
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pack") as pool:
            for file, source, shard in _shards({"train": train, "val": held_out}, out, packing.images_per_shard):
                if not file.exists():
                    copies = _copies(source, shard, packing, pool, leave_out)
                    _write_shard(file, source, copies, lambda more: progress(done + more))
                progress(done := done + len(shard))
        arrays = make_index(out, read_classes(out / CLASSES))
        write_index(out / FILE, arrays)
        (out / LOCK).unlink()
    return count_images(arrays)


def _refuse_others(out: Path, settings: Mapping[str, Any]) -> None:
    """UserError unless the folder is empty or holds copies of the same images, made in the same way."""
    file = out / SETTINGS
    with as_user_error(f"{out}: can't be used", "choose another folder", (OSError, ValueError)):
        names = sorted(entry.name for entry in os.scandir(out) if not entry.name.startswith("."))
        found = parse_json(read_text(file)) if file.exists() else None
    if not names:
        return
    if not isinstance(found, dict):
        raise UserError(f"{out}: holds {names[0]!r}, and no copies of torusgd data pack; choose an empty folder")
    for key, value in settings.items():
        if found.get(key) != value:
            raise UserError(f"{out}: holds copies that were made otherwise ({key} differs); choose another folder")


def _shards(sources: Mapping[str, Source], out: Path, size: int) -> Iterator[tuple[Path, Source, range]]:
    for split, source in sources.items():
        for number, begin in enumerate(range(0, len(source), size)):
            yield out / f"{split}-{number:05d}.tar", source, range(begin, min(begin + size, len(source)))


def _write_shard(
    file: Path, source: Source, copies: Iterator[tuple[int, bytes]], progress: Callable[[int], object]
) -> None:
    # USTAR headers without times or owners: the same images give the same bytes.
    with replacing(file) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
        for count, (index, data) in enumerate(copies):
            picture = "jpg" if data.startswith(JPEG) else "png"
            for kind, content in ((picture, data), ("cls", str(source.labels[index]).encode())):
                member = tarfile.TarInfo(f"{index:08d}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            progress(count)


def _copies(
    source: Source, indices: range, packing: Packing, pool: ThreadPoolExecutor, leave_out: Callable[[str], object]
) -> Iterator[tuple[int, bytes]]:
    for begin in range(0, len(indices), _AT_A_TIME):
        # `map` encodes all that it gets before the writer is done, so it gets a few at a time.
        some = indices[begin : begin + _AT_A_TIME]
        for index, copy in zip(some, pool.map(partial(_copy, source, packing), some), strict=True):
            if isinstance(copy, bytes):
                yield index, copy
            else:
                leave_out(copy.reason)


def _copy(source: Source, packing: Packing, index: int) -> bytes | CorruptImage:
    """One image as JPEG, or why there is none."""
    side = packing.shorter_side
    try:
        if isinstance(source, EncodedImages):
            data = source.encoded(index)
            if packing.quality is None:
                require_specified(data)
            elif data.startswith(JPEG) and (side is None or min(picture_size(data)) <= side):
                decode(data, source.channels, shrink=8)  # nothing is copied that training would have to replace
                return data
            image = decode(data, source.channels)
        else:
            image = source.read(index)
        height, width = image.shape[:2]
        if side is not None and min(height, width) > side:
            region = replace(scaled(height, width, side), exact=packing.quality is None)
            image = render(image, region).transpose(1, 2, 0)
        return encode(image, packing.quality)
    except CorruptImage as error:
        return error
    except Undecodable as error:
        assert isinstance(source, EncodedImages)
        return CorruptImage(index, f"{source.where(index)}: {error}")
    except OSError as error:
        raise RunError(f"image {index} can't be read: {error}; the same command goes on") from error


def encode(image: Pixels, quality: int | None) -> bytes:
    """An image uint8 [height, width, 1 or 3] as PNG, or as JPEG of a quality, with colours at half the resolution."""
    simplejpeg, cv2 = load_decoders()
    if quality is None:
        return cv2.imencode(".png", np.ascontiguousarray(image[:, :, ::-1]))[1].tobytes()
    kinds = ("GRAY", "Gray") if image.shape[2] == 1 else ("RGB", "420")
    return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, *kinds)
