"""`torusgd simulate`: training in virtual time, for forms of relaxed synchrony that never run on real ranks."""

import math
from dataclasses import asdict
from typing import Annotated

from rich import box
from rich.table import Table
from typer import Option

from ..errors import UserError
from .options import DataPath, JsonFile, Overrides, RecipeName
from .output import check_writable, console, write_json

FORM = "What is simulated"


def simulate(
    recipe: RecipeName,
    form: Annotated[
        str,
        Option(
            "--synchrony",
            metavar="FORM",
            help="bsp, ssp:STALE, asp, pbsp:SAMPLE, pssp:SAMPLExSTALE, threshold:PARTSxSECONDS, local:H, diloco:H, "
            "gossip:PROBABILITY, elastic:STEPS.",
            rich_help_panel=FORM,
        ),
    ] = "bsp",
    workers: Annotated[int, Option("--workers", metavar="P", help="Virtual workers.", rich_help_panel=FORM)] = 6,
    delays: Annotated[
        str,
        Option("--delays", metavar="MODEL", help="Of a gradient, such as exponential@0.5.", rich_help_panel=FORM),
    ] = "exponential",
    compute: Annotated[
        float, Option("--compute", help="Virtual seconds of a gradient without its delay.", rich_help_panel=FORM)
    ] = 1.0,
    lr: Annotated[float, Option("--lr", help="The rate of plain SGD.", rich_help_panel=FORM)] = 0.3,
    seconds: Annotated[
        float | None, Option("--seconds", help="End after so many virtual seconds.", rich_help_panel=FORM)
    ] = None,
    images: Annotated[int | None, Option("--images", help="End after so many images.", rich_help_panel=FORM)] = None,
    data: DataPath = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Train a recipe's model in virtual time: real gradients, keyed delays, the same bits each time."""
    check_writable("--json", json_file)
    if seconds is None and images is None:
        raise UserError("simulate: needs --seconds or --images, at which it ends")
    import torch

    from ..recipe.load import load_recipe
    from ..runtime import prepare_process
    from ..simulate import Setting
    from ..simulate import simulate as run

    loaded = load_recipe(recipe, overrides or []).recipe
    prepare_process(loaded, torch.device("cpu"))
    setting = Setting(loaded, form, workers, delays, lr, compute)
    found = run(setting, data, seconds=seconds or math.inf, images=images or math.inf)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("virtual seconds", "images", "error"):
        table.add_column(heading, justify="right")
    for point in found.points:
        table.add_row(f"{point.time:,.2f}", f"{point.images:,}", f"{point.error:.2%}")
    terminal = console()
    terminal.print(f"{loaded.name}, {form}, {workers} workers, delays {delays}", markup=False)
    terminal.print(table)
    terminal.print(f"weights_sha256 {found.weights_sha256}", markup=False)
    write_json(json_file, asdict(found))
