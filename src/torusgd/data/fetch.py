"""Public data sets by name: found in an installed package, or fetched, and checked."""

import hashlib
import logging
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import RunError, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSet:
    """The origins of a data set."""

    package: str  # of Debian and Ubuntu
    installed: Path  # the folder of that package
    site: str  # of the data set's authors
    files: dict[str, str]  # SHA-256 by name


DATA_SETS = {
    "fashion-mnist": DataSet(
        package="dataset-fashion-mnist",
        installed=Path("/usr/share/datasets/fashion-mnist"),
        site="https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        files={  # of the package, version 0.0~git20200523.55506a9-1
            "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        },
    )
}

_MOST_BYTES = 1 << 30
_SECONDS = 60.0


def fetch(name: str, out: Path | None = None) -> Path:
    """The folder with a data set's files, each checked by its SHA-256; the log names their origin.

    Tried in turn: the files in `out`; the folder of Debian's package, if it is installed; that package, unpacked
    without root; the authors' site. Files appear in `out` only when all of them are there and right.

    Args:
        name: `fashion-mnist`.
        out: The folder for the files. None: the package's folder, or else data/NAME in the current folder.

    Raises:
        UserError: There is no such data set, or `out` is not a folder that can be written.
        RunError: Every origin failed.
    """
    if name not in DATA_SETS:
        raise UserError(f"data fetch: no data set {name!r}; there are {', '.join(DATA_SETS)}")
    wanted = DATA_SETS[name]
    target = out or Path("data") / name
    if not wrong_files(target, wanted):
        log.info("%s: already complete in %s", name, target)
        return target
    if out is None and not wrong_files(wanted.installed, wanted):
        log.info("%s: found in %s, from the package %s", name, wanted.installed, wanted.package)
        return wanted.installed
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as scratch:
            files = _get(name, wanted, Path(scratch))
            for file in wanted.files:
                # Copied beside its place, then renamed: no file is ever there in half.
                shutil.copyfile(files / file, Path(scratch) / f"{file}.done")
                (Path(scratch) / f"{file}.done").replace(target / file)
    except OSError as error:
        raise UserError(f"data fetch: can't write to {target} ({error}); choose another folder") from error
    return target


def wrong_files(folder: Path, wanted: DataSet) -> list[str]:
    """The files of the data set that are not in the folder, or not with the right content."""
    return [file for file, digest in wanted.files.items() if _sha256(folder / file) != digest]


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""


def _get(name: str, wanted: DataSet, scratch: Path) -> Path:
    """A folder in `scratch`, or the installed one, with all files."""
    ways: list[tuple[str, Callable[[DataSet, Path], Path]]] = [
        (f"copied from {wanted.installed}", lambda wanted, _: wanted.installed),
        (f"unpacked from the package {wanted.package}, by apt-get download", _from_package),
        (f"downloaded from {wanted.site}", _from_site),
    ]
    failures = []
    for way, get in ways:
        try:
            folder = get(wanted, scratch)
        except (OSError, subprocess.SubprocessError, urllib.error.URLError) as error:
            failures.append(f"not {way}: {error}")
            continue
        if not (wrong := wrong_files(folder, wanted)):
            log.info("%s: %s, SHA-256 as expected", name, way)
            return folder
        failures.append(f"not {way}: {wrong[0]} is missing or has another SHA-256 than expected")
    raise RunError(f"data fetch {name}: {'; '.join(failures)}")


def _from_package(wanted: DataSet, scratch: Path) -> Path:
    # Neither command needs root, and none of the package's scripts runs.
    _run(["apt-get", "download", "-q", wanted.package], scratch)
    for package in scratch.glob(f"{wanted.package}_*.deb"):
        _run(["dpkg-deb", "-x", package.name, "root"], scratch)
    return scratch / "root" / wanted.installed.relative_to("/")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise OSError((done.stderr.strip().splitlines() or [f"{command[0]} failed"])[-1])


def _from_site(wanted: DataSet, scratch: Path) -> Path:
    for file in wanted.files:
        with urllib.request.urlopen(f"{wanted.site}/{file}", timeout=_SECONDS) as answer:
            (scratch / file).write_bytes(answer.read(_MOST_BYTES))
    return scratch
