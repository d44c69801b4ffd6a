"""ImageNet (ILSVRC 2012) read out of the two tar files that people have, without unpacking them.

The training file holds a tar file for each class, the validation file 50,000 pictures without labels; the labels are in
the development kit, which also says how many pictures each class has. Training needs only an index of the two files:
nothing is copied, and a missing or shortened file is found.
"""

import gzip
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError, in_one_line
from ..locks import LOCK, held
from .file_lists import Arrays, Names, Progress
from .tar_index import FILE, make_index, write_index

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
_META, _TRUTH = "data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"
_MOST_DEVKIT = 1 << 27
"""bytes of the development kit, unpacked; it has 8 million"""


@dataclass(frozen=True)
class Devkit:
    """The content of the development kit."""

    images: Mapping[str, int]  # number of training pictures by class (its WordNet number), sorted
    labels: Mapping[str, str]  # class of each validation picture, by the name of its file


def prepare_imagenet(path: Path, progress: Progress = lambda done: None) -> Arrays:
    """Writes the index of the two files, once every class has the pictures that the development kit says.

    Args:
        path: The folder with the three files, as they are downloaded.
        progress: Called with the number of pictures found so far.

    Returns:
        The index's arrays.

    Raises:
        UserError: A file is missing, damaged, or has other pictures; SciPy is missing; the folder can't be written, or
            another process is preparing it.
    """
    for name in (TRAIN, VAL, DEVKIT):
        if not (path / name).is_file():
            raise UserError(f"{path}: has no {name}; wanted are {TRAIN}, {VAL} and {DEVKIT}, as image-net.org has them")
    kit = read_devkit(path / DEVKIT)
    try:
        with held(path, str(path)):
            arrays = _whole_index(path, kit, progress)
            write_index(path / FILE, arrays)
            (path / LOCK).unlink()
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror or error}") from error
    return arrays


def _whole_index(path: Path, kit: Devkit, progress: Progress) -> Arrays:
    """The index's arrays; UserError if they are not of as many pictures as the development kit says."""
    shards = {"train": [TRAIN], "eval": [VAL]}
    arrays = make_index(path, {name: name for name in kit.images}, kit.labels, shards, progress)
    classes = list(Names.of(arrays, "classes"))
    for name, count in zip(classes, np.bincount(arrays["train labels"], minlength=len(classes)), strict=True):
        if count != kit.images[name]:
            raise UserError(
                f"{path / TRAIN}: has {count} pictures of {name}, the development kit says {kit.images[name]}; "
                "fetch it again"
            )
    if len(arrays["eval labels"]) != len(kit.labels):
        raise UserError(
            f"{path / VAL}: has {len(arrays['eval labels'])} pictures, the development kit says {len(kit.labels)}; "
            "fetch it again"
        )
    return arrays


def read_devkit(file: Path) -> Devkit:
    """The classes and the validation labels of a development kit; UserError where it is damaged."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UserError(f"{file}: to read its table of classes takes SciPy ({error}); pip install scipy") from error
    try:
        with gzip.open(file) as stream:
            content = stream.read(_MOST_DEVKIT + 1)
        if len(content) > _MOST_DEVKIT:
            raise ValueError(f"more than {_MOST_DEVKIT} bytes")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            members = {member.name: member for member in archive if member.isreg()}
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
        reason = in_one_line(error)
        raise UserError(f"{file}: no development kit of ILSVRC 2012 ({reason}); fetch it again") from error
    return Devkit(dict(sorted(images.items())), labels)
