"""Families of image classifiers of torchvision and timm, each for one step at 64 pixels on 1 rank and on 3.

    python -m tools.model_families [--write] [NAME ...]

prints for each whether it trains, to the same hash of the weights on both, or the line that refuses it; --write puts
the rows into the table of notes/models.md. All families share three processes, since libraries take seconds to import.
"""

import io
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from torusgd.cli.bench import on_ranks
from torusgd.comm.groups import Group, alone
from torusgd.errors import UserError, in_one_line
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe
from torusgd.run.job import Job
from torusgd.run.run import Run
from torusgd.rundir.run_dir import RunDir
from torusgd.signals import StopFlag

PAGE = Path(__file__).parents[1] / "notes" / "models.md"
RANKS = 3
SIZED = {"img_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "torchvision:alexnet": {},
    "torchvision:resnet18": {},
    "torchvision:squeezenet1_1": {},
    "torchvision:densenet121": {},
    "torchvision:inception_v3": {},
    "torchvision:googlenet": {},
    "torchvision:shufflenet_v2_x0_5": {},
    "torchvision:mobilenet_v2": {},
    "torchvision:mobilenet_v3_small": {},
    "torchvision:mnasnet0_5": {},
    "torchvision:regnet_y_400mf": {},
    "torchvision:efficientnet_b0": {},
    "torchvision:vit_b_16": {},
    "torchvision:swin_t": {},
    "torchvision:maxvit_t": {},
    "timm:resnet10t": {},
    "timm:resnetv2_18": {},
    "timm:res2net50_14w_8s": {},
    "timm:resnest14d": {},
    "timm:skresnet18": {},
    "timm:dpn48b": {},
    "timm:dla34": {},
    "timm:hrnet_w18_small": {},
    "timm:rexnet_100": {},
    "timm:ghostnet_050": {},
    "timm:hardcorenas_a": {},
    "timm:tinynet_e": {},
    "timm:lcnet_035": {},
    "timm:mobilenetv4_conv_small_035": {},
    "timm:mobileone_s0": {},
    "timm:repvgg_a0": {},
    "timm:repvit_m0_9": {},
    "timm:fastvit_t8": {},
    "timm:edgenext_xx_small": {},
    "timm:mobilevit_xxs": {},
    "timm:mobilevitv2_050": {},
    "timm:efficientformerv2_s0": SIZED,
    "timm:efficientvit_b0": {},
    "timm:efficientvit_m0": {},
    "timm:convnextv2_atto": {},
    "timm:poolformer_s12": {},
    "timm:levit_128s": SIZED,
    "timm:pit_ti_224": SIZED,
    "timm:vit_tiny_patch16_224": SIZED,
    "timm:eva02_tiny_patch14_224": SIZED,
    "timm:cait_xxs24_224": SIZED,
    "timm:xcit_nano_12_p16_224": {},
    "timm:coat_tiny": SIZED,
    "timm:crossvit_tiny_240": {},
    "timm:gmlp_ti16_224": SIZED,
    "timm:visformer_tiny": SIZED,
    "timm:inception_next_atto": {},
    "timm:starnet_s1": {},
    "timm:tiny_vit_5m_224": {},
    "timm:ese_vovnet19b_dw": {},
    "timm:nf_regnet_b0": {},
    "timm:mambaout_femto": {},
    "timm:shvit_s1": {},
    "timm:swiftformer_xs": {},
    "timm:halonet26t": {},
    "timm:lambda_resnet26t": {},
    "timm:botnet26t_256": SIZED,
    "timm:gernet_s": {},
    "timm:pvt_v2_b0": {},
    "timm:maxvit_rmlp_pico_rw_256": SIZED,
    "timm:fasternet_t0": {},
    "timm:convit_tiny": SIZED,
}
"""the options that each is built with; of most families the smallest member"""


def one_step(name: str, world: Group) -> str:
    """The weights' hash after a step of six images in three virtual workers, or why there is none; every rank calls it.

    Args:
        name: A key of `FAMILIES`.
        world: The ranks.
    """
    tree = {
        "name": "one",
        "data": {"source": "synthetic", "image_size": 64, "classes": 4, "train_images": 6, "eval_images": 4},
        "model": {"name": name, "options": FAMILIES[name]},
        "virtual_workers": 3,
        "stages": [{"until": "1st", "images_per_worker": 2}],
        "rate": {"lr": 0.1, "decay": {"shape": "constant"}},
        "memory_format": "contiguous",
    }
    recipe = Recipe.model_validate_json(json.dumps(tree))
    with tempfile.TemporaryDirectory() as folder:
        if world.rank == 0:
            RunDir(Path(folder)).claim(recipe, fresh=False)
        try:
            job = Job(recipe, RuntimeOptions(), "cpu", Path(folder))
            with redirect_stdout(io.StringIO()):
                summary = Run(job, world, StopFlag(), restarts=0).run().summary
        except UserError as error:
            return f"refused: {error}"
        finally:
            world.barrier()
    return str(summary["weights_sha256"])


def rows_of(names: Sequence[str], world: Group) -> dict[str, str]:
    """A row of the table for each network; every rank calls it.

    A family that fails otherwise than by a line is a defect, and told as one: the other families go on.
    """
    torch.set_num_threads(1)
    rows = {}
    for name in names:
        try:
            single = one_step(name, alone(world.device)) if world.rank == 0 else ""
            single = world.broadcast_text(single)
            shared = one_step(name, world)
        except Exception as error:
            single = shared = f"defect: {type(error).__name__} {in_one_line(error)}"
        rows[name] = _row(name, single, shared)
        if world.rank == 0:
            print(rows[name], flush=True)
    return rows


def read_table(text: str) -> dict[str, str]:
    """The rows of a page, by network."""
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith(("| `timm:", "| `torchvision:"))}


def write_table(page: Path, rows: dict[str, str]) -> None:
    """Puts rows into a page's table, in the order of `FAMILIES`."""
    text = page.read_text()
    head, rule, rest = text.partition("| --- | --- | --- |\n")
    _, gap, after = rest.partition("\n\n")
    known = read_table(text) | rows
    page.write_text(head + rule + "\n".join(known[name] for name in FAMILIES if name in known) + (gap + after or "\n"))


def run(names: Sequence[str]) -> dict[str, str]:
    """`rows_of` on three ranks of this machine."""
    rows: dict[str, str] = on_ranks(RuntimeOptions(workers=RANKS, device="cpu"), rows_of, list(names))
    return rows


def _row(name: str, single: str, shared: str) -> str:
    options = ", ".join(f"`model.options.{key}: {value}`" for key, value in FAMILIES[name].items())
    if single != shared:
        word, remark = "differs", f"on 1 rank {single}, on 3 {shared}"
    elif ": " in single:
        word, _, remark = single.partition(": ")
        remark = f"{options}: {remark}" if options else remark
    else:
        word, remark = "trains", options
    return f"| `{name}` | {word} | {remark.replace('|', '/')} |"


if __name__ == "__main__":
    words = sys.argv[1:]
    asked = [word for word in words if word != "--write"] or list(FAMILIES)
    if unknown := [name for name in asked if name not in FAMILIES]:
        sys.exit(f"{unknown[0]}: not among FAMILIES of {__file__}")
    found = run(asked)
    if "--write" in words:
        write_table(PAGE, found)
