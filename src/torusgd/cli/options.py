"""The options that several commands share, each written once, and those of the runtime, made from `RuntimeOptions`."""

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from typer import Argument, Option

from ..comm.algorithms import METHODS, OTHER_PROGRAMS, SCHEDULED
from ..errors import UserError
from ..text import listed
from .output import check_writable

if TYPE_CHECKING:  # at run time only once a command runs: `torusgd --help` takes no seconds
    from ..recipe.runtime_options import RuntimeOptions

DATA, RECIPE, RUNTIME, NETWORK, OUTPUT = "Data", "Recipe", "Runtime", "Network", "Output"  # panels of --help
_log = logging.getLogger(__name__)


def flag(
    text: str, panel: str | None = None, metavar: str | None = None, default: Any = None, name: str = "", **more: Any
) -> Any:
    """What makes a parameter of a command, or a field of a group, an option; MISSING as `default`: it must be given."""
    return field(default=default, metadata={"name": name, "text": text, "panel": panel, "metavar": metavar, **more})


def option(name: str, text: str, panel: str | None = None, metavar: str | None = None, **more: Any) -> Any:
    return Option(name, help=text, rich_help_panel=panel, metavar=metavar, **more)


RecipeName = Annotated[str, Argument(metavar="RECIPE", help="A built-in recipe's name, or a YAML file.")]
Overrides = Annotated[list[str] | None, option(
    "--set", "Change a key of the recipe; repeatable. Another model.name leaves out the model.options before it.",
    RECIPE, "KEY.PATH=VALUE",
)]  # fmt: skip
DataPath = Annotated[Path | None, option("--data", "Read the data set from this folder or file.", DATA)]
InitialWeights = Annotated[str | None, option(
    "--init", "Start from these weights: a .safetensors or .pth, timm's own, or a repository of the Hugging Face hub. "
    "A head for other classes is made anew.", DATA, "FILE|timm|hf:REPO",
)]  # fmt: skip
JsonFile = Annotated[Path | None, option(
    "--json", "Also write the result to this file, as JSON.", OUTPUT,
    callback=lambda path: check_writable("--json", path),
)]  # fmt: skip

# The end of a flag's help, with names of rooms above the option's.
_MORE = {
    "allreduce": f" The others are {listed(SCHEDULED)}; name the methods of both axes as in torus:halving/ring, of "
    f"{listed(METHODS)}. plan also prices those of other programs: {listed(OTHER_PROGRAMS)}."
}


class RuntimeFlags:
    """The flags of a command that override a recipe's `runtime:` block; `given` has those that are not None or []."""

    def __init__(self, **flags: Any) -> None:
        self.given = {name: value for name, value in flags.items() if value not in (None, [])}

    def over(self, block: "RuntimeOptions | None" = None) -> "RuntimeOptions":
        """The options of a `runtime:` block with these flags in place of its own; UserError for a wrong value."""
        from ..recipe.load import parse_yaml, validate
        from ..recipe.runtime_options import RuntimeOptions

        given, block = dict(self.given), block or RuntimeOptions()
        if "workers" in given:
            text = str(given.pop("workers"))
            if re.fullmatch("[0-9]{1,99}(:[0-9]{1,99})?", text) is None:
                raise UserError(f"--workers {text}: takes a number of ranks, or MIN:MAX such as 2:4")
            numbers = [int(part) for part in text.split(":")]
            given |= {"workers": numbers[0]} if len(numbers) == 1 else {"workers_range": numbers}
            block = block.without(["workers", "workers_range"])  # one number replaces a range, and the other way
        if "allreduce" in given:  # a grid belongs to the all-reduce that it was written beside
            block = block.without(["grid"])
        for key in given.keys() & {"model_parallel", "buckets"}:  # a word, a number or a list, as in a recipe file
            given[key] = parse_yaml(given[key], f"--{key.replace('_', '-')} {given[key]}")
        # Only what was given is handed on: a plan of another program takes nothing else.
        return validate(RuntimeOptions, {**block.model_dump(mode="json", exclude_unset=True), **given}, "flags")

    def fitted(self, options: "RuntimeOptions", block: "RuntimeOptions", ranks: int) -> "RuntimeOptions":
        """The options without those of the recipe's block that are for another number of ranks; one line names them."""
        # A record's block holds the grid of its machine, and the recipe trains on a laptop too. A flag does not give
        # way, nor does a block that itself names this number of ranks: these are mistakes, which the run refuses.
        left_out = [] if block.workers == ranks else [n for n in options.unfit(ranks) if n not in self.given]
        # One process speaks for all ranks of a launcher.
        if left_out and os.environ.get("RANK", "0") == "0":
            names = listed(f"{name} = {getattr(options, name)}" for name in left_out)
            _log.warning("the recipe's runtime block is for another number of ranks than %d: left out %s", ranks, names)
        return options.without(left_out)


