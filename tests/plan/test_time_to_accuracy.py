"""Epochs as a function of the batch, and the time, the devices and the batch that an accuracy takes."""

from functools import cache
from statistics import median

import pytest

from tests.messages import refused, refuses
from torusgd.plan import load_cluster, load_software, workload_of
from torusgd.plan import time_to_accuracy as accuracy
from torusgd.plan.forecast import Workload
from torusgd.recipe.load import load_recipe

H100, MXNET = load_cluster("hgx-h100"), load_software("mxnet-v30")
RECIPE = load_recipe("resnet50").recipe.resolve(precision="float16", memory_format="channels_last")


@cache
def workload() -> Workload:
    return workload_of(RECIPE)


def plans(devices: int) -> list[accuracy.AccuracyPlan]:
    return accuracy.plan_to_accuracy(RECIPE, workload(), H100, MXNET, devices)


def evaluations(epochs: float) -> int:
    """Every fourth epoch from the third on, and at the end."""
    return len([mark for mark in range(3, 100, 4) if mark < epochs]) + 1


def test_the_curve_is_fitted_to_the_reference_points() -> None:
    curve, exact = accuracy.curve(), accuracy.EpochCurve(30.0, 20_000.0)
    assert curve.minimum == pytest.approx(34.58, abs=0.005)
    assert curve.critical == pytest.approx(46_909, rel=1e-3)
    assert curve.epochs(curve.critical) == pytest.approx(2 * curve.minimum)
    points = [type(accuracy.REFERENCE[0])(batch, exact.epochs(batch)) for batch in (1_000, 5_000, 40_000)]
    found = accuracy.fit(points)
    assert (found.minimum, found.critical) == pytest.approx((30.0, 20_000.0))


def test_each_reference_point_is_predicted_by_the_others() -> None:
    errors = [abs(error) for error in accuracy.leave_one_out()]
    assert (len(errors), median(errors), max(errors)) == pytest.approx((10, 0.035, 0.074), abs=0.0005)
    without = accuracy.fit([point for point in accuracy.REFERENCE if point.batch != 4_096])
    assert accuracy.leave_one_out()[2] == pytest.approx(without.epochs(4_096) / 40.0 - 1)


@pytest.mark.parametrize(("name", "change", "key"), [
    ("sony-224s", (), "data.augment"),
    ("digits", (), "data.train_images"),
    ("resnet50", ("model.name=resnet101",), "model"),
    ("resnet50", ("optimizer.trust=0.01",), "optimizer.trust"),
    ("resnet50", ("stages=[{until: 9ep, images_per_worker: 5}, {until: 37ep, images_per_worker: 9}]",), "stages"),
])  # fmt: skip
def test_other_recipes_and_accuracies_are_refused_and_every_row_is_known(name, change, key: str) -> None:
    with refused(f"--to of another {key}", "--to:") as caught:
        accuracy.check_known(load_recipe(name, change).recipe, 0.759)
    assert key in str(caught.value)
    refuses("--to another accuracy", accuracy.check_known, RECIPE, 0.76, about="--to:")
    for batch in (3200, 4096, 65536):
        accuracy.check_known(load_recipe("resnet50", [f"batch={batch}"]).recipe, 0.759)


def test_a_plan_counts_the_steps_of_its_batch_and_the_evaluations_up_to_the_last() -> None:
    for plan in plans(64):
        assert accuracy.SMALLEST <= plan.batch <= accuracy.LARGEST
        assert plan.batch % (64 * plan.images) == 0
        needed = accuracy.curve().epochs(plan.batch)
        assert needed <= plan.epochs < needed + plan.batch / 1_281_167
        assert plan.schedule == pytest.approx(1.05 * needed)
        assert plan.low < plan.seconds < plan.high
        trained = plan.epochs * 1_281_167 / plan.images_per_second
        assert trained + evaluations(needed) * MXNET.evaluation.seconds < plan.seconds < 1.2 * trained + 10
    best = accuracy.quickest(plans(64))
    assert best.cost(2.0) == pytest.approx(64 * 2.0 * best.seconds / 3600)
    # A recipe that evaluates at its end alone does so once.
    seldom = load_recipe("resnet50", ["evaluate.every=null", "precision=float16"]).recipe
    for often, once in zip(plans(64), accuracy.plan_to_accuracy(seldom, workload(), H100, MXNET, 64), strict=True):
        assert (once.batch, once.run.training) == (often.batch, often.run.training)
        assert often.run.evaluation == pytest.approx(once.run.evaluation * evaluations(often.epochs), rel=1e-6)


def test_more_devices_take_a_larger_batch_until_they_bring_nothing_and_too_many_are_refused() -> None:
    counts = [1, 8, 64, 256, 1024, 2048]
    found = accuracy.sweep_to_accuracy(RECIPE, workload(), H100, lambda count: MXNET, counts)
    batches, seconds = ([getattr(plan, field) for plan in found.plans] for field in ("batch", "seconds"))
    assert batches[0] < 5_000 < batches[2] < batches[-1]
    assert found.knee in counts
    assert found.knee <= found.useful == counts[seconds.index(min(seconds))]
    assert seconds[1] < seconds[0] / 6
    assert accuracy.MOST_DEVICES == 2120
    refuses("--to with too many devices", plans, 4096, about="--to with 4,096 devices:")
    small = H100.model_copy(update={"device": H100.device.model_copy(update={"memory": 1e9})})
    with refused("--to with too little memory", "--to with 8 devices:"):
        accuracy.plan_to_accuracy(RECIPE, workload(), small, MXNET, 8)


def test_the_runs_that_are_published_lie_within_the_band() -> None:
    """NVIDIA's MLPerf v4.0 on 8 H100: steps of 55.8 ms at 3,200 images, 75.9 % at epoch 35 in 14 of 15 runs."""
    plan = next(plan for plan in plans(8) if plan.batch == 3_200)
    published = 35 * 1_281_167 / 3_200 * 0.0558
    assert plan.low < published + plan.run.start + plan.run.evaluation < plan.high
