"""Finds cluster files and software profiles: by the name of one that ships, or by the path of a user's own."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError, suggest
from ..recipe.load import parse_yaml, validate
from ..recipe.schema import Section
from .calibration import calibrated
from .cluster import Cluster, Software

D = TypeVar("D", bound=Section)


def cluster_names() -> list[str]:
    """Clusters that ship with torusgd, sorted."""
    return _names("clusters")


def software_names() -> list[str]:
    """Software profiles that ship with torusgd, sorted."""
    return _names("software")


def load_cluster(name: str) -> Cluster:
    """A cluster by built-in name or YAML path; UserError of one line names what is missing or wrong.

    >>> load_cluster("abci").devices_per_node
    4
    """
    return _load("clusters", "cluster", name, Cluster)


def load_software(name: str) -> Software:
    """A software profile by built-in name or YAML path; built-in ones as calibrated on the published results."""
    return _load("software", "software", name, Software)


def tree_of(folder: str, name: str) -> dict[str, Any]:
    """The plain values of a shipped file, before calibration."""
    return dict(_read(folder, name))


def _names(folder: str) -> list[str]:
    entries = files(__package__).joinpath(folder).iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))


@cache
def _read(folder: str, name: str) -> dict[str, Any]:
    return _mapping(files(__package__).joinpath(folder, f"{name}.yaml").read_text(), f"{folder}/{name}.yaml")


def _load(folder: str, kind: str, name: str, model: type[D]) -> D:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{kind} {name}: can't be read: {getattr(error, 'strerror', None) or error}") from error
        return validate(model, _mapping(text, f"{kind} {name}"), f"{kind} {name}")
    if (folder, name) == ("clusters", "local"):
        raise UserError(
            "cluster local: is this machine, as measured; torusgd tune --out profile.json, then --profile it"
        )
    known = _names(folder)
    if name not in known:
        raise UserError(f"{kind} {name}: none of that name{suggest(name, known)} (or give a YAML file of your own)")
    return validate(model, calibrated(folder, name, tree_of(folder, name)), f"{kind} {name}")


def _mapping(text: str, where: str) -> dict[str, Any]:
    tree = parse_yaml(text, where)
    if not isinstance(tree, dict):
        raise UserError(f"{where}: needs keys and values, such as 'name: mine'")
    return tree