def runtime_flags(command: str) -> Iterator[inspect.Parameter]:
    """The flags that a command has of the runtime options, as parameters that Typer reads."""
    from ..recipe.runtime_options import RuntimeOptions, flags_of

    for name, info in RuntimeOptions.model_fields.items():
        flag, names = flags_of(name)
        # The values stay as they were typed: `validate` checks them as it checks those of a recipe file.
        if flag is None or command not in flag.commands:
            continue
        kind, words = _kind_of(info.annotation)
        default = ("no", "yes")[info.default] if kind is bool else str(info.default or "")
        text = " ".join((info.description or "").split()) + _MORE.get(name, "")
        made = Option(
            None,
            *(f"{each}/--no-{each.removeprefix('--')}" if kind is bool else each for each in names),
            help=f"{text} Default: {default}." if default else text,
            rich_help_panel=flag.panel, metavar=flag.metavar or words or None,
        )  # fmt: skip
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=made, annotation=kind | None)


def _kind_of(annotation: Any) -> tuple[Any, str]:
    """The type that Typer reads, and the words to choose from, of an option's annotation: `int`, or `str` and `a|b`."""
    parts = get_args(annotation)
    if type(None) in parts:
        return _kind_of(parts[0])
    if get_origin(annotation) is tuple:
        return list[str], _kind_of(parts[0])[1]
    if annotation in (bool, int, float):
        return annotation, ""
    return str, "|".join(map(str, parts)) if get_origin(annotation) is Literal else ""


@dataclass(frozen=True)
class PlannedMachine:
    """The machine and the program that plan and rehearse take in place of this one."""

    cluster: str | None = flag("Plan for this cluster: a name, a YAML file, or local.", "Cluster")
    software: str | None = flag(
        "Plan by this software profile; a rehearsal takes its speed. By default torusgd, or the record's.", "Cluster"
    )
    measured: Path | None = flag(
        "Take the compute from this finished run with one worker on such a device; --cluster local needs it.", "Cluster"
    )


@dataclass(frozen=True)
class TrainedWeights:
    """The weights that eval and polish open, and the data that they read."""

    checkpoint: Annotated[
        Path, Argument(metavar="CHECKPOINT", help="A run's folder, a checkpoint's or a weight file; or its URL.")
    ]
    data: DataPath = None
    classes: str | None = flag("Read the class folders in the weights' order from this file of the data folder.", DATA)
    model: str | None = flag("Take this network, for weights trained elsewhere.", RECIPE)
    overrides: Overrides = None


def _parameter(name: str, annotation: Any, default: "Field[Any]") -> inspect.Parameter:
    """What Typer reads of an option or argument: its flag is its name's, unless it has another."""
    if default.metadata:
        words = dict(default.metadata)
        annotation = Annotated[annotation, option(words.pop("name") or f"--{name.replace('_', '-')}", **words)]
    value = inspect.Parameter.empty if default.default is MISSING else default.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)


def expand(command: Callable[..., object], name: str) -> Callable[..., object]:
    """A command with each parameter that is a group (a dataclass, `RuntimeFlags`) replaced by the group's options."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        found, group = [parameter], parameter.annotation
        if group is RuntimeFlags:
            found = list(runtime_flags(name))
        elif isinstance(group, type) and is_dataclass(group):
            found = [_parameter(each.name, each.type, each) for each in fields(group)]
        elif isinstance(parameter.default, Field):
            found = [_parameter(parameter.name, parameter.annotation, parameter.default)]
        if group is RuntimeFlags or is_dataclass(group):
            groups[parameter.name] = group, [each.name for each in found]
        # By keyword, since options with and without defaults follow one another.
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in found]

    @wraps(command)
    def flat(**values: Any) -> object:
        made = {
            parameter: group(**{key: values.pop(key) for key in names if key in values})
            for parameter, (group, names) in groups.items()
        }
        return command(**values, **made)

    # Typer reads the signature and, beside it, the annotations.
    # Mypy knows no such attribute of a function; inspect.signature reads it.
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
