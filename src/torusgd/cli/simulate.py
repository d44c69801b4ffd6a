"""`torusgd simulate`: training in virtual time, for every form of relaxed synchrony."""

import math
from dataclasses import asdict
from typing import Annotated

from ..text import percent
from .options import DataPath, JsonFile, Overrides, RecipeName, option
from .output import check_writable, console, table, write_json

FORM = "What is simulated"


def simulate(
    recipe: RecipeName,
    form: Annotated[
        str,
        option(
            "--synchrony",
            "Simulate bsp, ssp:STALE, asp, pbsp:SAMPLE, pssp:SAMPLExSTALE, backup:B, cutoff:COUNT, cutoff:predicted, "
            "threshold:PARTSxSECONDS, local:H, diloco:H, gossip:PROBABILITY or elastic:STEPS. Default: the recipe's.",
            FORM,
            "FORM",
        ),
    ] = "",
    workers: Annotated[
        int | None, option("--workers", "Simulate this many virtual workers. Default: the recipe's.", FORM, "P")
    ] = None,
    delays: Annotated[
        str | None,
        option(
            "--delays",
            "Delay each gradient by this model, such as lognormal or exponential@0.5. Default: the recipe's, or "
            "exponential.",
            FORM,
            "MODEL",
        ),
    ] = None,
    compute: Annotated[float, option("--compute", "Take so many virtual seconds a gradient, plus delay.", FORM)] = 1.0,
    lr: Annotated[float | None, option("--lr", "Step at this rate. Default: the recipe's rate.lr.", FORM)] = None,
    momentum: Annotated[float, option("--momentum", "Momentum of the server, under barriers.", FORM)] = 0.0,
    seconds: Annotated[float | None, option("--seconds", "End after so many virtual seconds.", FORM)] = None,
    images: Annotated[int | None, option("--images", "End after so many images.", FORM)] = None,
    data: DataPath = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Train a recipe's model in virtual time: real gradients, keyed delays, the same bits each time.

    The optimiser is SGD at one rate, whatever the recipe's is. It ends after --seconds, --images, or the images
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
    setting = Setting(loaded, form, workers, delays, loaded.rate.lr if lr is None else lr, compute, momentum)
    found = run(
        setting, data, seconds=math.inf if seconds is None else seconds, images=math.inf if images is None else images
    )
    terminal = console()
    what = form or f"synchrony.form = {loaded.synchrony.form}"
    terminal.print(
        f"{loaded.name}, {what}, {workers} workers, delays {delays}, SGD of rate {setting.lr:g}"
        + (f" and momentum {momentum:g}" if momentum else ""),
        markup=False,
    )
    rows = [(f"{point.time:,.2f}", f"{point.images:,}", percent(point.error)) for point in found.points]
    terminal.print(table(("virtual seconds", "images", "error"), rows))
    terminal.print(f"weights_sha256 {found.weights_sha256}", markup=False)
    write_json(json_file, asdict(found))
