"""`torusgd simulate`: training in virtual time, for every form of relaxed synchrony."""

import math
from dataclasses import asdict
from typing import Annotated

from rich import box
from rich.table import Table
from typer import Option

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
            help="bsp, ssp:STALE, asp, pbsp:SAMPLE, pssp:SAMPLExSTALE, backup:B, cutoff:COUNT, cutoff:predicted, "
            "threshold:PARTSxSECONDS, local:H, diloco:H, gossip:PROBABILITY, elastic:STEPS. Default: the recipe's.",
            rich_help_panel=FORM,
        ),
    ] = "",
    workers: Annotated[
        int | None,
        Option("--workers", metavar="P", help="Virtual workers. Default: the recipe's.", rich_help_panel=FORM),
    ] = None,
    delays: Annotated[
        str | None,
        Option(
            "--delays",
            metavar="MODEL",
            help="Of a gradient, such as lognormal or exponential@0.5. Default: the recipe's, or exponential.",
            rich_help_panel=FORM,
        ),
    ] = None,
    compute: Annotated[
        float, Option("--compute", help="Virtual seconds of a gradient without its delay.", rich_help_panel=FORM)
    ] = 1.0,
    lr: Annotated[
        float | None, Option("--lr", help="The rate of plain SGD. Default: the recipe's rate.lr.", rich_help_panel=FORM)
    ] = None,
    seconds: Annotated[
        float | None, Option("--seconds", help="End after so many virtual seconds.", rich_help_panel=FORM)
    ] = None,
    images: Annotated[int | None, Option("--images", help="End after so many images.", rich_help_panel=FORM)] = None,
    data: DataPath = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Train a recipe's model in virtual time: real gradients, keyed delays, the same bits each time.

    The optimiser is plain SGD at one rate, whatever the recipe's is. It ends after --seconds, --images, or the images
    of the recipe's stages.
    """
    check_writable("--json", json_file)
    import torch

    from ..recipe.load import load_recipe
    from ..runtime import prepare_process
    from ..simulate import Setting
    from ..simulate import simulate as run

    loaded = load_recipe(recipe, overrides or []).recipe
    prepare_process(loaded, torch.device("cpu"))
    workers = loaded.virtual_workers if workers is None else workers
    delays = delays or loaded.synchrony.delays or "exponential"
    setting = Setting(loaded, form, workers, delays, loaded.rate.lr if lr is None else lr, compute)
    found = run(
        setting,
        data,
        seconds=math.inf if seconds is None else seconds,
        images=math.inf if images is None else images,
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("virtual seconds", "images", "error"):
        table.add_column(heading, justify="right", overflow="fold")
    for point in found.points:
        table.add_row(f"{point.time:,.2f}", f"{point.images:,}", f"{point.error:.2%}")
    terminal = console()
    asked = form or f"synchrony.form = {loaded.synchrony.form}"
    terminal.print(
        f"{loaded.name}, {asked}, {workers} workers, delays {delays}, SGD of rate {setting.lr:g}", markup=False
    )
    terminal.print(table)
    terminal.print(f"weights_sha256 {found.weights_sha256}", markup=False)
    write_json(json_file, asdict(found))
