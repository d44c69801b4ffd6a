"""What must be equal for two ranks, or two parts of a run, to belong together: one value, compared in one place.

The recipe, the data and the initial weights decide the result: ranks or checkpoints that differ in them are of another
run. The conditions (`train.conditions`) decide the bits: ranks of one run must have the same unless the run allows
mixed ones, and a run that goes on under others says so.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch

from ..comm.groups import Group
from ..errors import UserError
from .conditions import Conditions

_WHAT = {
    "recipe_sha256": "another recipe",
    "train_images": "another data set",
    "data_sha256": "another data set",
    "data_revision": "another commit of the data set",
    "init_sha256": "other initial weights (--init)",
    "replayed_sha256": "another journal",
}
_LONG = 160
"""characters of two values that are shown whole"""


@dataclass(frozen=True)
class Fingerprint:
    """Of a run, as a rank or a checkpoint knows it."""

    recipe_sha256: str
    train_images: int
    data_sha256: str
    """names, sizes, labels and a sample, see `data.fingerprint`"""
    init_sha256: str
    """of the weights of --init; empty: drawn from the seed"""
    drawn_sha256: str
    """of the network's weights as this rank drew them from the seed; another torch may draw others"""
    conditions: Conditions
    replayed_sha256: str = ""
    """of the journal that is replayed; empty: none"""
    data_revision: str = ""
    """the commit of a data set of the hub; empty: it is none of the hub's"""

    def check_same_run(self, other: "Fingerprint", whose: str) -> None:
        """UserError where `other`, a checkpoint's, is of another recipe, data set or initial weights."""
        for key, what in _WHAT.items():
            then, now = getattr(other, key), getattr(self, key)
            if then != now:
                raise UserError(
                    f"{whose} was trained with {what} ({key} {then!r}, now {now!r}); choose another --out, or give "
                    "--fresh"
                )

    def check_joins(self, run: "Fingerprint", mixed: bool) -> None:
        """UserError where a rank with this fingerprint doesn't belong to a run.

        Args:
            run: Of a run that is at work.
            mixed: It allows ranks under other conditions.
        """
        unequal = {
            key: values for key, values in _unequal(run.as_dict(), self.as_dict()).items() if key != "conditions"
        }
        if not unequal and not mixed:
            unequal = _unequal(run.conditions, self.conditions)
        for key, (theirs, mine) in unequal.items():
            raise UserError(
                f"{_WHAT.get(key, 'other conditions')}: {key} is {mine} on {socket.gethostname()}, of the run it is "
                f"{theirs}; all ranks of a run need the same"
            )

    def as_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, object]) -> "Fingerprint":
        """From what `as_dict` gave; KeyError or TypeError where it is something else."""
        tree = {"replayed_sha256": "", "data_revision": "", **tree}  # which older checkpoints lack
        return cls(**{field.name: tree[field.name] for field in fields(cls)})  # type: ignore[arg-type]


def check_ranks_agree(mine: Fingerprint, options: Mapping[str, object], world: Group, mixed: bool) -> list[Conditions]:
    """Compares all ranks' fingerprints and options with rank 0's; every rank calls it.

    Args:
        mine: Of this rank.
        options: This rank's runtime options, which decide what messages there are; plain JSON.
        world: All ranks.
        mixed: Ranks may have other conditions than rank 0.

    Returns:
        The conditions of ranks that have others than rank 0, each once.

    Raises:
        UserError: On every rank, naming the first rank that differs, its host, the key and both values.
    """
    told = json.dumps([socket.gethostname(), {**options, **mine.as_dict()}])
    host, first = json.loads(world.broadcast_text(told))
    differing = torch.zeros(world.size, dtype=torch.int32, device=world.small_device)
    differing[world.rank] = json.loads(told)[1] != first
    world.all_reduce(differing)
    found: list[Conditions] = []
    for place in differing.nonzero().flatten().tolist():  # none in a good run, so that its start takes two messages
        other_host, other = json.loads(world.broadcast_text(told, place))
        conditions = other.pop("conditions")
        unequal = _unequal({key: value for key, value in first.items() if key != "conditions"}, other)
        remedy = "all ranks of a run need the same"
        if not unequal and not mixed:
            unequal = _unequal(first["conditions"], conditions)
            remedy += ", or --mixed, with which the weights can't be had again bit for bit"
        for key, (one, two) in unequal.items():
            raise UserError(
                f"rank {world.ranks[place]} on {other_host}: {key} is {two}, of rank {world.ranks[0]} on {host} it is "
                f"{one}; {remedy}"
            )
        if conditions not in found:
            found.append(conditions)
    return found


def changes(then: Conditions, now: Conditions) -> str:
    """How conditions differ, for one line."""
    return "; ".join(f"{key} was {one}, is {two}" for key, (one, two) in _unequal(then, now).items())


def _unequal(one: Mapping[str, object], two: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """By key, both values as they are shown."""
    keys = sorted(one.keys() | two.keys())
    return {key: _shown(one.get(key), two.get(key)) for key in keys if one.get(key) != two.get(key)}


def _shown(one: object, two: object) -> tuple[str, str]:
    """Both values; of long lists of words only those that the other lacks."""
    if not (isinstance(one, str) and isinstance(two, str) and len(one) + len(two) > _LONG):
        return repr(one), repr(two)
    words, others = one.split(), two.split()
    return repr(" ".join(w for w in words if w not in others)), repr(" ".join(w for w in others if w not in words))
