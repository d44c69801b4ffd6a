"""`torusgd replay`: trains a run again from its recipe and its journal, on any number of ranks, to the same bits."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from ..errors import RunError, UserError
from ..text import listed
from .options import OUTPUT, DataPath, InitialWeights, RuntimeFlags, option
from .output import check_out, console
from .train import show_result


def replay(
    run: Annotated[Path, Argument(metavar="RUN", help="A run's folder or URL.")],
    runtime: RuntimeFlags,
    data: DataPath = None,
    init: InitialWeights = None,
    out: Annotated[
        Path | None, option("--out", "Write the replay to this folder. Default: RUN-replay.", OUTPUT)
    ] = None,
    fresh: Annotated[bool, option("--fresh", "Delete an earlier replay in --out and begin anew.", OUTPUT)] = False,
) -> None:
    """Train a run again from its recipe and journal, and compare the weights."""
    from ..ranks.forkserver import start_forkserver

    if "RANK" not in os.environ:
        start_forkserver()
    from ..hub import pinned
    from ..launch.local import launch
    from ..launch.torchrun import join_and_train
    from ..recipe.load import read_run_recipe
    from ..run.job import Job
    from ..rundir.run_dir import RunDir
    from ..rundir.run_view import local_run
    from ..runtime import ranks_are_given, resolve_device
    from ..step.journal import read_journal

    check_out(out, run)
    run = local_run(run)
    original = RunDir(run)
    if not original.recipe.is_file():
        raise UserError(f"{run}: holds no run; give the folder that torusgd train wrote")
    recipe, status = read_run_recipe(original.recipe), original.read_summary() or {}
    folder = out or run.with_name(f"{run.name}-replay")
    if folder.resolve() == run.resolve():
        raise UserError(f"--out {folder}: is the run itself; choose another folder")
    options = runtime.over()
    journaled, steps = None, status.get("steps")
    if recipe.synchrony.keeps_journal:
        journaled = read_journal(
            original.journal,
            recipe.sha256(),
            recipe.virtual_workers,
            status.get("journal"),
            original.journal_reached() if not status else None,
        )
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
        compare(run, status, result.summary)
    raise typer.Exit(result.code)


def compare(run: Path, original: dict[str, Any], replayed: dict[str, Any]) -> None:
    """Prints that a replay has the weights of the run; RunError with what differs between the two if it has not."""
    if "weights_sha256" not in original:
        console().print(f"{run}: not finished, so there are no weights to compare with", markup=False)
    elif original["weights_sha256"] == replayed["weights_sha256"]:
        console().print(f"{run}: the same weights, bit for bit", markup=False)
    else:
        differing = [key for key in ("data_sha256", "init_sha256", "conditions") if original.get(key) != replayed[key]]
        reason = f"the two differ in {listed(differing)}" if differing else "the same data under the same conditions"
        raise RunError(f"{run}: its weights are {original['weights_sha256']}, not those of the replay; {reason}")
