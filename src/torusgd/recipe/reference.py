"""Every key of a recipe, and what does not go together, as Markdown tables: `torusgd recipes --keys`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..text import listed
from .compatibility import table as rules
from .runtime_options import STEPS, RuntimeOptions, flags_of
from .schema import Recipe
from .section import Duration, section_in

_LIMITS = {
    Ge: "at least {.ge}", Gt: "above {.gt}", Le: "at most {.le}", Lt: "below {.lt}",
    MinLen: "at least {.min_length} of them",
}  # fmt: skip


def reference() -> str:
    """Three tables: the recipe's keys, those of the `runtime:` block with their flags, what does not go with what."""
    runtime = [(f"`{key}`", _flags(key), *cells) for key, *cells in _rows(RuntimeOptions)]
    return "\n".join([
        *_table("Recipe", ("key", "values", "default", "meaning"), [(f"`{key}`", *row) for key, *row in _rows(Recipe)]),
        *_table("The `runtime:` block", ("key", "flag", "values", "default", "meaning"), runtime),
        *_table("What does not go together", ("this", "does not go with", "since", "instead"), rules()),
    ])  # fmt: skip


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)), ""]


def _flags(option: str) -> str:
    """The flag of an option, and the commands that have it unless all that train or plan steps do."""
    flag, names = flags_of(option)
    if flag is None:
        return ""
    shown = listed(f"`{name}`" for name in names)
    return shown if set(flag.commands) >= set(STEPS) else f"{shown} of {listed(flag.commands)}"


def _rows(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        inner = section_in(field.annotation)
        text = (field.description or "").replace("\n", " ").replace("|", "\\|")
        if inner is None:
            yield path + name, ", ".join([_words(field.annotation), *_limits(field.metadata)]), _default(field), text
            continue
        many = get_origin(field.annotation) is tuple  # such as stages, whose keys are stages.N.until and so on
        text = text or (inner.__doc__ or "").strip().splitlines()[0]
        yield path + name, "a list of" if many else "keys", _default(field), text
        yield from _rows(inner, f"{path}{name}.{'N.' if many else ''}")


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([_words(parts[0]), *_limits(parts[1:])])
    if origin is Literal:
        return " or ".join(f"`{part}`" if part != "" else '""' for part in parts)
    if origin is tuple:
        return "a list of: " + _words(parts[0]) if parts[-1] is Ellipsis else f"{len(parts)} of: {_words(parts[0])}"
    if origin is dict:
        return "names with plain values"
    if parts:
        return " or ".join(_words(part) for part in parts)
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    return "duration" if annotation is Duration else names[annotation]


def _limits(metadata: Any) -> list[str]:
    # A `Field(...)` has several limits in it.
    limits = [limit for item in metadata for limit in getattr(item, "metadata", None) or [item]]
    return [_LIMITS[type(limit)].format(limit) for limit in limits if type(limit) in _LIMITS]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.default
    if isinstance(value, BaseModel):  # its own keys have their defaults
        return ""
    if isinstance(value, tuple | dict):
        return f"`{list(value) if isinstance(value, tuple) else value}`".replace("'", "")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"`{value}`" if value != "" else '""'
