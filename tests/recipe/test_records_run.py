"""Each record takes real steps when scaled down: its network, optimizer, precision and wire, with few images."""

from pathlib import Path

import pytest
from tests.run.runs import events
from tests.step.trainers import job_of, run_of

from torusgd.recipe.load import load_recipe, recipe_names
from torusgd.recipe.schedule import Schedule
from torusgd.runtime import resolve_auto

RECORDS = [name for name in recipe_names() if name.startswith(("sony", "fujitsu", "you", "intel"))]
SMALL = (
    "virtual_workers=2", "stages.0.images_per_worker=2", "data.train_images=96", "data.eval_images=4",
    "data.classes=4", "evaluate={every: null, images_per_chunk: 4}",
)  # fmt: skip
PICTURES = ("data.source=synthetic", "data.image_size=48", "data.resize=54")
LAYERS = (*PICTURES, "column_blocks=4")
# What is not small yet: linear layers of 100 million weights.
FURTHER = {
    **dict.fromkeys(("intel-vgga-128", "intel-vgga-64", "intel-aws-vgga-16"), (*LAYERS, "model.options.width=4")),
    "intel-overfeat-64": (*LAYERS, "data.image_size=96", "data.resize=100", "model.options.width=6"),
    "intel-cddnn-16": ("model.options.width=64",),
    "sony-119k": (*PICTURES, "stages.3.images_per_worker=40"),  # twice 56 are more than all 96 images
    "sony-122s": (*PICTURES, "noise_scale.batch=4"),
}

ALIKE = {"sony-224s", "sony-85k", "sony-119k", "fujitsu-74s", "fujitsu-62s", "you-resnet50-14min", "you-alexnet-11min"}
"""Each has a sister with its network or optimizer, which runs in every `make test`."""
FLOAT32 = ("precision=float32", "loss_scale={}")


CASES = [
    *(pytest.param(name, (*FURTHER.get(name, PICTURES), *FLOAT32), marks=[pytest.mark.slow] * (name in ALIKE), id=name)
      for name in RECORDS),
    # A CPU computes float16 slowly: one record stands for the four that use it, and a small network for its own.
    ("fujitsu-62s", (*PICTURES, "model.name=fashion-net", "data.image_size=28", "data.resize=32")),
    pytest.param("fujitsu-62s", (*PICTURES, "data.image_size=64", "data.resize=72"),
                 marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_three_steps(name: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    recipe = resolve_auto(load_recipe(name, [*SMALL, *overrides]).recipe, "cpu")
    summary = run_of(job_of(recipe=recipe, out=tmp_path, max_steps=3)).run().summary
    steps = [event for event in events(tmp_path) if "lr" in event]
    plan = Schedule(recipe, 96)
    assert [step["lr"] for step in steps] == [plan[i].lr for i in range(3)]
    assert [step["samples"] for step in steps] == [4, 8, 12]
    # A loss of chance is log 4 = 1.39; a step that did harm shows as a loss far from it, or as one that was skipped.
    assert all(0.5 < step["loss"] < 20 and not step.get("skipped") for step in steps)
    assert summary["steps"] == 3
