"""Built-in recipes, and how a recipe is read: a name or a YAML file, overrides, validation in one line."""

import json
import logging
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import UserError, suggest
from .runtime_options import RuntimeOptions
from .schema import Recipe

M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A recipe with the `runtime:` block that stood beside it."""

    recipe: Recipe
    runtime: RuntimeOptions


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (1e-3 is a number) and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} appears twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+0123456789.")
)


def recipe_names() -> list[str]:
    """The names of the built-in recipes, sorted."""
    return sorted(f.name.removesuffix(".yaml") for f in files(__package__).iterdir() if f.name.endswith(".yaml"))


def recipe_source(name: str) -> str:
    """The YAML text of a built-in recipe, comments included; UserError when there is none of that name."""
    if name not in recipe_names():
        raise UserError(f"recipe {name!r}: no file and no built-in recipe of that name{suggest(name, recipe_names())}")
    return (files(__package__) / f"{name}.yaml").read_text()


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a recipe by built-in name or from a YAML file.

    Args:
        name: A built-in name, or the path of a YAML file.
        overrides: Items `key.path=value` as `apply_overrides` takes them; `batch=N` picks the row of a recipe that has
            a table `batches` of the values that go with a batch, and the other items change what it says.

    Raises:
        UserError: One line that names the key, the value and what is allowed.

    >>> load_recipe("digits", ["seed=3"]).recipe.seed
    3
    >>> load_recipe("resnet50", ["batch=8192"]).recipe.rate.lr
    17.0
    """
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    try:
        text = Path(name).read_text() if is_path else recipe_source(name)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {name}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    tree = parse_yaml(text, f"recipe {name}")
    if not isinstance(tree, dict):
        raise UserError(f"recipe {name}: needs keys and values, such as 'model: {{name: resnet50}}'")
    apply_overrides(tree, _pick_batch(tree, overrides, name))
    runtime = tree.pop("runtime", None) or {}
    return Loaded(
        validate(Recipe, tree, f"recipe {name}"), validate(RuntimeOptions, runtime, f"recipe {name}: runtime")
    )


def validate(model: type[M], tree: object, where: str) -> M:
    """Builds a pydantic model from plain values; UserError of one line for the first mistake."""
    try:
        return model.model_validate_json(json.dumps(tree))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise UserError(f"{where}: holds a date or a set; use plain numbers and text") from None
        raise UserError(f"{where}: {_first_line(error, model)}") from None


def parse_yaml(text: str, where: str) -> Any:
    """Plain values of a YAML text; UserError of one line with the line number."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{where}:{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Changes the plain values of a recipe in place, item by item.

    Args:
        tree: A recipe's keys and values.
        overrides: Items `key.path=value`; list items by index (`stages.0.images_per_worker=8`), the value in YAML.

    Another `model.name` leaves out the `model.options` that stood there, since they are the replaced network's: one
    logged line names them. Items after it set options of the new one.

    Raises:
        UserError: An item leads nowhere, or its value is no YAML.

    >>> tree = {"model": {"name": "digits-net", "options": {"dropout": 0.1}}}
    >>> apply_overrides(tree, ["model.name=resnet18", "model.options.zero_gamma=true"])
    >>> tree
    {'model': {'name': 'resnet18', 'options': {'zero_gamma': True}}}
    """
    for item in overrides:
        replaced = _at(tree, "model", "name")
        _override(tree, item)
        if item.startswith("model.name=") and _at(tree, "model", "name") != replaced:
            options = tree["model"].pop("options", None)
            if options:
                _log.warning("--set %s: leaves out the model.options of %s: %s", item, replaced, ", ".join(options))


def _pick_batch(tree: dict[str, Any], overrides: Sequence[str], name: str) -> list[str]:
    """Puts the values of one row of `batches` into the tree and takes the table out; the overrides that are left."""
    rows, batch = tree.pop("batches", None), tree.pop("batch", None)
    for item in overrides:
        if item.startswith("batch="):
            batch = parse_yaml(item.removeprefix("batch="), f"--set {item}")
    if batch is not None or rows is not None:
        if not isinstance(rows, dict):
            raise UserError(
                f"batch = {batch}: recipe {name} has no table `batches` to pick from; set virtual_workers and "
                "stages.N.images_per_worker, whose product is the batch"
            )
        if not isinstance(rows.get(batch), dict):
            raise UserError(f"batch = {batch}: recipe {name} has no such row; use one of {', '.join(map(str, rows))}")
        for path, value in rows[batch].items():
            _put(tree, str(path), value, f"batches.{batch}.{path}")
    return [item for item in overrides if not item.startswith("batch=")]


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _override(tree: dict[str, Any], item: str) -> None:
    path, separator, value = item.partition("=")
    if not separator or not path:
        raise UserError(f"--set {item}: write it as key.path=value, such as rate.lr=0.1")
    _put(tree, path, parse_yaml(value, f"--set {item}"), f"--set {item}")


def _put(tree: dict[str, Any], path: str, value: Any, where: str) -> None:
    *parents, last = path.split(".")
    node: Any = tree
    for key in parents:
        index = _index(node, key, where)
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = {}
        node = node[index]
    node[_index(node, last, where)] = value


def _index(node: Any, key: str, where: str) -> Any:
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise UserError(f"{where}: the key before {key!r} holds a plain value, not keys")
    if not key.isdigit() or int(key) >= len(node):
        raise UserError(f"{where}: {key!r} is no item of that list; use 0 to {len(node) - 1}")
    return int(key)


def _first_line(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    # Unions add the names of the branches that were tried; they are no keys of the user's file.
    key = ".".join(part for part in location if re.fullmatch(r"[a-z_0-9]+", part) and part not in _BRANCHES)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        return f"{key}: unknown key{suggest(location[-1], known)}"
    if first["type"] == "missing":
        return f"{key}: is missing; it must be given"
    given = "" if isinstance(first["input"], dict) else f" = {json.dumps(first['input'])}"
    return f"{key}{given}: {message[0].lower()}{message[1:]}" if key else message


_BRANCHES = frozenset({"float", "int", "str", "bool", "constrained", "literal"})


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The keys allowed at a place, found by walking the annotations."""
    current: Any = model
    for part in location:
        annotation = current.model_fields[part].annotation if hasattr(current, "model_fields") else current
        if part.isdigit():
            continue
        found = [a for a in _flatten(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        current = found[0] if found else current
    return list(current.model_fields)


def _flatten(annotation: Any) -> list[Any]:
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(leaf for a in inner for leaf in _flatten(a))]
