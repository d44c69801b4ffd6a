"""Schedules: nothing dropped, boundaries where they are promised, rates by the formula."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import refused

from torusgd.errors import UserError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schedule import Schedule

TRAIN = 1437


def schedule(*overrides: str, train_images: int = TRAIN) -> Schedule:
    return Schedule(load_recipe("digits", overrides).recipe, train_images)


@given(
    st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(50, 5000),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_steps_follow_one_another_and_stages_end_at_the_first_boundary(
    workers: int, images: list[int], train: int, spans: list[int]
) -> None:
    ends = [sum(spans[: i + 1]) * math.ceil(workers * max(images) * 2 / train) for i in range(len(images))]
    stages = ", ".join(f"{{until: {end}ep, images_per_worker: {n}}}" for end, n in zip(ends, images, strict=True))
    plan = schedule(
        f"virtual_workers={workers}", f"stages=[{stages}]", "rate.warmup=null", "evaluate.every=null",
        train_images=train,
    )  # fmt: skip
    position = 0
    for step in plan:
        assert step.start == position
        assert step.batch == workers * step.images_per_worker
        position += step.batch
    assert position == plan.stop
    for span, end in zip(plan.spans, ends, strict=True):
        assert span.stop >= end * train > span.stop - span.batch
    shares = {plan[0].share(worker) for worker in range(workers)}
    assert shares == {worker * plan[0].images_per_worker for worker in range(workers)}


# Warm-ups and polynomials: tests/recipe/test_records.py.
def test_step_cosine_and_floor() -> None:
    step = schedule("rate.decay={shape: step, milestones: [10ep, 30ep], factor: 0.1}", "rate.warmup=null")
    root = 4.0 * math.sqrt(2)
    assert [step[i].lr for i in (0, 149, 150, 400)] == pytest.approx([4.0, 4.0, 0.4, root * 0.01])
    cosine = schedule("rate.decay={shape: cosine, floor: 0.1, end: 20ep}", "rate.warmup=null")
    assert cosine[0].lr == 4.0
    assert cosine[449].lr == pytest.approx(root * 0.1)
    assert schedule("rate.decay={shape: constant}", "rate.warmup=null")[449].lr == pytest.approx(root)


@settings(deadline=None, max_examples=50)
@given(exact=st.booleans(), batch=st.integers(1, 90), momentum=st.floats(0.0, 0.99), lr=st.floats(0.01, 4.0))
def test_noise_scale_momentum_keeps_the_noise_of_a_reference_run(exact, batch, momentum, lr: float) -> None:
    """Smith and Le, arXiv 1710.06451: lr (N / B - 1) / (1 - m), or lr N / B / (1 - m)."""
    kept = {"exact": exact, "batch": batch, "lr": lr, "momentum": momentum}

    def noise(lr: float, batch: int, momentum: float) -> float:
        return lr * (TRAIN / batch - exact) / (1 - momentum)

    try:
        plan = schedule(f"noise_scale={json.dumps(kept)}", "stages.0.momentum=noise-scale")
    except UserError as error:
        assert "must be in [0, 1)" in str(error)  # noqa: PT017 - a rate so high that no momentum keeps the noise
        return
    for span in plan.spans:
        assert noise(span.lr, span.batch, span.momentum) == pytest.approx(noise(lr, batch, momentum), rel=1e-6)


def test_a_reference_of_a_whole_epoch_has_no_noise_to_keep() -> None:
    with refused("a reference of an epoch", "noise_scale.exact = true:"):
        schedule("noise_scale={exact: true, batch: 5000}", "stages.0.momentum=noise-scale")
    with refused("noise-scale without a reference", "recipe digits: stages.0.momentum:"):
        schedule("stages.0.momentum=noise-scale")


def test_weight_decay_is_ramped_only_when_asked() -> None:
    ramped = schedule("optimizer.ramp_weight_decay=true")
    assert (schedule()[0].weight_decay_factor, ramped[0].weight_decay_factor) == (1.0, 0.0)
    assert 0 < ramped[10].weight_decay_factor < 1


def test_evaluations_by_steps_epochs_and_offset() -> None:
    plan, evaluate = schedule(), load_recipe("digits", ["evaluate={every: 100st, first: 20st}"]).recipe.evaluate
    assert plan.boundaries(evaluate.every, evaluate.first) == [20, 120, 220, 320, 420, 450]
    assert plan.boundaries(None) == [450]
    assert plan.boundaries(plan.recipe.evaluate.every)[:2] == [math.ceil(n * TRAIN / 96) for n in (5, 10)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.1.until=20ep", "stages.1.until = 20ep:"),
        ("rate.warmup.length=50ep", "rate.warmup.length = 50ep:"),
        ("rate.decay.end=1ep", "rate.decay:"),
        ("stages.1.lr=1000.0", "stages.1.momentum = noise-scale:"),
        ("evaluate={every: 5ep, first: 20st}", "evaluate.first = 20st:"),
    ],
)
def test_impossible_schedules_are_one_line(override: str, words: str) -> None:
    with refused(f"a schedule: {override}", words):
        plan = schedule(override)
        plan.boundaries(plan.recipe.evaluate.every, plan.recipe.evaluate.first)
