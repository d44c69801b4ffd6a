"""`torusgd train`: from names and paths to a job, and from its end to an exit code."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ..errors import UserError
from ..signals import EXIT_AGAIN, stop_after
from .options import DATA, OUTPUT, RECIPE, RUNTIME, DataPath, Overrides, RecipeName, RuntimeFlags, takes_groups
from .output import console


@takes_groups
def train(
    recipe: RecipeName,
    runtime: RuntimeFlags,
    data: DataPath = None,
    overrides: Overrides = None,
    max_steps: Annotated[
        int | None, Option("--max-steps", min=1, help="Stop after so many steps in all.", rich_help_panel=RECIPE)
    ] = None,
    init: Annotated[
        str | None,
        Option(
            "--init",
            metavar="FILE|timm|hf:REPO",
            help="Weights to start from: a .safetensors or .pth, timm's own, or a repository of the Hugging Face hub. "
            "A head for other classes is made anew.",
            rich_help_panel=DATA,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option("--out", help="The run's folder, or s3://BUCKET/RUN. Default: runs/RECIPE.", rich_help_panel=OUTPUT),
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Delete an earlier run in --out and begin anew.", rich_help_panel=OUTPUT)
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        Option("--checkpoint-every", help="Such as 50st, 1ep, 1e6sa. Default: 1ep.", rich_help_panel=OUTPUT),
    ] = None,
    checkpoint_minutes: Annotated[
        float | None,
        Option(
            "--checkpoint-minutes", help="And after so many minutes at the latest. Default: 10.", rich_help_panel=OUTPUT
        ),
    ] = None,
    drift_every: Annotated[
        int | None,
        Option(
            "--drift-every",
            metavar="STEPS",
            help="Compare the ranks' weights so often; 0: never. Default: as often as costs under 0.1 % of a step.",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        Option(
            "--track",
            metavar="tensorboard|wandb|mlflow",
            help="Also send every step and evaluation there; repeatable.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        Option(
            "--trace",
            metavar="FIRST:LAST",
            help="Write trace.json of these steps: passes, messages and waits of all ranks, in Chrome's format.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    audit: Annotated[
        float | None,
        Option("--audit", metavar="SHARE", help="Compute this share of the work twice.", rich_help_panel=RUNTIME),
    ] = None,
    shares: Annotated[
        str | None,
        Option(
            "--shares",
            metavar="speed|even",
            help="speed: a slow rank computes fewer virtual workers. Default: speed.",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    work_stealing: Annotated[
        bool | None,
        Option(
            "--work-stealing/--no-work-stealing",
            help="Idle ranks take over what late ones have not begun. Default: no.",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    node_memory: Annotated[
        bool | None,
        Option(
            "--node-memory/--no-node-memory",
            help="Under torchrun, keep the newest state in each node's memory, for restarts. Default: yes.",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    mixed: Annotated[
        bool,
        Option(
            "--mixed", help="Ranks may differ in processor or libraries: bits don't repeat.", rich_help_panel=RUNTIME
        ),
    ] = False,
    listen: Annotated[
        str | None,
        Option(
            "--listen",
            metavar="ADDRESS:PORT",
            help="Let other machines join at this address of this machine (torusgd join). Default: nobody can.",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        Option(
            "--token-file",
            help="What machines that join need a copy of; made if it is not there. Default: RUN/.join-token.",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    delays: Annotated[
        str | None,
        Option(
            "--delays",
            metavar="MODEL",
            help="Sleep before each virtual worker: lognormal (its unit is 50 ms), exponential@0.2 (200 ms).",
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        Option("--plan", help="A plan of it (torusgd plan --json) to compare with.", rich_help_panel=OUTPUT),
    ] = None,
    time_limit: Annotated[
        float | None,
        Option(
            "--time-limit",
            metavar="MINUTES",
            min=0.0,
            help="Stop after so long with a checkpoint and exit code 75, as after SIGUSR1.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    requeue: Annotated[
        bool,
        Option("--requeue", help="Then have Slurm queue the job again.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Train a classifier from a recipe; the same command again resumes."""
    from ..ranks.forkserver import start_forkserver

    if "RANK" not in os.environ:  # not a rank of torchrun: `launch` needs it; asked here, before torch is imported
        start_forkserver()
    from ..errors import warn
    from ..hub import pinned
    from ..launch.local import Entrance, launch
    from ..launch.torchrun import join_and_train
    from ..observe.compare_plan import PlanComparison
    from ..observe.trace import TracedSteps
    from ..ranks import slurm
    from ..ranks.handshake import parse_address
    from ..recipe.load import load_recipe
    from ..run.initial_weights import check_initial
    from ..run.job import Job
    from ..rundir.mirror import Mirror
    from ..rundir.run_dir import RunDir
    from ..runtime import expected_ranks, ranks_are_given, resolve_auto, resolve_device

    if time_limit is not None:
        stop_after(60.0 * time_limit)
    if requeue:
        slurm.check_requeue()
    asked, block = load_recipe(recipe, overrides or [])
    options = runtime.over(
        block,
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
        track=track or None,
        drift_every=drift_every,
        audit=audit,
        shares=shares,
        work_stealing=work_stealing,
        node_memory=node_memory,
        mixed=mixed or None,
    )
    device = resolve_device(options)
    if init is not None:
        check_initial(init, asked)
    resolved = resolve_auto(asked, device)
    options = runtime.fitted(options, block, expected_ranks(options, device, resolved))
    begins = fresh and slurm.restarts() == 0  # a job that Slurm has queued again goes on
    folder, is_first = out or Path("runs") / resolved.name, os.environ.get("RANK", "0") == "0"
    mirror = Mirror.at(folder, warn)
    if mirror is not None:
        folder = mirror.folder
    if ranks_are_given():
        check_flags_of_joined(listen, begins, mirror.url if mirror is not None else "")
    entrance = Entrance(parse_address(listen, "--listen"), token_file) if listen is not None else None
    with mirror.held(begins) if mirror is not None and is_first else nullcontext():
        data = pinned(data, "" if begins else RunDir(folder).data_revision())
        planned = PlanComparison.load(plan) if plan else None
        job = Job(
            resolved,
            options,
            device,
            folder,
            data,
            init,
            max_steps,
            planned,
            delays=delays or "",
            trace=TracedSteps.parse(trace) if trace else None,
            bucket=mirror.url if mirror is not None else None,
        )
        result = join_and_train(job, begins) if ranks_are_given() else launch(job, begins, entrance)
        if mirror is not None and is_first:
            mirror.put_result()
    if requeue and result.code == EXIT_AGAIN and is_first:
        slurm.requeue()
    if result.summary:
        show_result(result.summary, mirror.url if mirror is not None else str(folder))
    raise typer.Exit(result.code)


