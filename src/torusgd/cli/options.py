"""The options that several commands share, each written once: its name, its help and its panel.

A group of options that belong together is a dataclass. A command that is decorated with `takes_groups` has one as a
parameter, and its options on the command line:

    @takes_groups
    def plan(recipe: RecipeName, runtime: RuntimeFlags) -> None: ...
"""

import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Argument, Option

from ..comm.algorithms import OTHER_PROGRAMS, SCHEDULED
from ..comm.rounds import METHODS

if TYPE_CHECKING:  # at run time only once a command runs: `torusgd --help` takes no seconds
    from ..recipe.runtime_options import RuntimeOptions

DATA, RECIPE, RUNTIME, NETWORK, OUTPUT = "Data", "Recipe", "Runtime", "Network", "Output"
"""panels of --help, beside those of single commands"""
R = TypeVar("R")
_log = logging.getLogger(__name__)

RecipeName = Annotated[str, Argument(metavar="RECIPE", help="A built-in recipe's name, or a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Change a key of the recipe; repeatable. Another model.name leaves out the model.options before it.",
        rich_help_panel=RECIPE,
    ),
]
DataPath = Annotated[
    Path | None, Option("--data", help="Folder or file of the data set.", show_default=False, rich_help_panel=DATA)
]
JsonFile = Annotated[Path | None, Option("--json", help="Also write all of it here.", rich_help_panel=OUTPUT)]
Device = Annotated[
    str | None,
    Option(
        "--device",
        help="cpu or cuda. Default: cuda where there is a GPU; plan and rehearse take their cluster's device.",
        rich_help_panel=RUNTIME,
    ),
]


def _workers(text: str) -> Any:
    """N, or MIN:MAX as a list of two; what is neither is refused where a recipe's block would be.

    >>> _workers("8"), _workers("2:8")
    (8, [2, 8])
    """
    numbers = [int(part) if part.isascii() and part.isdigit() else part for part in text.split(":")]
    return numbers[0] if len(numbers) == 1 else numbers


Workers = Annotated[
    int | None,
    Option(
        "--workers",
        "--devices",
        metavar="N",
        help="Ranks. Default: as many as this machine's GPUs, else cores; plan and rehearse need it.",
        rich_help_panel=RUNTIME,
    ),
]
WorkersOrRange = Annotated[
    Any,
    Option(
        "--workers",
        "--devices",
        metavar="N|MIN:MAX",
        parser=_workers,
        show_default=False,
        help="Ranks. Default: as many as this machine's GPUs, else cores; plan and rehearse need it. MIN:MAX, of train "
        "alone: as many as cores, others may join, and with less than MIN the run waits.",
        rich_help_panel=RUNTIME,
    ),
]
Grid = Annotated[
    str | None,
    Option(
        "--grid",
        metavar="YxX",
        help="Ranks vertically by horizontally, for torus and hierarchical. Default: hosts by ranks a host.",
        rich_help_panel=NETWORK,
    ),
]
Profile = Annotated[Path | None, Option("--profile", help="A file of torusgd tune, for auto.", rich_help_panel=NETWORK)]
Streams = Annotated[
    int | None,
    Option(
        "--streams",
        metavar="N",
        min=1,
        max=64,
        help="TCP connections between each two ranks, for links that one doesn't fill. Default: 1.",
        rich_help_panel=NETWORK,
    ),
]


