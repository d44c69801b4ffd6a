"""Families of image classifiers, each for one step of training at 64 pixels: one hash on 1 and 3 ranks, or one line."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks

from torusgd.comm.groups import group_of
from torusgd.errors import UserError
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe
from torusgd.signals import StopFlag
from torusgd.train.job import Job
from torusgd.train.run import Run
from torusgd.train.run_dir import RunDir

SIZED = "img_size"
FAMILIES: dict[str, str] = {
    "torchvision:alexnet": "",
    "torchvision:resnet18": "",
    "torchvision:squeezenet1_1": "",
    "torchvision:densenet121": "",
    "torchvision:inception_v3": "does not take 3x64x64 images",
    "torchvision:googlenet": "it gave a GoogLeNetOutputs",
    "torchvision:shufflenet_v2_x0_5": "",
    "torchvision:mobilenet_v2": "",
    "torchvision:mobilenet_v3_small": "",
    "torchvision:mnasnet0_5": "",
    "torchvision:regnet_y_400mf": "",
    "torchvision:efficientnet_b0": "",
    "torchvision:vit_b_16": "give model.options.image_size",
    "torchvision:swin_t": "",
    "torchvision:maxvit_t": "does not take 3x64x64 images",
    "timm:resnet10t": "",
    "timm:resnetv2_18": "",
    "timm:res2net50_14w_8s": "",
    "timm:resnest14d": "",
    "timm:skresnet18": "",
    "timm:dpn48b": "",
    "timm:dla34": "",
    "timm:hrnet_w18_small": "",
    "timm:rexnet_100": "",
    "timm:ghostnet_050": "",
    "timm:hardcorenas_a": "",
    "timm:tinynet_e": "",
    "timm:lcnet_035": "",
    "timm:mobilenetv4_conv_small_035": "",
    "timm:mobileone_s0": "",
    "timm:repvgg_a0": "",
    "timm:repvit_m0_9": "",
    "timm:fastvit_t8": "",
    "timm:edgenext_xx_small": "",
    "timm:mobilevit_xxs": "",
    "timm:mobilevitv2_050": "",
    "timm:efficientformerv2_s0": SIZED,
    "timm:efficientvit_b0": "",
    "timm:efficientvit_m0": "",
    "timm:convnextv2_atto": "",
    "timm:poolformer_s12": "",
    "timm:levit_128s": SIZED,
    "timm:pit_ti_224": SIZED,
    "timm:vit_tiny_patch16_224": SIZED,
    "timm:eva02_tiny_patch14_224": SIZED,
    "timm:cait_xxs24_224": SIZED,
    "timm:xcit_nano_12_p16_224": "",
    "timm:coat_tiny": SIZED,
    "timm:crossvit_tiny_240": "",
    "timm:gmlp_ti16_224": SIZED,
    "timm:visformer_tiny": SIZED,
    "timm:inception_next_atto": "",
    "timm:starnet_s1": "",
    "timm:tiny_vit_5m_224": "",
    "timm:ese_vovnet19b_dw": "",
    "timm:nf_regnet_b0": "",
    "timm:mambaout_femto": "",
    "timm:shvit_s1": "",
    "timm:swiftformer_xs": "",
    "timm:halonet26t": "does not take 3x64x64 images",
    "timm:lambda_resnet26t": "",
    "timm:botnet26t_256": SIZED,
    "timm:gernet_s": "",
    "timm:pvt_v2_b0": "",
    "timm:maxvit_rmlp_pico_rw_256": SIZED,
    "timm:fasternet_t0": "",
    "timm:convit_tiny": "has a module blocks.0.attn (GPSA) whose buffer rel_indices changes in training",
}
"""network -> empty: it trains; `img_size`: it trains with that option; else what refuses it"""
GROUP = 10
GROUPS = [list(FAMILIES)[start : start + GROUP] for start in range(0, len(FAMILIES), GROUP)]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def one_step(name: str) -> str:
    """The weights' hash after a step of six images and three virtual workers, or the line that refuses the network."""
    world = group_of()
    needs_size = FAMILIES[name] == SIZED or name == "timm:convit_tiny"
    tree = {
        "name": "one",
        "data": {"source": "synthetic", "image_size": 64, "classes": 4, "train_images": 6, "eval_images": 4},
        "model": {"name": name, "options": {"img_size": 64} if needs_size else {}},
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
            summary = Run(job, world, StopFlag(), restarts=0).run().summary
        except UserError as error:
            return f"refused: {error}"
        finally:
            if world.size > 1:
                dist.barrier()
    return str(summary["weights_sha256"])


def one_step_of_each(names: list[str]) -> dict[str, str]:
    return {name: one_step(name) for name in names}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_a_step_has_one_hash_on_one_and_three_ranks(names: list[str]) -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    alone: dict[str, Any] = run_ranks(1, one_step_of_each, names, timeout=900)[0]
    assert run_ranks(3, one_step_of_each, names, timeout=900)[0] == alone
    for name, line in alone.items():
        wanted = FAMILIES[name]
        if wanted in ("", SIZED):
            assert re.fullmatch("[0-9a-f]{64}", line), f"{name}: {line}"
        else:
            assert line.startswith("refused: model.name:"), f"{name}: {line}"
            assert wanted in line
            assert "\n" not in line


def test_the_page_lists_these_networks() -> None:
    rows = re.findall(r"^\| `((?:torchvision|timm):\w+)` \| (\w+)", PAGE.read_text(), re.MULTILINE)
    words = {name: {"": "trains", SIZED: "trains"}.get(wanted, "refused") for name, wanted in FAMILIES.items()}
    assert dict(rows) == words
