"""`torusgd train`, `replay` and `join`: from names and paths to a job, and from its end to an exit code."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from ..errors import RunError, UserError, warn
from ..hub import pinned
from ..ranks import slurm
from ..ranks.forkserver import start_forkserver
from ..rundir.run_view import local_run
from ..signals import EXIT_AGAIN, stop_after
from ..storage import place, url_of
from ..text import listed, milliseconds, percent, plural
from .options import OUTPUT, RECIPE, RUNTIME, DataPath, InitialWeights, Overrides, RecipeName, RuntimeFlags, flag
from .output import check_out, console

if TYPE_CHECKING:
    from ..launch.local import Entrance
    from ..run.job import Job
    from ..run.saving import RunResult
    from ..rundir.mirror import Mirror


def train(
    recipe: RecipeName,
    runtime: RuntimeFlags,
    data: DataPath = None,
    overrides: Overrides = None,
    max_steps: int | None = flag("Stop after so many steps in all.", RECIPE, min=1),
    init: InitialWeights = None,
    out: Path | None = flag("Write the run to this folder, or s3://BUCKET/RUN. Default: runs/RECIPE.", OUTPUT),
    fresh: bool = flag("Delete an earlier run in --out and begin anew.", OUTPUT, default=False),
    trace: str | None = flag("Write trace.json of these steps of all ranks, in Chrome's format.", OUTPUT, "FIRST:LAST"),
    listen: str | None = flag("Let machines join at this address of this one (torusgd join).", RUNTIME, "ADDRESS:PORT"),
    token_file: Path | None = flag(
        "Let in machines with this file, made if missing. Default: RUN/.join-token.", RUNTIME
    ),
    delays: str | None = flag(
        "Sleep before each virtual worker: lognormal (its unit is 50 ms), exponential@0.2 (200 ms).", RUNTIME, "MODEL"
    ),
    plan: Path | None = flag("Compare the steps with this plan of the run (torusgd plan --json).", OUTPUT),
    time_limit: float | None = flag(
        "Write a checkpoint and exit with code 75 then.", OUTPUT, "MINUTES", min=0.0, max=1e6
    ),
    requeue: bool = flag("Then have Slurm queue the job again.", OUTPUT, default=False),
) -> None:
    """Train a classifier from a recipe; the same command again resumes."""
    if "RANK" not in os.environ:  # `launch` needs it, and it must start before torch is imported
        start_forkserver()
    from ..launch.local import Entrance
    from ..observe.events import PlanComparison
    from ..observe.trace import TracedSteps
    from ..ranks.join import parse_address
    from ..recipe.load import load_recipe
    from ..run.job import Job, with_graphs
    from ..run.trained_weights import check_initial
    from ..rundir.mirror import Mirror
    from ..runtime import expected_ranks, resolve_auto, resolve_device

    if time_limit is not None:
        stop_after(60.0 * time_limit)
    if requeue:
        slurm.check_requeue()
    written, block = load_recipe(recipe, overrides or [])
    options = runtime.over(block)
    device = resolve_device(options)
    if init is not None:
        check_initial(init, written)  # before ranks are started, which would each report it
    resolved = resolve_auto(written, device)
    ranks = expected_ranks(options, device, resolved)
    options = runtime.fitted(options, block, ranks)
    begins = fresh and slurm.restarts() == 0  # a job that Slurm has queued again goes on
    folder = out or Path("runs") / resolved.name
    mirror = Mirror.at(folder, warn)
    place, bucket = (folder, None) if mirror is None else (mirror.folder, mirror.url)
    planned, traced = PlanComparison.load(plan) if plan else None, TracedSteps.parse(trace) if trace else None
    job = Job(
        resolved, options, device, place, data, init, max_steps, planned, delays=delays or "", trace=traced,
        bucket=bucket,
    )  # fmt: skip
    job = with_graphs(job, ranks, listens=listen is not None)
    entrance = Entrance(parse_address(listen, "--listen"), token_file) if listen is not None else None
    result = _run(job, begins, entrance, mirror)
    if requeue and result.code == EXIT_AGAIN and is_first():
        slurm.requeue()
    if result.summary:
        show_result(result.summary, job.bucket or str(job.out))
    raise typer.Exit(result.code)


def is_first() -> bool:
    """True in rank 0, or if this process starts the ranks."""
    return os.environ.get("RANK", "0") == "0"


def _run(job: "Job", begins: bool, entrance: "Entrance | None", mirror: "Mirror | None") -> "RunResult":
    """Runs a job in its folder, to which a run in a bucket is copied first, and from which its result is copied."""
    from ..launch.local import launch
    from ..launch.torchrun import join_and_train
    from ..recipe.compatibility import DELETES, LISTENS, check
    from ..run.job import setup_of
    from ..rundir.run_dir import RunDir
    from ..runtime import launcher_name

    launcher, is_mirrored = launcher_name(), mirror is not None and is_first()
    if launcher:
        deletes = job.bucket if begins and job.bucket else ""
        check(setup_of(job, listens=entrance is not None, launcher=launcher, deletes=deletes), {LISTENS, DELETES})
    # A run in a bucket is copied to this machine first; its lease keeps a second run from the same folder.
    with mirror.held(begins) if mirror is not None and is_mirrored else nullcontext():
        # A data set of a hub stays at the revision with which the run began.
        job = replace(job, data=pinned(job.data, "" if begins else RunDir(job.out).data_revision()))
        result = join_and_train(job, begins) if launcher else launch(job, begins, entrance)
        if result.summary and is_first() and not RunDir(job.out).summary.exists():
            raise RunError(f"--out {job.out}: was deleted or moved after the result was written to it")
        if mirror is not None and is_mirrored:
            mirror.put_result()
    return result


def show_result(summary: Mapping[str, Any], folder: str) -> None:
    terminal = console()
    ranks, images = plural(summary["world_size"], "rank"), summary["eval_images"]
    terminal.print(
        f"done: top-1 {percent(summary['top1'])} on {images} held-out images, {summary['steps']} steps, "
        f"{summary['seconds']:.1f} s, {summary['images_per_second']:,.0f} images/s on {ranks}"
    )
    if beside := summary.get("predicted"):
        measured, planned = milliseconds(beside["measured_step_seconds"]), milliseconds(beside["step_seconds"])
        terminal.print(f"a step took {measured}, the plan said {planned} ({beside['step_seconds_error']:+.1%})")
    journal = summary.get("journal")
    if journal is not None:
        terminal.print(
            f"left out {percent(summary.get('left_out_share', 0))} of the work for being late; the journal says whose "
            f"work is in each update, in {journal['bytes_per_update']} bytes: torusgd replay {folder} gives the same "
            "bits"
        )
    terminal.print(f"weights_sha256 {summary['weights_sha256']}")
    files = ["model.safetensors", "summary.json", "events.jsonl", "recipe.yaml", "checkpoints/"]
    files += ["journal.txt"] if journal is not None else []
    there = (each for each in files if url_of(Path(folder)) or Path(folder, each).exists())
    terminal.print(f"in {folder}: {', '.join(there)}")


def replay(
    run: Annotated[Path, Argument(metavar="RUN", help="A run's folder or URL.")],
    runtime: RuntimeFlags,
    data: DataPath = None,
    init: InitialWeights = None,
    out: Path | None = flag("Write the replay to this folder. Default: RUN-replay.", OUTPUT),
    fresh: bool = flag("Delete an earlier replay in --out and begin anew.", OUTPUT, default=False),
) -> None:
    """Train a run again from its recipe and journal, and compare the weights."""
    if "RANK" not in os.environ:
        start_forkserver()
    from ..launch.local import launch
    from ..launch.torchrun import join_and_train
    from ..recipe.load import read_run_recipe
    from ..run.job import Job
    from ..rundir.run_dir import RunDir
    from ..runtime import ranks_are_given, resolve_device
    from ..step.journal import read_journal

    check_out(out, run)
    name, run = place(run), local_run(run)
    original = RunDir(run)
    if not original.recipe.is_file():
        raise UserError(f"{name}: holds no run; give the folder that torusgd train wrote")
    recipe, status = read_run_recipe(original.recipe), original.known_summary()
    named = run.resolve() if run.name in ("", "..") else run
    folder = out or named.with_name(f"{named.name}-replay")
    if folder.resolve() == run.resolve():
        raise UserError(f"--out {folder}: is the run itself; choose another folder")
    options, journaled, steps = runtime.over(), None, status.get("steps")
    if recipe.synchrony.keeps_journal:
        # A run that has not finished is replayed as far as its journal goes.
        reached = original.journal_reached() if not status else None
        expected = recipe.sha256(), recipe.virtual_workers, status.get("journal")
        journaled = read_journal(original.journal, *expected, reached)
        steps = len(journaled.left_out)
    if steps == 0:
        raise UserError(f"{original.journal}: holds no update yet; there is nothing to replay")
    data = pinned(data, original.data_revision())
    job = Job(recipe, options, resolve_device(options), folder, data, init, steps, replay=journaled)
    result = (join_and_train if ranks_are_given() else launch)(job, fresh)
    if result.summary:
        show_result(result.summary, str(folder))
        updates, seconds = result.summary["steps"], result.summary["seconds"]
        console().print(f"replayed {updates} updates in {seconds:.1f} s, {updates / max(seconds, 1e-9):.1f} a second")
        compare(name, status, result.summary)
    raise typer.Exit(result.code)


def compare(run: str, original: dict[str, Any], replayed: dict[str, Any]) -> None:
    """Prints that a replay has the weights of the run; RunError with what differs between the two if it has not."""
    if "weights_sha256" not in original:
        console().print(f"{run}: not finished, so there are no weights to compare with")
    elif original["weights_sha256"] == replayed["weights_sha256"]:
        console().print(f"{run}: the same weights, bit for bit")
    else:
        differing = [key for key in ("data_sha256", "init_sha256", "conditions") if original.get(key) != replayed[key]]
        reason = f"the two differ in {listed(differing)}" if differing else "the same data under the same conditions"
        raise RunError(f"{run}: its weights are {original['weights_sha256']}, not those of the replay; {reason}")


def join(
    address: Annotated[str, Argument(metavar="HOST:PORT", help="Where the run listens: its --listen.")],
    token_file: Path = flag("Show this copy of the run's token, for your eyes only (chmod 600).", default=MISSING),
    data: DataPath = None,
    workers: int | None = flag("Bring this many ranks. Default: as many as cores.", RUNTIME, metavar="N", min=1),
) -> None:
    """Bring ranks of this machine to a run that torusgd train --listen has started.

    Recipe and options come from the run, weights from its ranks; the data set must be here. The run goes on when this
    command ends, and this command ends with the run. The token is the file .join-token in the run's folder.
    """
    start_forkserver()  # before torch is imported here
    from ..launch.node_agent import join_run
    from ..ranks.join import parse_address, read_token

    where, token = parse_address(address, "torusgd join"), read_token(token_file)
    raise typer.Exit(join_run(where, token, data, workers))
