"""A data set of ImageNet's size, synthetic: how long it takes to list, index, open and fingerprint, and the memory.

    python -m benchmarks input large-data [--images 1281167] [--keep FOLDER]

The picture files are links to one small file a class, the tar shards hold the same small picture; so this is the cost
of names and headers, on a file system that is in memory already. Each measurement runs in a process of its own.

Needs: some GB of memory for its files.
"""

import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ..record import sample

CLASSES, HELD_OUT, SHARD = 1000, 50_000, 5000
PICTURE = b"\xff\xd8\xff" + bytes(600)


def write_files(root: Path, images: int) -> None:
    for split, count in (("train", images), ("val", HELD_OUT)):
        for label in range(CLASSES):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            (folder / "0.JPEG").write_bytes(PICTURE)
            for number in range(1, count // CLASSES + (label < count % CLASSES)):
                os.link(folder / "0.JPEG", folder / f"n{label:08d}_{number}.JPEG")


def write_shards(root: Path, images: int) -> None:
    root.mkdir()
    for split, count in (("train", images), ("val", HELD_OUT)):
        for number, begin in enumerate(range(0, count, SHARD)):
            with tarfile.open(root / f"{split}-{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
                for index in range(begin, min(begin + SHARD, count)):
                    for kind, content in (("jpg", PICTURE), ("cls", str(index % CLASSES).encode())):
                        member = tarfile.TarInfo(f"{index:08d}.{kind}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
                    archive.members = []  # type: ignore[attr-defined]  # a list of all members, which may be millions


def measure(what: str, root: Path) -> dict[str, Any]:
    """Seconds of one call, of a clock and of a core, and by how much it raised the largest memory of this process."""
    from torusgd.data.pictures import open_folder
    from torusgd.data.registry import data_sha256
    from torusgd.data.tar import open_shards
    from torusgd.data.tar_index import FILE, make_index, write_index

    def fingerprinted(name: str, opened: Callable[[], Any]) -> Callable[[], object]:
        """Opens what is measured only, before the clock runs."""
        pair = opened() if what == name else ()
        return lambda: data_sha256(*pair)

    shards = root / "shards"
    calls: dict[str, Callable[[], object]] = {
        "folder: list and open": lambda: open_folder(root / "files", 3),
        "folder: fingerprint": fingerprinted("folder: fingerprint", lambda: open_folder(root / "files", 3)),
        "tar: index": lambda: write_index(shards / FILE, make_index(shards)),
        "tar: open": lambda: open_shards(shards, 3),
        "tar: fingerprint": fingerprinted("tar: fingerprint", lambda: open_shards(shards, 3)),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, busy = time.perf_counter(), time.process_time()
    calls[what]()
    seconds, core = time.perf_counter() - started, time.process_time() - busy
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"what": what, "seconds": round(seconds, 2), "core": round(core, 2), "MiB": round(grown / 1024)}


def main(
    images: int = 1281167,
    keep: Path | None = None,
    what: Annotated[str | None, Option("--measure", hidden=True)] = None,
) -> None:
    if what and keep:
        print(json.dumps(measure(what, keep)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = keep or Path(scratch)
        if not (root / "files").exists():
            write_files(root / "files", images)
            write_shards(root / "shards", images)
        for each in ("folder: list and open", "folder: fingerprint", "tar: index", "tar: open", "tar: fingerprint"):
            command = [sys.executable, "-m", __name__, "--keep", str(root), "--measure", each]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            sample(f"{each}, s", [json.loads(found)["seconds"]])
            print(found, flush=True)


if __name__ == "__main__":
    typer.run(main)