@dataclass(frozen=True)
class RuntimeFlags:
    """The flags that override a recipe's `runtime:` block, of train, plan and rehearse alike."""

    workers: WorkersOrRange = None
    device: Device = None
    update: Annotated[
        str | None,
        Option(
            "--update",
            metavar="replicated|sharded",
            help="sharded: each rank updates a shard of the weights. Default: replicated.",
            rich_help_panel=RUNTIME,
        ),
    ] = None
    model_parallel: Annotated[
        str | None,
        Option(
            "--model-parallel",
            metavar="M|auto",
            help="Ranks that share the last, linear layers. Default: 1.",
            rich_help_panel=RUNTIME,
        ),
    ] = None
    weights_first: Annotated[
        bool | None,
        Option(
            "--weights-first/--no-weights-first",
            help="A layer's weight gradient before its input gradient, to leave meanwhile; CPUs only. Default: no.",
            rich_help_panel=NETWORK,
        ),
    ] = None
    allreduce: Annotated[
        str | None,
        Option(
            "--allreduce",
            help=f"native (the backend's own, the default), auto (measures and picks), {', '.join(SCHEDULED)}; with "
            f"the methods of both axes as in torus:halving/ring, of {', '.join(METHODS)}. "
            f"plan also prices those of other programs: {', '.join(OTHER_PROGRAMS)}.",
            rich_help_panel=NETWORK,
        ),
    ] = None
    grid: Grid = None
    profile: Profile = None
    streams: Streams = None
    buckets: Annotated[
        str | None,
        Option(
            "--buckets",
            metavar="auto|cubic|MIB|[N,...]",
            help="Gradients that travel together: up to so many MiB, so many tensors each, or 3, 21, 57, ... tensors. "
            "Default: auto, by the first steps' times with --allreduce auto, else 4 MiB.",
            rich_help_panel=NETWORK,
        ),
    ] = None

    def over(self, block: "RuntimeOptions", **more: Any) -> "RuntimeOptions":
        """The options of a `runtime:` block with these flags, and `more` of one command, in place of its own.

        Raises:
            UserError: A value is not allowed.
        """
        from ..recipe.load import parse_yaml, validate
        from ..recipe.runtime_options import RuntimeOptions

        given = {key: value for key, value in {**asdict(self), **more}.items() if value is not None}
        if isinstance(given.get("workers"), list):
            given["workers_range"] = given.pop("workers")
            block = block.without(["workers"])
        elif "workers" in given:
            block = block.without(["workers_range"])
        if "allreduce" in given:  # a grid belongs to the all-reduce that it was written beside
            block = block.without(["grid"])
        for key in ("model_parallel", "buckets"):  # a word, a number or a list, as in a recipe file
            if key in given:
                given[key] = parse_yaml(given[key], f"--{key.replace('_', '-')} {given[key]}")
        if "profile" in given:
            given["profile"] = str(given["profile"])
        return validate(RuntimeOptions, {**block.model_dump(mode="json", exclude_unset=True), **given}, "flags")

    def names(self) -> set[str]:
        """Of the options that were given as flags."""
        return {key for key, value in asdict(self).items() if value is not None}

    def fitted(self, options: "RuntimeOptions", block: "RuntimeOptions", ranks: int) -> "RuntimeOptions":
        """The options without those of the recipe's block that are for another number of ranks; one line names them.

        A record's block holds the grid of its machine, and the recipe trains on a laptop too. A flag does not give way,
        nor does a block that itself names this number of ranks: these are mistakes, which the run refuses.
        """
        left_out = [] if block.workers == ranks else [n for n in options.unfit(ranks) if n not in self.names()]
        if left_out and os.environ.get("RANK", "0") == "0":
            told = ", ".join(f"{name} = {getattr(options, name)}" for name in left_out)
            _log.warning("the recipe's runtime block is for another number of ranks than %d: left out %s", ranks, told)
        return options.without(left_out)


@dataclass(frozen=True)
class PlannedMachine:
    """The machine and the program that plan and rehearse take in place of this one."""

    cluster: Annotated[
        str | None, Option("--cluster", help="A cluster's name, a YAML file, or local.", rich_help_panel="Cluster")
    ] = None
    software: Annotated[
        str | None,
        Option(
            "--software",
            help="Software profile; a rehearsal takes its speed of compute. Default: the record's, else torusgd.",
            rich_help_panel="Cluster",
        ),
    ] = None
    measured: Annotated[
        Path | None,
        Option(
            "--measured",
            help="A finished run with one worker on such a device, for its compute; --cluster local needs it.",
            rich_help_panel="Cluster",
        ),
    ] = None


@dataclass(frozen=True)
class TrainedWeights:
    """The weights that eval and polish open, and the data that they read."""

    checkpoint: Annotated[
        Path,
        Argument(metavar="CHECKPOINT", help="A run's folder, a checkpoint's or a weight file; or its URL."),
    ]
    data: DataPath = None
    classes: Annotated[
        str | None,
        Option(
            "--classes",
            help="File in the data folder: the class folders in the weights' order.",
            rich_help_panel=DATA,
        ),
    ] = None
    model: Annotated[
        str | None, Option("--model", help="The network, for weights trained elsewhere.", rich_help_panel=RECIPE)
    ] = None
    overrides: Overrides = None
    device: Device = None


def takes_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Replaces each parameter that is a dataclass by that class's fields, in the signature that Typer reads.

    The function that comes back takes the fields by keyword, and hands `command` its groups.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        found = [parameter]
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[parameter.name] = group
            found = list(inspect.signature(group).parameters.values())
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in found]

    @wraps(command)
    def flat(**values: Any) -> R:
        made = {name: group(**_taken(group, values)) for name, group in groups.items()}
        return command(**values, **made)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _taken(group: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a group's fields, taken out of `values`."""
    return {field.name: values.pop(field.name) for field in fields(group) if field.name in values}
