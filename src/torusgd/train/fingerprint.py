"""What must be equal for two ranks, or two parts of a run, to belong together: one value, compared in one place.

The recipe, the data and the initial weights decide the result: ranks or checkpoints that differ in them are of another
run. The conditions (device model, torch build, threads) decide the bits: ranks of one run must have the same, and a run
that goes on under others says so.
"""

import json
import socket
from dataclasses import asdict, dataclass, fields

from ..comm.groups import Group
from ..errors import UserError

Conditions = dict[str, str | int]

_WHAT = {
    "recipe_sha256": "another recipe",
    "train_images": "another data set",
    "init_sha256": "other initial weights (--init)",
}


@dataclass(frozen=True)
class Fingerprint:
    """Of a run, as a rank or a checkpoint knows it."""

    recipe_sha256: str
    train_images: int
    init_sha256: str
    """of the weights that the run started from; empty: drawn from the seed"""
    conditions: Conditions

    def check_same_run(self, other: "Fingerprint", whose: str) -> None:
        """UserError where `other`, a checkpoint's, is of another recipe, data set or initial weights."""
        for key, what in _WHAT.items():
            then, now = getattr(other, key), getattr(self, key)
            if then != now:
                raise UserError(
                    f"{whose} was trained with {what} ({key} {then!r}, now {now!r}); choose another --out, or give "
                    "--fresh"
                )

    def as_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, object]) -> "Fingerprint":
        """From what `as_dict` gave; KeyError or TypeError where it is something else."""
        return cls(**{field.name: tree[field.name] for field in fields(cls)})  # type: ignore[arg-type]


def check_ranks_agree(mine: Fingerprint, world: Group) -> None:
    """Compares all ranks' fingerprints with rank 0's; every rank calls it.

    Raises:
        UserError: On every rank, naming the first rank that differs, its host, the key and both values.
    """
    text = json.dumps([socket.gethostname(), mine.as_dict()], sort_keys=True)
    hosts, found = zip(*(json.loads(world.broadcast_text(text, place)) for place in range(world.size)), strict=True)
    first = _flat(found[0])
    for place, other in enumerate(map(_flat, found)):
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise UserError(
                    f"rank {world.ranks[place]} on {hosts[place]}: {key} is {other.get(key)!r}, of rank "
                    f"{world.ranks[0]} on {hosts[0]} it is {first.get(key)!r}; all ranks of a run need the same"
                )


def _flat(tree: dict[str, object]) -> dict[str, object]:
    conditions = tree["conditions"]
    assert isinstance(conditions, dict)
    return {key: value for key, value in tree.items() if key != "conditions"} | conditions
