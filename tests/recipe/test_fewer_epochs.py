"""The recipes of fewer epochs than the records': their schedules are the published ones."""

import math

import pytest

from torusgd.recipe.load import load_recipe
from torusgd.recipe.schedule import Schedule, Step

IMAGENET = 1_281_167


def schedule(name: str) -> Schedule:
    return Schedule(load_recipe(name).recipe, IMAGENET)


def step_at(plan: Schedule, epoch: float) -> Step:
    return plan[plan.step_after(epoch * IMAGENET)]


def pixels(plan: Schedule, until: float) -> float:
    """Pixels of the run up to an epoch, in epochs at 224 pixels a side."""
    steps = [plan[index] for index in range(plan.step_after(until * IMAGENET))]
    return sum(step.batch * math.prod(step.sizes.sides) for step in steps) / (224 * 224 * IMAGENET)


def test_mosaicml_27_epochs() -> None:
    plan = schedule("resnet50-27ep")
    assert {span.batch for span in plan.spans} == {2048}
    # 0.32 of 90 epochs; 625 whole batches an epoch there, where each epoch's last 1,167 images are left out.
    assert len(plan) == math.ceil(28.8 * IMAGENET / 2048) == 18_017
    assert len(plan) == pytest.approx(28.8 * 625, rel=1e-3)
    assert plan.boundaries(plan.recipe.evaluate.every)[8] == plan.step_after(27 * IMAGENET)
    assert [step_at(plan, epoch).lr for epoch in (0, 4, 8)] == pytest.approx([0.0, 1.024, 2.048], rel=1e-3)
    middle = 8 + 20.8 / 2
    assert step_at(plan, middle).lr == pytest.approx(1.024, rel=1e-3)
    assert plan[len(plan) - 1].lr == pytest.approx(0, abs=1e-6)


def test_mosaicml_sizes() -> None:
    plan = schedule("resnet50-27ep")
    for step in (plan[index] for index in range(0, len(plan), 50)):
        done = step.start / plan.stop
        scale = 0.5 + 0.5 * min(max((done - 0.4) / 0.4, 0), 1)
        assert step.sizes.sides[0] % 4 == 0
        assert abs(step.sizes.sides[0] - 176 * scale) <= 2.1
    assert [step_at(plan, epoch).sizes.sides[0] for epoch in (0, 11.5, 22.7, 22.8)] == [88, 88, 172, 176]
    assert pixels(plan, 28.8) / 28.8 == pytest.approx(0.33, abs=0.005)
    assert pixels(plan, 27) == pytest.approx(8.4, abs=0.05)


def test_mosaicml_decay_is_the_decoupled_one() -> None:
    optimizer = load_recipe("resnet50-27ep").recipe.optimizer
    assert optimizer.weight_decay == pytest.approx(5e-4 * (1 - optimizer.momentum) / 2.048)
    assert optimizer.no_decay == ()


def test_ffcv_16_epochs() -> None:
    plan = schedule("resnet50-16ep")
    assert {span.batch for span in plan.spans} == {4096}
    assert len(plan) == math.ceil(16 * IMAGENET / 4096) == 5005
    assert len(plan) == pytest.approx(16 * (IMAGENET // 4096), rel=3e-3)
    assert plan[0].lr == pytest.approx(1.7e-4)
    assert [step_at(plan, epoch).lr for epoch in (2, 9)] == pytest.approx([1.7, 0.85], abs=2e-3)
    assert plan[len(plan) - 1].lr == pytest.approx(0, abs=1e-3)
    assert [step_at(plan, epoch).sizes.sides[0] for epoch in (0, 11.9, 12, 15)] == [160, 160, 192, 192]
    assert pixels(plan, 16) / 16 == pytest.approx(0.566, abs=0.001)
    held_out = plan.recipe.held_out_data
    assert held_out.sizes.resize == round(256 / 0.875)
    longer = ["stages.0.until=32ep", "stages.1.until=40ep"]
    assert len(Schedule(load_recipe("resnet50-16ep", longer).recipe, IMAGENET)) == math.ceil(40 * IMAGENET / 4096)
