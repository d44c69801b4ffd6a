"""`torusgd export`: a run for other programs, as ONNX, torch.export, a folder for the hub, or an MLPerf log."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from ..errors import UserError
from ..text import listed
from .options import OUTPUT, Overrides, option
from .output import check_out, console

FORMATS = ("onnx", "torch", "hub", "mlperf")


def export(
    run: Annotated[
        Path, Argument(metavar="RUN", help="A run's folder or URL; for onnx and torch a checkpoint or weight file too.")
    ],
    formats: Annotated[
        list[str] | None,
        option("--format", "Write this; repeatable. Default: onnx.", metavar="|".join(FORMATS)),
    ] = None,
    out: Annotated[Path | None, option("--out", "Write to this folder. Default: RUN/export.", OUTPUT)] = None,
    license_name: Annotated[
        str | None, option("--license", "Name this licence of the weights, in the hub's words, such as apache-2.0.")
    ] = None,
    division: Annotated[
        str, option("--division", "Write the MLPerf log for this division.", metavar="open|closed")
    ] = "open",
    overrides: Overrides = None,
) -> None:
    """Write a run for other programs; graphs are checked to give the same logits."""
    wanted = dict.fromkeys(formats or ["onnx"])
    for name in wanted:
        if name not in FORMATS:
            raise UserError(f"--format {name}: choose among {listed(FORMATS)}")
    if division not in ("open", "closed"):
        raise UserError(f"--division {division}: open or closed")
    check_out(out, run)
    from ..export.formats import export_onnx, export_torch
    from ..export.mlperf import write_mlperf_log
    from ..export.model_card import write_hub_folder
    from ..report.read_run import read_run
    from ..run.load_trained import open_model
    from ..rundir.run_view import local_run

    run = local_run(run)
    folder = out or (run if run.is_dir() else run.parent) / "export"
    record = read_run(run) if not wanted.keys().isdisjoint({"hub", "mlperf"}) else None
    trained = open_model(run, overrides or []) if wanted.keys() != {"mlperf"} else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: can't be written: {error.strerror}") from None
    terminal = console()
    for name in wanted:
        if name in ("onnx", "torch"):
            assert trained is not None
            path = folder / ("model.onnx" if name == "onnx" else "model.pt2")
            worst = (export_onnx if name == "onnx" else export_torch)(trained, path)
            terminal.print(f"wrote {path}: logits as the network's, within {worst:.1e} of the largest", markup=False)
        elif name == "hub":
            assert record is not None
            assert trained is not None
            write_hub_folder(record, trained, folder / "hub", license_name)
            terminal.print(
                f"wrote {folder / 'hub'}: README.md, config.json, recipe.yaml, model.safetensors", markup=False
            )
        else:
            assert record is not None
            write_mlperf_log(record, folder / "mlperf.log", division)
            terminal.print(f"wrote {folder / 'mlperf.log'}", markup=False)
