"""`torusgd report`: runs as a page of HTML, side by side if there are several."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from .options import OUTPUT, DataPath, RuntimeFlags, TrainedWeights, option
from .output import check_writable, console, write_file

if TYPE_CHECKING:
    from ..recipe.runtime_options import RuntimeOptions
    from ..report.mistakes import Mistakes


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders or URLs of runs, finished or not.")],
    runtime: RuntimeFlags,
    out: Annotated[Path, option("--out", "Write the page to this file.", OUTPUT)] = Path("report.html"),
    mistakes: Annotated[
        bool, option("--mistakes", "Also classify the held-out images: the worst classes, the most wrong images.")
    ] = False,
    data: DataPath = None,
) -> None:
    """Write a page about runs: what was trained, how well, where the time went; --data implies --mistakes."""
    from ..report.page import check_jinja, run_page
    from ..report.read_run import read_run
    from ..rundir.run_view import local_run

    check_jinja()
    check_writable("--out", out)
    folders = [local_run(run) for run in runs]
    records = [read_run(folder) for folder in folders]
    wanted = mistakes or data is not None
    found = [_mistakes(run, data, runtime.over()) if wanted else None for run in folders]
    write_file("--out", out, run_page(records, found))
    console().print(f"wrote {out}", markup=False)


def _mistakes(run: Path, data: Path | None, options: "RuntimeOptions") -> "Mistakes":
    from ..data.pipeline import Pipeline
    from ..report.mistakes import find_mistakes
    from .assessment import Assessment

    opened = Assessment(TrainedWeights(run, data), options)
    pipeline = Pipeline(opened.trained.held_out, opened.recipe.held_out_data, opened.recipe.seed)
    return find_mistakes(opened.model, pipeline, opened.recipe, opened.trained.train.classes, opened.precision)
