"""Tar files of real pictures for the tests, as WebDataset, ImageNet and `tar` itself lay them out."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.data.pictures import picture
from torusgd.data.tar_index import FILE, make_index, write_index

Members = Iterable[tuple[str, bytes]]


def write_tar(file: Path, members: Members, kind: int = tarfile.USTAR_FORMAT) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(tar_bytes(members, kind))
    return file


def samples(numbers: Iterable[int], label: str = "cls", classes: int = 2) -> Members:
    for number in numbers:
        text = f"{number % classes}\n" if label == "cls" else json.dumps({"label": number % classes, "width": 3})
        yield f"{number:05}.jpg", picture(number)
        yield f"{number:05}.{label}", text.encode()


def write_shards(root: Path, train: int = 12, val: int = 6, label: str = "cls") -> Path:
    """Two tar files for training, one held out."""
    write_tar(root / "train-0000.tar", samples(range(train // 2), label))
    write_tar(root / "train-0001.tar", samples(range(train // 2, train), label), tarfile.PAX_FORMAT)
    write_tar(root / "val-0000.tar", samples(range(100, 100 + val), label), tarfile.GNU_FORMAT)
    return root


def write_indexed(root: Path) -> Path:
    """Such tar files with their index."""
    write_index(write_shards(root) / FILE, make_index(root))
    return root


def tar_bytes(members: Mapping[str, bytes] | Members, kind: int = tarfile.DEFAULT_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        for name, data in dict(members).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()
