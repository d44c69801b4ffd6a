"""`torusgd rehearse` and `torusgd simulate`: a planned step with real messages, and training in virtual time."""

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ..comm.algorithms import parse_algorithm
from ..errors import RunError, UserError
from ..text import byte_size, percent
from .options import DataPath, JsonFile, Overrides, PlannedMachine, RecipeName, RuntimeFlags, flag
from .output import console, table, write_json

if TYPE_CHECKING:
    from ..rehearse.rehearsal import Rehearsal

PLAYED, FORM = "What to play", "What is simulated"


def rehearse(
    recipe: RecipeName,
    machine: PlannedMachine,
    runtime: RuntimeFlags,
    data: DataPath = None,
    overrides: Overrides = None,
    overlap: bool = flag("Send buckets during backward.", PLAYED, name="--overlap/--no-overlap", default=True),
    steps: int = flag("Rehearse this many steps, after one that warms up.", PLAYED, min=1, default=3),
    seconds: float = flag(
        "Let a step take about so long in the lab, at most.", PLAYED, min=0.1, max=86400, default=10.0
    ),
    json_file: JsonFile = None,
) -> None:
    """Play a planned step with real messages: the cluster's network in small, timed waits for compute. Needs root."""
    from ..plan.forecast import with_communication
    from ..plan.program import as_torusgd
    from ..recipe.compatibility import WORKERS, Setup, check
    from ..rehearse.rehearsal import rehearse as play
    from ..rehearse.wire import why_not
    from .planning import Planned

    planned = Planned.read(recipe, overrides or [], data, machine, runtime)
    planned = replace(planned, software=as_torusgd(planned.software), as_published=frozenset())
    options, devices, cluster = planned.runtime, planned.devices, planned.cluster
    # What can be planned and not played: one node or a part of one, fewer virtual workers, other programs' all-reduces.
    if devices <= (each := cluster.devices_per_node) or devices % each:
        raise UserError(
            f"--devices {devices}: a rehearsal plays whole nodes, two at least; {cluster.name} has {each} devices a "
            f"node: give {2 * each}, {3 * each} or so on"
        )
    check(Setup(planned.recipe, ranks=devices), {WORKERS})
    if options.allreduce not in ("auto", "native"):
        parse_algorithm(options.allreduce, devices)
    program = with_communication(planned.program(options), overlap=overlap)
    if reason := why_not():
        raise RunError(f"rehearse: {reason}")
    found = play(
        planned.workload, cluster, program, devices, reduction=planned.recipe.reduction,
        allreduce=options.allreduce, steps=steps, limit=seconds,
    )  # fmt: skip
    groups = program.communication.linear_groups
    shared = "" if groups is None else f", linear layers shared by {devices // groups}"
    speed = "" if program.program is None else f", computing like {program.program}"
    console().print(
        f"{planned.recipe.name} on {devices} x {cluster.device.name} ({cluster.name}), torusgd{speed}, "
        f"{options.update} update{shared}"
    )
    show_rehearsal(found)
    settings = {"recipe": planned.recipe.name, "cluster": cluster.name, "update": options.update}
    write_json(json_file, {**settings, "linear_groups": groups, **found.as_dict()})


def show_rehearsal(found: "Rehearsal") -> None:
    terminal = console()
    terminal.print(
        f"lab: {found.scale}; it carries {8e-6 * found.ceiling.rate:.0f} Mb/s a host, "
        f"{1e3 * found.ceiling.round:.2f} ms a round",
        f"{found.allreduce}; {byte_size(found.bytes)} of messages a rank and step",
        sep="\n",
    )
    planned, rest = found.planned, found.planned.seconds - found.planned.compute - found.predicted
    parts = [
        ("compute (timed waits)", planned.compute, planned.compute),
        ("exposed communication", found.rehearsed, found.predicted),
        ("update, contention, slow devices (planned)", rest, rest),
        ("all", found.seconds, planned.seconds),
    ]
    rows = [
        *([name, f"{1e3 * one:.2f}", f"{1e3 * other:.2f}"] for name, one, other in parts),
        ["speed-up", *(f"{found.alone / seconds:.2f}" for seconds in parts[-1][1:])],
        ["images/s", *(f"{found.batch / seconds:,.0f}" for seconds in parts[-1][1:])],
    ]
    terminal.print(table(("a step, ms", "rehearsed", "planned"), rows, left=[0], bold=[3]))
    spread = f"{1e3 * min(found.waits):.2f} to {1e3 * max(found.waits):.2f} ms in {len(found.waits)} steps"
    terminal.print(f"exposed communication: {spread}")
    off = f"the plan is {found.error_of_step:+.1%} of the step off"
    if found.rehearsed > 0:
        off += f", {found.error:+.1%} of what was rehearsed"
        if found.scale.excess:
            late = f"{1e3 * found.predicted_late:.2f} ms ({found.error_late:+.1%})"
            off += f"; with rounds as late as the lab's it says {late}"
    terminal.print(off)


def simulate(
    recipe: RecipeName,
    form: str = flag(
        "Simulate bsp, ssp:STALE, asp, pbsp:SAMPLE, pssp:SAMPLExSTALE, backup:B, cutoff:COUNT, cutoff:predicted, "
        "cutoff:learned, threshold:PARTSxSECONDS, local:H, diloco:H, gossip:PROBABILITY or elastic:STEPS. "
        "Default: the recipe's.",
        FORM,
        "FORM",
        name="--synchrony",
        default="",
    ),
    workers: int | None = flag("Simulate this many virtual workers. Default: the recipe's.", FORM, "P"),
    delays: str | None = flag(
        "Delay each gradient by this model, such as lognormal or exponential@0.5. Default: the recipe's, or "
        "exponential.",
        FORM,
        "MODEL",
    ),
    compute: float = flag("Take so many virtual seconds a gradient, plus delay.", FORM, default=1.0),
    lr: float | None = flag("Step at this rate. Default: the recipe's rate.lr.", FORM),
    momentum: float = flag("Momentum of the server, under barriers.", FORM, default=0.0),
    seconds: float | None = flag("End after so many virtual seconds.", FORM),
    images: int | None = flag("End after so many images.", FORM),
    data: DataPath = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Train a recipe's model in virtual time: real gradients, keyed delays, the same bits each time.

    The optimiser is SGD at one rate, whatever the recipe's is. It ends after --seconds, --images, or the images
    of the recipe's stages.
    """
    import torch

    from ..recipe.load import load_recipe
    from ..runtime import prepare_process
    from ..simulate import Setting
    from ..simulate import simulate as run

    loaded = load_recipe(recipe, overrides or []).recipe
    prepare_process(loaded, torch.device("cpu"))
    workers = loaded.virtual_workers if workers is None else workers
    delays = delays or loaded.synchrony.delays or "exponential"
    setting = Setting(loaded, form, workers, delays, loaded.rate.lr if lr is None else lr, compute, momentum)
    found = run(
        setting, data, seconds=math.inf if seconds is None else seconds, images=math.inf if images is None else images
    )
    terminal = console()
    what = form or f"synchrony.form = {loaded.synchrony.form}"
    terminal.print(
        f"{loaded.name}, {what}, {workers} workers, delays {delays}, SGD of rate {setting.lr:g}"
        + (f" and momentum {momentum:g}" if momentum else "")
    )
    rows = [(f"{point.time:,.2f}", f"{point.images:,}", percent(point.error)) for point in found.points]
    terminal.print(table(("virtual seconds", "images", "error"), rows))
    terminal.print(f"weights_sha256 {found.weights_sha256}")
    write_json(json_file, asdict(found))
