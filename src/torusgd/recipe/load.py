"""Built-in recipes, and how a recipe is read: a name or a YAML file, overrides, validation, code of a user's own."""

import copy
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import UserError, as_user_error, in_one_line, suggest
from ..text import listed
from ..untrusted import MOST_YAML, read_text
from .runtime_options import RuntimeOptions
from .schema import Recipe
from .section import section_in

M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger(__name__)

_DEEPEST = 20  # nesting of lists and tables in a YAML text; a recipe has 5
_MOST_NODES = 100_000  # in a YAML text with each alias written out
_LONGEST_SHOWN = 100  # characters of a wrong value
_BE = "Input should be "  # with which pydantic begins what it says of a value


class Loaded(NamedTuple):
    """A recipe with the `runtime:` block that stood beside it."""

    recipe: Recipe
    runtime: RuntimeOptions


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers, no key twice, and bounds on what a short text can stand for."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _yaml_error(f"more than {_DEEPEST} lists and tables inside one another", self.peek_event())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        _count(node, {})  # before values are made of it: aliases make many of a short text
        return self.construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _yaml_error("the merge key << is not taken; write the keys out", key_node)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _yaml_error("a key must be a word or a number", key_node)
            if key in seen:  # PyYAML would take the last one in silence
                raise _yaml_error(f"key {key!r} appears twice", node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        if abs(value) >= 1 << 63:  # beyond it no seed or count fits a tensor
            raise _yaml_error("a whole number beyond 64 bits", node)
        return value


def _count(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Values below a node, those of an alias once for each use; None in `counts` while a node is being counted."""
    # Ten lists that each hold the one before ten times are 10^10 values in 300 bytes.
    if id(node) not in counts:
        counts[id(node)] = None
        # A node that is met again while it is still None holds itself.
        below = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        counts[id(node)] = 1 + (0 if isinstance(below, str) else sum(_count(each, counts) for each in below))
    count = counts[id(node)]
    if count is None:
        raise _yaml_error("an alias inside of what it stands for", node)
    if count > _MOST_NODES:
        raise _yaml_error(f"more than {_MOST_NODES} values, counting each alias as what it stands for", node)
    return count


def _yaml_error(problem: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, where.start_mark)


_INT = "tag:yaml.org,2002:int"
_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
# PyYAML follows YAML 1.1, in which 017 is 15, 1:30 is 90, and 1e-3 is text.
_Loader.yaml_implicit_resolvers = {
    first: [each for each in known if each[0] != _INT]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+0123456789.")
)


def recipe_names() -> list[str]:
    return sorted(f.name.removesuffix(".yaml") for f in files(__package__).iterdir() if f.name.endswith(".yaml"))


def recipe_source(name: str) -> str:
    """The YAML text of a built-in recipe with its comments; UserError if there is none of that name."""
    if name not in recipe_names():
        raise UserError(f"recipe {name!r}: no built-in recipe of that name{suggest(name, recipe_names())}")
    return (files(__package__) / f"{name}.yaml").read_text()


@cache
def _built_in(name: str) -> dict[str, Any]:
    return parse_mapping(recipe_source(name), f"recipe {name}")  # a sweep loads the same one a thousand times


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a recipe by built-in name or from a YAML file; UserError of one line with key, value and what is allowed.

    `overrides` are items `key.path=value` as `apply_overrides` takes them; `batch=N` picks the row of a recipe that has
    a table `batches` of the values that go with a batch, and the other items change what it says.

    >>> load_recipe("digits", ["seed=3"]).recipe.seed
    3
    >>> load_recipe("resnet50", ["batch=8192"]).recipe.rate.lr
    17.0
    """
    is_path = name.endswith((".yaml", ".yml")) or "/" in name or (name not in recipe_names() and Path(name).is_file())
    where = f"recipe {name}"
    tree = parse_mapping(read_file(Path(name), where), where) if is_path else copy.deepcopy(_built_in(name))
    apply_overrides(tree, _pick_batch(tree, overrides, name))
    runtime = tree.pop("runtime", None)
    options = validate(RuntimeOptions, {} if runtime is None else runtime, f"{where}: runtime")
    return Loaded(validate(Recipe, tree, where), options)


def read_run_recipe(path: Path) -> Recipe:
    """The complete recipe that a run wrote; UserError if it is damaged."""
    return validate(Recipe, parse_yaml(read_file(path, str(path)), str(path)), str(path))


def read_file(path: Path, where: str, most: int = MOST_YAML) -> str:
    """The text of a user's file; UserError if it can't be read or has more than `most` bytes."""
    with as_user_error(f"{where}: can't be read", of=(OSError, ValueError)):
        return read_text(path, most)


def validate(model: type[M], tree: object, where: str) -> M:
    """Builds a pydantic model from plain values; UserError of one line for the first mistake."""
    try:
        # By way of JSON: strict models take its lists for tuples, and still no text for a number.
        text = json.dumps(tree)
        return model.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_line(error, model, json.loads(text))}") from None
    except (TypeError, ValueError):
        raise UserError(f"{where}: holds a date or a set; use plain numbers and text") from None


def parse_yaml(text: str, where: str) -> Any:
    """Plain values of a YAML text; UserError of one line with the line number."""
    try:
        if len(text) > MOST_YAML:
            raise ValueError(f"longer than {MOST_YAML} characters")
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # PyYAML lets pass what Python raises where a value doesn't fit its tag
        mark = getattr(error, "problem_mark", None)
        line = f": line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or in_one_line(error)
        raise UserError(f"{where}{line}: not valid YAML: {reason}") from error


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """The keys and plain values of a YAML text; UserError if it has none."""
    tree = parse_yaml(text, where)
    if not isinstance(tree, dict):
        raise UserError(f"{where}: needs keys and values, such as 'name: mine'")
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Changes the plain values of a recipe in place by items `key.path=value`, in their order; values are YAML."""
    for item in overrides:
        where, model = f"--set {item}", tree.get("model")
        replaced = model.get("name") if isinstance(model, dict) else None
        path, separator, value = item.partition("=")
        if not separator or not path:
            raise UserError(f"{where}: write it as key.path=value, such as rate.lr=0.1")
        _put(tree, path, parse_yaml(value, where), where)
        # Options are those of the replaced network; items after this one set those of the new one.
        if path == "model.name" and tree["model"]["name"] != replaced:
            options = tree["model"].pop("options", None)
            if options:
                _log.warning("--set %s: leaves out the model.options of %s: %s", item, replaced, listed(options))


def import_factory(path: str, *, key: str) -> Callable[..., Any]:
    """The callable that `package.module:factory` names in a recipe, at a key such as `model.name`."""
    module_name, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise UserError(f"{key}: write a factory of your own as package.module:factory, got {path!r}")
    # Modules in the current folder are found too, after all installed ones: a console script, unlike `python -m`, does
    # not look there.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    remedy = "run where its folder is, or set PYTHONPATH"
    with as_user_error(f"{key}: can't import {module_name}", remedy, ModuleNotFoundError):
        module = importlib.import_module(module_name)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UserError(f"{key}: {module_name} has no callable {name!r} ({module.__file__})")
    return factory


def _pick_batch(tree: dict[str, Any], overrides: Sequence[str], name: str) -> list[str]:
    """Puts the values of one row of `batches` into the tree and takes the table out; the overrides that are left."""
    # A row is written first, so that the other overrides change what it says, in whatever order they were given.
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
        if isinstance(batch, list | dict) or not isinstance(rows.get(batch), dict):
            raise UserError(f"batch = {batch}: recipe {name} has no such row; use one of {listed(rows)}")
        for path, value in rows[batch].items():
            _put(tree, str(path), value, f"batches.{batch}.{path}")
    return [item for item in overrides if not item.startswith("batch=")]


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
    if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= len(node):
        raise UserError(f"{where}: {key!r} is no item of that list; use 0 to {len(node) - 1}")
    return int(key)


def _first_line(error: ValidationError, model: type[BaseModel], tree: Any) -> str:
    found = [(_keys(each, tree), each) for each in error.errors(include_url=False)]
    keys, first = found[0]
    if first["type"] == "json_invalid":
        return "holds text that is no Unicode, such as half a surrogate pair"
    # A value of several forms has an error for each. One that is not of the type says what is wrong with the form that
    # was meant; else any form would do.
    forms = [(own, each) for own, each in found if own[: len(keys)] == keys]
    meant = [(own, each) for own, each in forms if own != keys or not each["type"].endswith(("_type", "literal_error"))]
    if meant:
        (keys, first), forms = meant[0], meant[:1]
    # A key that a plain one could not stand beside, such as one with a blank at its end, is quoted.
    key = ".".join(part if re.fullmatch(r"\w+", part) else json.dumps(part) for part in keys)
    words = list(dict.fromkeys(each["msg"] for _, each in forms))
    message = ", or ".join([words[0].removeprefix("Value error, "), *(each.removeprefix(_BE) for each in words[1:])])
    if first["type"] == "extra_forbidden":
        for part in keys[:-1]:
            if part in model.model_fields:  # and no place in a list, whose items' model the walk has already reached
                model = section_in(model.model_fields[part].annotation) or model
        return f"{key}: unknown key{suggest(keys[-1].strip().lower(), model.model_fields)}"
    if first["type"] == "missing":
        return f"{key}: is missing; it must be given"
    text = json.dumps(first["input"])
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    given = "" if isinstance(first["input"], dict) else f" = {text}"
    return f"{key}{given}: {message[0].lower()}{message[1:]}" if key else message


def _keys(error: Any, tree: Any) -> list[str]:
    """The keys and places of a user's file in an error's location, which has the forms that were tried among them."""
    found = []
    for part in error["loc"]:
        try:
            tree = tree[part]
        except (LookupError, TypeError):
            if error["type"] != "missing" or part != error["loc"][-1]:
                continue
        found.append(str(part))
    return found
