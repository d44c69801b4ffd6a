"""`torusgd status`, `torusgd stop` and `torusgd resize`: look at a run, or change it, through its folder."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from ..errors import RunError, UserError, as_user_error, printable
from ..rundir.run_view import STATUS, STOP, WORKERS, RunView, gone
from ..text import is_number, json_text, percent, plural
from .options import flag, option
from .output import console

RunFolder = Annotated[Path, Argument(metavar="RUN", help="The run's folder or URL, that of --out.")]
_MOST_SHOWN = 16  # ranks whose virtual workers stand in a line
# What a status that lacks values, or has others than a run writes, ends in.
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def status(run: RunFolder, as_json: bool = flag("Print all of it as JSON.", name="--json", default=False)) -> None:
    """Show a run's step, speed, ranks and their virtual workers, slow ranks and time left."""
    view = RunView(run)
    found = view.read()
    if as_json:
        typer.echo(json_text(found.as_dict(), indent=1))
    elif found.state == "gone":
        raise RunError(f"{view.name}: {gone(found)}")
    elif found.state == "stopped":
        typer.echo(f"{view.name}: {gone(found)}")
    else:
        try:
            lines = _lines(found.state, found.reported, found.age)
        except _DAMAGED as error:
            file, why = "summary.json" if found.state == "finished" else STATUS, f"{type(error).__name__} {error}"
            raise UserError(f"{view.name}: its status can't be read: {file} lacks what a run writes: {why}") from None
        console().print("\n".join(map(printable, lines)))


def stop(
    run: RunFolder, seconds: float = flag("Wait so long for its end; 0: don't wait.", min=0, default=120.0)
) -> None:
    """Have a run write a checkpoint and end; the same `torusgd train` goes on with it."""
    view = RunView(run)
    view.running("stop")
    view.request(STOP, "")
    # The run looks for requests at the end of a step, which may take minutes on a slow machine.
    end = time.monotonic() + seconds
    while (found := view.read()).state == "running" and time.monotonic() < end:
        time.sleep(view.poll)
    if found.state == "finished":
        typer.echo(f"{view.name}: the run has finished meanwhile")
    elif found.state != "running":
        typer.echo(f"{view.name}: {gone(found)}")
    elif seconds:
        raise RunError(f"{view.name}: has not stopped within {seconds:g} s; it ends after its step")


def resize(
    run: RunFolder, workers: Annotated[int, option("--workers", "Go on with this many ranks.", min=1, metavar="N")]
) -> None:
    """Have a run on one machine go on with another number of ranks, to the same weights."""
    view = RunView(run)
    found = view.running("resize")
    # What a run would refuse at its next step is refused here, where its user looks.
    with as_user_error(f"{view.name}: its status can't be read", of=_DAMAGED):
        most = int(found.reported.get("virtual_workers", workers))
        fewest, greatest = map(int, (found.reported.get("runtime") or {}).get("workers_range") or (1, most))
    if workers > most:
        raise UserError(f"--workers {workers}: the recipe has {most} virtual workers to share; give at most {most}")
    if not fewest <= workers <= greatest:
        raise UserError(f"--workers {workers}: the run takes {fewest} to {greatest} ranks, as its --workers said")
    if why := found.reported.get("fixed_ranks"):
        raise UserError(
            f"{view.name}: its ranks can't change: {why}; stop it, and give the same command with other --workers"
        )
    view.request(WORKERS, str(workers))
    typer.echo(f"{view.name}: will go on with {plural(workers, 'rank')}; torusgd status {view.name} shows when it does")


def _lines(state: str, run: dict[str, Any], age: float) -> list[str]:
    if state == "finished":
        return [f"finished: {run['steps']} steps, top-1 {percent(run['top1'])}, weights_sha256 {run['weights_sha256']}"]
    if "images_per_second" not in run:
        return [f"{run.get('recipe', 'a run')}: {run.get('phase', 'starting')}"]
    shares, slow = run["shares"], run.get("slow_ranks", {})
    few = len(shares) <= _MOST_SHOWN
    counts = "/".join(map(str, shares.values())) if few else f"{min(shares.values())} to {max(shares.values())}"
    loss = f"{run['loss']:.4f}" if is_number(run["loss"]) else "not finite"  # null, after a step that was skipped
    lines = [
        f"{run['recipe']}: {run['phase']}, step {run['step']} of {run['steps']}, epoch {run['epoch']:.2f}, loss {loss}",
        f"{run['images_per_second']:,.0f} images/s, {run['seconds_left']} s left, reported {age:.0f} s ago by "
        f"process {run['process']} on {run['host']}",
        f"{plural(len(shares), 'rank')}, virtual workers {counts} of {run['virtual_workers']}",
    ]
    return lines + [f"rank {rank} is slow: {times:g} times the median" for rank, times in slow.items()]
