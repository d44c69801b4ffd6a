"""What benchmarks of whole steps share: networks on synthetic images, and the trainer of a rank that takes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torusgd.comm.base import Liveness
from torusgd.comm.groups import Group
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer, build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.runtime import resolve_auto


def synthetic(name: str, pixels: int, channels: int, images: int, workers: int, steps: int = 1000) -> list[str]:
    """What makes the recipe of a network out of `digits`; `images` are those of each virtual worker."""
    many = ", ".join(["0.5"] * channels)
    return [
        f"data={{source: synthetic, train_images: 256, eval_images: 16, image_size: {pixels}, channels: {channels}, "
        f"classes: 10, mean: [{many}], std: [{many}]}}",
        f"model={{name: {name}}}",
        f"virtual_workers={workers}",
        f"stages=[{{until: {steps}st, images_per_worker: {images}}}]",
        "rate={lr: 0.001}",
        "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
        "precision=float32",
        "polish=null",
    ]


def trainer_of(changes: Sequence[str], world: Group, **options: Any) -> Trainer:
    """This rank's trainer of the recipe that changes make out of `digits`, with these runtime options."""
    recipe = resolve_auto(load_recipe("digits", changes).recipe, "cpu")
    job = Job(recipe, RuntimeOptions(**options), "cpu", Path())
    return build(job, open_data(job, world.device, Liveness()), world, Liveness())
