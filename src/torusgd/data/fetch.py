"""Public data sets: fetched by name and checked; and ImageNet (ILSVRC 2012) out of the tar files that people have."""

import gzip
import hashlib
import io
import logging
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import RunError, UserError, as_user_error, in_one_line, needs
from ..locks import LOCK, held
from .file_lists import Arrays, Names, Progress
from .tar_index import FILE, make_index, write_index

log = logging.getLogger(__name__)


class DataSet(NamedTuple):
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

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
_META, _TRUTH = "data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"
_MOST_DEVKIT = 1 << 27  # bytes of the development kit, unpacked; it has 8 million


def fetch(name: str, out: Path | None = None) -> Path:
    """The folder with a data set's files, each checked by its SHA-256; the log names their origin.

    `out` is data/NAME by default; files appear there only when all of them are there and right. Else they come from
    Debian's package, installed or unpacked without root, or from the authors' site. RunError if every origin failed.
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
    with as_user_error(f"data fetch: can't write to {target}", "choose another folder"):
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as scratch:
            files = _get(name, wanted, Path(scratch))
            for file in wanted.files:
                # Copied beside its place, then renamed: no file is ever there in half.
                shutil.copyfile(files / file, Path(scratch) / f"{file}.done")
                (Path(scratch) / f"{file}.done").replace(target / file)
    return target


def wrong_files(folder: Path, wanted: DataSet) -> list[str]:
    return [file for file, digest in wanted.files.items() if _sha256(folder / file) != digest]


def _sha256(file: Path) -> str:
    with suppress(OSError), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
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
            if wrong := wrong_files(folder, wanted):
                raise OSError(f"{wrong[0]} is missing or has another SHA-256 than expected")
        except (OSError, subprocess.SubprocessError, HTTPException) as error:
            failures.append(f"not {way}: {in_one_line(error)}")
        else:
            log.info("%s: %s, SHA-256 as expected", name, way)
            return folder
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


def prepare_imagenet(path: Path, progress: Progress = lambda done: None) -> Arrays:
    """Writes, and returns, the index of ImageNet's two files, if every class has the pictures that the devkit says.

    `path` is the folder with the three files, as they are downloaded; nothing is copied. UserError if one is missing,
    damaged, or has other pictures.
    """
    # The training file holds a tar file for each class, the validation file 50,000 pictures without labels; the labels
    # are in the development kit, which also says how many pictures each class has.
    for name in (TRAIN, VAL, DEVKIT):
        if not (path / name).is_file():
            raise UserError(f"{path}: has no {name}; wanted are {TRAIN}, {VAL} and {DEVKIT}, as image-net.org has them")
    counts, labels = read_devkit(path / DEVKIT)
    with as_user_error(f"{path}: can't be written"), held(path, str(path)):
        arrays = make_index(path, {name: name for name in counts}, labels, {"train": [TRAIN], "eval": [VAL]}, progress)
        classes = list(Names.of(arrays, "classes"))
        found = np.bincount(arrays["train labels"], minlength=len(classes)).tolist()
        checks = [(TRAIN, f" of {name}", count, counts[name]) for name, count in zip(classes, found, strict=True)]
        for file, what, count, expected in (*checks, (VAL, "", len(arrays["eval labels"]), len(labels))):
            if count != expected:
                says = f"the development kit says {expected}; fetch it again"
                raise UserError(f"{path / file}: has {count} pictures{what}, {says}")
        write_index(path / FILE, arrays)
        (path / LOCK).unlink()
    return arrays


def read_devkit(file: Path) -> tuple[dict[str, int], dict[str, str]]:
    """The number of training pictures by class, sorted, and the class of each validation picture, by file name."""
    with needs(f"{file}: to read its table of classes takes SciPy", "scipy"):
        from scipy.io import loadmat
    try:
        with gzip.open(file) as stream:
            content = stream.read(_MOST_DEVKIT + 1)
        if len(content) > _MOST_DEVKIT:
            raise ValueError(f"more than {_MOST_DEVKIT} bytes")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            members = {member.name: member for member in archive if member.isreg()}
            # extractfile gives None for what is no regular file only, and `members` has regular files alone.
            table, truth = (
                archive.extractfile(next(members[name] for name in members if name.endswith(end))).read()  # type: ignore[union-attr]
                for end in (_META, _TRUTH)
            )
        classes = np.atleast_1d(loadmat(io.BytesIO(table), squeeze_me=True)["synsets"])
        # Rows with children are groups of classes.
        leaves = {int(each["ILSVRC2012_ID"]): each for each in classes if int(each["num_children"]) == 0}
        images = {str(each["WNID"]): int(each["num_train_images"]) for each in leaves.values()}
        numbers = [int(line) for line in truth.split()]
        labels = {f"ILSVRC2012_val_{at:08d}.JPEG": str(leaves[n]["WNID"]) for at, n in enumerate(numbers, 1)}
    except Exception as error:  # whatever a parser of a foreign file comes to, gzip's, tarfile's or SciPy's
        raise UserError(f"{file}: no development kit of ILSVRC 2012 ({in_one_line(error)}); fetch it again") from error
    return dict(sorted(images.items())), labels
