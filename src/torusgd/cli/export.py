"""`torusgd export` and `torusgd report`: a run for other programs, and runs as a page of HTML."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from ..errors import UserError, as_user_error
from ..rundir.run_view import read_here
from ..text import listed
from .options import OUTPUT, DataPath, Overrides, RuntimeFlags, TrainedWeights, flag
from .output import check_out, check_writable, console, write_file

if TYPE_CHECKING:
    from ..recipe.runtime_options import RuntimeOptions
    from ..report.mistakes import Mistakes

FORMATS = {"onnx": "model.onnx", "torch": "model.pt2", "hub": "hub", "mlperf": "mlperf.log"}
_WORDS = "|".join(FORMATS)


def export(
    run: Annotated[
        Path, Argument(metavar="RUN", help="A run's folder or URL; for onnx and torch a checkpoint or weight file too.")
    ],
    formats: list[str] | None = flag("Write this; repeatable. Default: onnx.", metavar=_WORDS, name="--format"),
    out: Path | None = flag("Write to this folder. Default: RUN/export.", OUTPUT),
    license_name: str | None = flag(
        "Name this licence of the weights, in the hub's words, such as apache-2.0.", name="--license"
    ),
    division: str = flag("Write the MLPerf log for this division.", metavar="open|closed", default="open"),
    overrides: Overrides = None,
) -> None:
    """Write a run for other programs; graphs are checked to give the same logits."""
    wanted = dict.fromkeys(formats or ["onnx"])  # each once, in the order of the flags
    if unknown := [name for name in wanted if name not in FORMATS]:
        raise UserError(f"--format {unknown[0]}: choose among {listed(FORMATS)}")
    if division not in ("open", "closed"):
        raise UserError(f"--division {division}: open or closed")
    check_out(out, run)
    from ..export.formats import export_onnx, export_torch
    from ..export.mlperf import write_mlperf_log
    from ..export.model_card import write_hub_folder
    from ..report.read_run import read_run
    from ..run.trained_weights import open_model

    with read_here(run) as here:
        folder = out or (here if here.is_dir() else here.parent) / "export"
        # Before anything is written: what is wrong with the run ends the command here.
        record = read_run(here) if not wanted.keys().isdisjoint({"hub", "mlperf"}) else None
        trained = open_model(here, overrides or []) if wanted.keys() != {"mlperf"} else None
        with as_user_error(f"--out {folder}: can't be written"):
            folder.mkdir(parents=True, exist_ok=True)
        terminal = console()
        for name in sorted(wanted, key=[*reversed(FORMATS)].index):  # the log first: by its rules a run may be refused
            path, found = folder / FORMATS[name], ""
            if name == "mlperf" and record is not None:
                write_mlperf_log(record, path, division)
            elif name == "hub" and record is not None and trained is not None:
                found = f": {', '.join(write_hub_folder(record, trained, path, license_name))}"
            elif trained is not None:
                with as_user_error(f"--out {path}: can't be written"):
                    worst = (export_onnx if name == "onnx" else export_torch)(trained, path)
                found = f": logits as the network's, within {worst:.1e} of the largest"
                if trained.recipe.precision == "portable":
                    found += "; its weights are portable, its arithmetic is that of whatever runs it"
            terminal.print(f"wrote {path}{found}")


def report(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Folders or URLs of runs, finished or not; or other trainers' logs."),
    ],
    runtime: RuntimeFlags,
    out: Path = flag("Write the page to this file.", OUTPUT, default=Path("report.html")),
    mistakes: bool = flag(
        "Also classify the held-out images: the worst classes, the most wrong images.", default=False
    ),
    data: DataPath = None,
    verified: list[Path] | None = flag("Show what was verified, by this file of torusgd verify --json; repeatable."),
) -> None:
    """Write a page about runs: the training, its accuracy and its time; --data implies --mistakes."""
    from ..report.page import log_page, run_page
    from ..report.read_run import read_log, read_run, read_verified

    check_writable("--out", out)
    if all(run.is_file() for run in runs):
        if mistakes or data is not None or verified:
            raise UserError("--mistakes, --data, --verified: are for runs of torusgd, and these are logs of others")
        write_file("--out", out, log_page([read_log(run) for run in runs]))
    else:
        with ExitStack() as stack:
            folders = [stack.enter_context(read_here(run)) for run in runs]
            checks = [read_verified(file) for file in verified or []]
            records = [read_run(folder, checks) for folder in folders]
            wanted = mistakes or data is not None
            found = [_mistakes(run, data, runtime.over()) if wanted else None for run in folders]
        write_file("--out", out, run_page(records, found))
    console().print(f"wrote {out}")


def _mistakes(run: Path, data: Path | None, options: "RuntimeOptions") -> "Mistakes":
    from ..report.mistakes import find_mistakes
    from .assessment import Assessment

    opened = Assessment(TrainedWeights(run, data), options)
    return find_mistakes(opened.evaluate, opened.recipe, opened.trained.train.classes)
