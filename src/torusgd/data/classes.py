"""From the labels that people write, numbers or names, to the classes of a data set and the label of each image."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError, suggest
from ..untrusted import read_text
from .types import Int64

MOST_CLASSES = 1_000_000


def read_classes(file: Path) -> dict[str, str]:
    """The classes that a text file lists, one a line, the first being label 0; a name to show may follow after a tab.

    Returns:
        The names to show by what the data set calls the classes, in the order of their labels.

    Raises:
        UserError: It can't be read, lists none, or one twice.
    """
    try:
        lines = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: can't be read as a list of classes ({error})") from error
    classes: dict[str, str] = {}
    for line in lines:
        key, _, name = line.partition("\t")
        if key in classes:
            raise UserError(f"{file}: lists {key!r} twice; one class a line")
        classes[key] = name.strip() or key
    if not classes:
        raise UserError(f"{file}: lists no class; one class a line")
    return classes


def number_labels(
    splits: Mapping[str, Sequence[str]], listed: Mapping[str, str] | None, where: str
) -> tuple[tuple[str, ...], dict[str, Int64]]:
    """The classes of a data set whose labels are texts, and the labels as numbers.

    Where all labels are whole numbers they are taken as they are. Otherwise they are the names of the classes, which
    are numbered in the order of the list, or else sorted.

    Args:
        splits: The label of each image, by split; `train` is among them.
        listed: As `read_classes` gives it; None: nobody has listed them.
        where: Begins the messages.

    Returns:
        The class names by label, and the labels, int64 [images], by split.

    Raises:
        UserError: A label is not among the classes.

    >>> number_labels({"train": ["tulip", "daisy"], "eval": ["daisy"]}, None, "set")[0]
    ('daisy', 'tulip')
    """
    if all(label.isascii() and label.isdigit() and len(label) < 10 for label in _distinct(splits.values())):
        numbers = {split: np.array(list(map(int, labels)), dtype=np.int64) for split, labels in splits.items()}
        largest = max(int(each.max(initial=-1)) for each in numbers.values())
        if largest >= (len(listed) if listed is not None else MOST_CLASSES):
            what = f"{len(listed)} classes are listed" if listed is not None else f"at most {MOST_CLASSES} are taken"
            raise UserError(f"{where}: a label of {largest}, but {what}; labels count from 0")
        names = listed.values() if listed is not None else map(str, range(largest + 1))
        return tuple(names), numbers
    keys = list(listed) if listed is not None else sorted(_distinct([splits["train"]]))
    number_of = {key: number for number, key in enumerate(keys)}
    for split, labels in splits.items():
        for label in _distinct([labels]):
            if label not in number_of:
                raise UserError(f"{where}: an image of {split} is of class {label!r}{suggest(label, keys)}")
    found = {s: np.array([number_of[label] for label in labels], dtype=np.int64) for s, labels in splits.items()}
    return tuple(listed.values() if listed is not None else keys), found


def _distinct(runs: Iterable[Iterable[str]]) -> set[str]:
    return {label for run in runs for label in run}
