"""`torusgd status`, `torusgd stop` and `torusgd scale`: look at a run and ask it for something, through its folder."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ..errors import RunError, UserError
from .output import console

RunFolder = Annotated[Path, Argument(metavar="RUN", help="The run's folder or URL, that of --out.")]
_MOST_SHOWN = 16
"""ranks whose shares stand in a line"""


def status(
    run: RunFolder,
    as_json: Annotated[bool, Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Show how a run is: its step, rate, ranks and their shares, slow ranks, time left."""
    from ..rundir.run_view import RunView
    from ..rundir.status import gone

    view = RunView(run)
    found = view.read()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    elif found.state == "gone":
        raise RunError(f"{view.name}: {gone(found)}")
    elif found.state == "stopped":
        typer.echo(f"{view.name}: {gone(found)}")
    else:
        terminal = console()
        try:
            lines = _lines(found.state, found.told, found.age)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{view.name}: its status can't be read: {type(error).__name__} {error}") from None
        for line in lines:
            terminal.print(line, markup=False)


def stop(
    run: RunFolder,
    seconds: Annotated[float, Option("--seconds", min=0, help="Wait for its end so long; 0: don't wait.")] = 120.0,
) -> None:
    """Ask a run for a checkpoint and its end; the same `torusgd train` goes on with it."""
    from ..rundir.run_view import RunView
    from ..rundir.status import STOP, gone

    view = RunView(run)
    view.running("stop")
    view.ask(STOP, "")
    end = time.monotonic() + seconds
    while (found := view.read()).state == "running" and time.monotonic() < end:
        time.sleep(view.poll)
    if found.state == "finished":
        typer.echo(f"{view.name}: the run has finished meanwhile")
    elif found.state != "running":
        typer.echo(f"{view.name}: {gone(found)}")
    elif seconds:
        raise RunError(f"{view.name}: was asked to stop, and has not within {seconds:g} s; it ends after its step")


def scale(
    run: RunFolder,
    workers: Annotated[int, Option("--workers", min=1, metavar="N", help="Ranks to go on with.")],
) -> None:
    """Ask a run on one machine to go on with another number of ranks, to the same weights."""
    from ..rundir.run_view import RunView
    from ..rundir.status import WORKERS

    view = RunView(run)
    found = view.running("scale")
    most = found.told.get("virtual_workers", workers)
    if workers > most:
        raise UserError(f"--workers {workers}: the recipe has {most} virtual workers to share; ask for at most {most}")
    fewest, greatest = (found.told.get("runtime") or {}).get("workers_range") or (1, most)
    if not fewest <= workers <= greatest:
        raise UserError(f"--workers {workers}: the run takes {fewest} to {greatest} ranks, as its --workers said")
    if why := found.told.get("fixed_ranks"):
        raise UserError(
            f"{view.name}: its ranks can't change: {why}; stop it, and give the same command with other --workers"
        )
    view.ask(WORKERS, str(workers))
    typer.echo(f"{view.name}: asked to go on with {workers} ranks; torusgd status {view.name} shows when it does")


def _lines(state: str, told: dict[str, Any], age: float) -> list[str]:
    if state == "finished":
        return [f"finished: {told['steps']} steps, top-1 {told['top1']:.2%}, weights_sha256 {told['weights_sha256']}"]
    if "images_per_second" not in told:
        return [f"{told.get('recipe', 'a run')}: {told.get('phase', 'starting')}"]
    shares, slow = told["shares"], told.get("slow_ranks", {})
    few = len(shares) <= _MOST_SHOWN
    counts = "/".join(map(str, shares.values())) if few else f"{min(shares.values())} to {max(shares.values())}"
    lines = [
        f"{told['recipe']}: {told['phase']}, step {told['step']} of {told['steps']}, epoch {told['epoch']:.2f}, "
        f"loss {told['loss']:.4f}",
        f"{told['images_per_second']:,.0f} images/s, {told['seconds_left']} s left, told {age:.0f} s ago by "
        f"process {told['process']} on {told['host']}",
        f"{len(shares)} ranks, virtual workers {counts} of {told['virtual_workers']}",
    ]
    return lines + [f"rank {rank} is slow: {times:g} times the median" for rank, times in slow.items()]