def check_flags_of_joined(listen: str | None, begins: bool, bucket: str) -> None:
    """UserError where ranks that another launcher has started are asked for what they can't do.

    Args:
        listen: The flag.
        begins: A run that is there is deleted.
        bucket: Where the run goes; empty: into a folder.
    """
    if listen is not None:
        raise UserError("--listen: another launcher has started these ranks, and brings others; leave it out")
    if begins and bucket and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            f"--fresh: torchrun may start the ranks again, and each time {bucket} would be deleted; choose another "
            "--out, or delete that run yourself"
        )


def show_result(summary: Mapping[str, Any], folder: str) -> None:
    """The result and where it lies."""
    terminal = console()
    terminal.print(
        f"done: top-1 {summary['top1']:.2%} on {summary['eval_images']} held-out images, {summary['steps']} steps, "
        f"{summary['seconds']:.1f} s, {summary['images_per_second']:,.0f} images/s on {summary['world_size']} ranks"
    )
    if summary.get("predicted"):
        beside = summary["predicted"]
        terminal.print(
            f"a step took {1e3 * beside['measured_step_seconds']:.1f} ms, the plan said "
            f"{1e3 * beside['step_seconds']:.1f} ms ({beside['step_seconds_error']:+.1%})"
        )
    journal = summary.get("journal")
    if journal is not None:
        terminal.print(
            f"left out {summary.get('left_out_share', 0):.2%} of the work for being late; the journal says whose work "
            f"is in each update, in {journal['bytes_per_update']} bytes: torusgd replay {folder} gives the same bits",
            markup=False,
        )
    terminal.print(f"weights_sha256 {summary['weights_sha256']}")
    terminal.print(
        f"in {folder}: model.safetensors, summary.json, events.jsonl, recipe.yaml, checkpoints/"
        f"{', journal.txt' if journal is not None else ''}",
        markup=False,
    )
