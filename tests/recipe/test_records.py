"""Published recipes against the figures of their papers, at full size, without running them."""

import math
import re
from pathlib import Path

import pytest
import yaml
from tests.messages import refuses

from torusgd.comm.algorithms import parse_algorithm
from torusgd.plan.cluster import load_software
from torusgd.plan.published import read_rows
from torusgd.recipe.load import load_recipe, recipe_names, recipe_source
from torusgd.recipe.schedule import Schedule, Step
from torusgd.recipe.schema import Recipe

IMAGENET = 1281167
RECORDS = [name for name in recipe_names() if name.startswith(("sony", "fujitsu", "you", "intel"))]
# Nodes, batch, steps: Das et al. (arXiv 1602.06709), with the lengths of VGG's and OverFeat's authors.
INTEL = {
    "intel-vgga-128": (128, 512, 185169), "intel-vgga-64": (64, 256, 370338), "intel-overfeat-64": (64, 256, 450411),
    "intel-aws-vgga-16": (16, 256, 370338), "intel-cddnn-16": (16, 1024, 39063),
}  # fmt: skip


def schedule(name: str) -> Schedule:
    return Schedule(load_recipe(name).recipe, IMAGENET)


def step_at(plan: Schedule, epoch: float) -> Step:
    """The first step at or after an epoch."""
    return plan[plan.step_after(epoch * IMAGENET)]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_its_files_name_a_description_and_a_complete_dump(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name).recipe
    assert recipe.name == name
    assert recipe.description
    assert recipe_source(name).startswith("#")
    path = tmp_path / "whole.yaml"
    path.write_text(yaml.safe_dump(recipe.as_dict()))
    again = load_recipe(str(path)).recipe
    assert (again, again.sha256()) == (recipe, recipe.sha256())


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_names_the_source_of_each_value_and_holds_its_system(name: str) -> None:
    header, (recipe, runtime) = recipe_source(name).split("\nname:")[0], load_recipe(name)
    assert "# Published" in header
    assert "# Chosen" in header
    assert re.search("arXiv|HPDC", header)
    assert runtime.unfit(recipe.virtual_workers) == []
    assert runtime.software is not None
    published = {row.software for row in read_rows() if row.devices == recipe.virtual_workers}
    assert load_software(runtime.software).name in published
    if name in INTEL:  # synchronous SGD, unaltered
        assert (runtime.update, runtime.model_parallel) == ("sharded", "auto")
        assert recipe.virtual_workers % recipe.column_blocks == 0
        assert (recipe.optimizer.name, recipe.optimizer.nesterov, recipe.rate.warmup) == ("sgd", False, None)
        # Exact sums have 4 bytes an element, as float32, and layers in column blocks need them.
        assert (recipe.precision, recipe.reduction, recipe.label_smoothing) == ("float32", "exact", 0)
        assert recipe.polish is None
    else:  # of ImageNet; only the reduction is needed for invariance
        parse_algorithm(runtime.allreduce, recipe.virtual_workers, runtime.grid_size)
        assert (recipe.data.train_images, recipe.data.eval_images, recipe.data.classes) == (IMAGENET, 50000, 1000)
        assert recipe.reduction != "exact"
        assert load_recipe(name, ["reduction=exact"]).recipe.reduction == "exact"


@pytest.mark.parametrize(("name", "workers", "batches", "steps", "top1"), [
    ("sony-224s", 2176, [34816, 69632], 2208, 0.7503),
    ("sony-122s", 3456, [27648, 55296], 2202, 0.7529),
    ("sony-85k", 2176, [34816, 69632, 87040], 2098, None),
    ("sony-119k", 2176, [34816, 69632, 87040, 121856], 1980, None),
    ("fujitsu-74s", 2048, [81920, 81920], 1440, 0.7508),
    ("fujitsu-62s", 3072, [86016, 86016], 1350, 0.7597),
    ("you-resnet50-20min", 2048, [32768], 3519, 0.754),
    ("you-resnet50-14min", 2048, [32768], 2503, 0.749),
    ("you-alexnet-11min", 1024, [32768], 3910, 0.586),
])  # fmt: skip
def test_workers_batches_steps_and_accuracy(name: str, workers: int, batches: list[int], steps: int, top1) -> None:
    plan = schedule(name)
    assert ([span.batch for span in plan.spans], len(plan)) == (batches, steps)
    assert (plan.recipe.virtual_workers, plan.recipe.target_top1) == (workers, top1)


# Rates of Fujitsu's code at the start of a pass (0 is the first).
FUJITSU_RATES = {0: 0.0, 10: 3.61, 36: 13.0, 45: 8.57, 60: 3.35, 75: 0.65, 80: 0.24, 85: 0.057, 86: 0.043, 88: 0.0325}


@pytest.mark.parametrize(("name", "steps_a_pass"), [("fujitsu-62s", 15), ("fujitsu-74s", 16)])
def test_fujitsu_is_what_its_code_does(name: str, steps_a_pass: int) -> None:
    plan = schedule(name)
    assert IMAGENET < plan[0].batch * steps_a_pass < 1.03 * IMAGENET
    for number, rate in FUJITSU_RATES.items():
        digits = 3 if 0 < rate < 0.1 else 2  # half a unit of the last that is published
        assert plan[number * steps_a_pass].lr == pytest.approx(rate, abs=0.5 * 0.1**digits * 1.02)
    for step in plan:
        passed = step.index / steps_a_pass
        falling = 0.9975 * (1 - min(1, max(passed - 36, 0) / 52)) ** 2.2 + 0.0025
        assert step.lr == pytest.approx(13 * (passed / 36 if passed < 36 else falling), rel=1e-9)
        # The rate multiplies weight decay already; a ramp of its own would count twice.
        assert (step.weight_decay_factor, step.augment) == (1.0, passed < 85)
    evaluate, optimizer = plan.recipe.evaluate, plan.recipe.optimizer
    assert [step / steps_a_pass for step in plan.boundaries(evaluate.every, evaluate.first)] == list(range(2, 91, 4))
    assert (optimizer.variant, optimizer.trust, optimizer.eps) == ("fujitsu", 0.0025, 1e-9)
    assert (optimizer.momentum, optimizer.weight_decay) == (0.96, 5e-5)


def test_sony_224s_rate_and_switch_keep_the_noise_scale() -> None:
    plan = schedule("sony-224s")
    assert plan[0].lr == pytest.approx(0.2)
    for step in plan:
        falling = (29 if step.batch == 34816 else 50) * (1 - step.epoch / 90) ** 2
        assert step.lr == pytest.approx(0.2 + 28.8 * step.epoch / 5 if step.epoch < 5 else falling, rel=1e-9)
    first_large = next(step for step in plan if step.batch == 69632)
    assert 30 <= first_large.epoch < 30 + 34816 / IMAGENET
    assert [span.momentum for span in plan.spans] == pytest.approx([0.9, 0.9162], abs=5e-5)
    scales = [span.lr * (IMAGENET / span.batch - 1) / (1 - span.momentum) for span in plan.spans]
    assert scales[0] == pytest.approx(scales[1], rel=1e-12)


def test_sony_122s_rate() -> None:
    plan = schedule("sony-122s")
    assert plan[0].lr == pytest.approx(1e-5)
    assert max(step.lr for step in plan) == pytest.approx(34, rel=0.002)
    assert step_at(plan, 62).lr == pytest.approx(34 * 0.5**2, rel=0.01)
    # The noise scale of a batch of 32,768 at the same rate with momentum 0.9.
    for span, batch in zip(plan.spans, (27648, 55296), strict=True):
        kept = 1 - 0.1 * (IMAGENET / batch - 1) / (IMAGENET / 32768 - 1)
        assert span.momentum == pytest.approx(kept, rel=1e-12)


@pytest.mark.parametrize("name", ["you-resnet50-20min", "you-resnet50-14min", "you-alexnet-11min"])
def test_you_rate_is_caffes_poly_after_a_quadratic_warmup(name: str) -> None:
    plan = schedule(name)
    warm = next(i for i in range(len(plan)) if plan[i + 1].lr < plan[i].lr) + 1
    assert warm * 32768 / IMAGENET == pytest.approx(10.2 if "alexnet" in name else 10, abs=0.05)
    assert plan[0].lr == 1.0
    assert plan[warm // 2].lr == pytest.approx(1 + 31 * 0.25, rel=0.02)
    for index in (warm, len(plan) // 2, len(plan) - 1):
        assert plan[index].lr == pytest.approx(32 * (1 - plan[index].start / plan.stop) ** 2, rel=0.01, abs=1e-3)


@pytest.mark.parametrize("name", ["sony-224s", "sony-122s"])
def test_the_other_readings_of_a_header_load(name: str) -> None:
    """A header gives the overrides of NNabla's own rules, and of the other reading of batch-size control."""
    found = load_recipe(name, re.findall(r"(?<!`)--set (\S+)", recipe_source(name))).recipe
    assert (found.optimizer.no_trust, found.optimizer.no_decay) == ((), ())
    assert (found.data.mean, found.data.augment.rotation) == ((0.5, 0.5, 0.5), 0.5)
    if name == "sony-224s":
        assert found.rate.warmup is not None
        assert found.stages[0].until == found.rate.warmup.length


@pytest.mark.parametrize("name", INTEL)
def test_intel_batches_are_those_of_the_paper(name: str) -> None:
    nodes, batch, steps = INTEL[name]
    recipe = load_recipe(name).recipe
    assert recipe.data.train_images is not None
    plan = Schedule(recipe, recipe.data.train_images)
    assert (recipe.virtual_workers, [span.batch for span in plan.spans], len(plan)) == (nodes, [batch], steps)
    # The planner's table of published results has the same system in it.
    (speed_up,) = re.findall(r", (\d+(?:\.\d)?)x$", recipe.description)
    row = (recipe.model.name, nodes, [batch // nodes], float(speed_up))
    assert row in [(row.model, row.devices, list(row.images), row.value) for row in read_rows()]


@pytest.mark.parametrize(("name", "rates", "momentum", "decay"), [
    ("intel-vgga-64", {0: 0.01, 18.4: 0.01, 18.5: 1e-3, 37: 1e-4, 55.5: 1e-5, 73.9: 1e-5}, 0.9, 5e-4),
    ("intel-overfeat-64", {0: 0.05, 29.9: 0.05, 30: 0.025, 50: 0.0125, 60: 0.00625, 70: 0.003125, 80: 0.0015625,
                           89: 0.0015625}, 0.6, 1e-5),
])  # fmt: skip
def test_rates_of_vgg_and_overfeat_fall_as_their_authors_had_them(name, rates, momentum: float, decay: float) -> None:
    plan = schedule(name)
    assert {epoch: step_at(plan, epoch).lr for epoch in rates} == pytest.approx(rates)
    assert (plan.recipe.optimizer.momentum, plan.recipe.optimizer.weight_decay) == (momentum, decay)


def test_no_recipe_of_vgg_differs_but_in_the_batch() -> None:
    assert load_recipe("intel-vgga-64").recipe.optimizer.no_decay == ()
    for name in ("intel-vgga-128", "intel-aws-vgga-16"):
        assert_same("data model rate optimizer evaluate", name, "intel-vgga-64")


def test_the_everyday_recipe_fits_1_to_8_gpus() -> None:
    recipe = load_recipe("resnet50-90ep").recipe
    assert [span.batch for span in schedule("resnet50-90ep").spans] == [1024, 2048, 4096]
    assert all(recipe.virtual_workers % ranks == 0 for ranks in (1, 2, 4, 8))
    assert max(stage.images_per_worker for stage in recipe.stages) <= 128


# MLPerf's reference points: batch, rate, warm-up, momentum, weight decay, images of a batch norm, epochs to 75.9 %.
POINTS = [
    (4096, 10, 5, 0.9, 2e-4, 64, 40.0), (8192, 17, 5, 0.9, 2e-4, 64, 42.0),
    (13056, 12.8, 9, 0.9, 2.5e-5, 204, 45.4), (32768, 21.2, 16, 0.94, 2.5e-5, 128, 56.0),
    (49152, 19.405, 24, 0.951807, 1e-4, 256, 68.0), (58880, 23.246, 29, 0.951807, 1e-4, 230, 79.9),
    (65536, 24.699, 31, 0.951807, 1e-4, 128, 84.5),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "lr", "warmup", "momentum", "decay", "images", "epochs"), POINTS)
def test_a_batch_picks_the_reference_points_values(batch: int, lr, warmup, momentum, decay, images, epochs) -> None:
    recipe = load_recipe("resnet50", [f"batch={batch}"]).recipe
    plan = Schedule(recipe, IMAGENET)
    assert (plan[0].batch, plan[0].images_per_worker, plan[0].momentum) == (batch, images, momentum)
    assert recipe.optimizer.weight_decay == decay
    assert max(step.lr for step in plan) == pytest.approx(lr, rel=0.01)
    assert step_at(plan, warmup / 2).lr == pytest.approx(lr / 2, rel=0.03)
    assert recipe.rate.decay.floor * lr == pytest.approx(1e-4, rel=0.02)
    assert 1.02 <= plan.stop / IMAGENET / epochs <= 1.07


def test_resnet50_in_37_epochs_is_nvidias_and_other_items_go_before_a_row() -> None:
    plan = schedule("resnet50")
    assert (plan[0].batch, len(plan)) == (3200, 14814)
    assert plan[len(plan) - 1].lr == pytest.approx(1e-4, rel=0.01)
    assert load_recipe("resnet50", ["batch=3200"]).recipe == plan.recipe
    assert load_recipe("resnet50", ["rate.lr=5.0", "batch=4096"]).recipe.rate.lr == 5.0
    for name, batch in (("resnet50", 5000), ("digits", 64)):
        refuses(f"batch {batch} of {name}", load_recipe, name, [f"batch={batch}"], about=f"batch = {batch}:")


def assert_same(keys: str, one: str, other: str) -> tuple[Recipe, Recipe]:
    """Two recipes, which are alike in some keys."""
    recipes = load_recipe(one).recipe, load_recipe(other).recipe
    for key in keys.split():
        assert getattr(recipes[0], key) == getattr(recipes[1], key), key
    return recipes


def test_recipes_of_fashion_differ_only_where_they_must_and_10_epochs_take_half_the_images() -> None:
    keys = "data model precision reduction evaluate target_top1"
    small, large = assert_same(keys, "fashion-plain-end", "fashion-large")
    assert_same(f"{keys} virtual_workers rate optimizer polish", "fashion", "fashion-plain-end")
    for one, other in zip(small.stages[-2:], large.stages[-2:], strict=True):
        assert (one.until, one.augment) == (other.until, other.augment)
    assert {span.batch for span in Schedule(small, 60000).spans} == {256}
    assert Schedule(large, 60000).spans[-1].batch == 4096
    both = assert_same("model virtual_workers optimizer precision reduction target_top1", "fashion", "fashion-10ep")
    full, half = (sum(step.batch for step in Schedule(recipe, 60000)) for recipe in both)
    assert half <= full / 2 + 256


def pixels(plan: Schedule, until: float) -> float:
    """Pixels of the run up to an epoch, in epochs at 224 pixels a side."""
    steps = [plan[index] for index in range(plan.step_after(until * IMAGENET))]
    return sum(step.batch * math.prod(step.sizes.sides) for step in steps) / (224 * 224 * IMAGENET)


def test_mosaicml_27_epochs_and_their_sizes() -> None:
    plan = schedule("resnet50-27ep")
    assert {span.batch for span in plan.spans} == {2048}
    # 0.32 of 90 epochs; 625 whole batches an epoch there, where each epoch's last 1,167 images are left out.
    assert len(plan) == math.ceil(28.8 * IMAGENET / 2048) == 18_017
    assert len(plan) == pytest.approx(28.8 * 625, rel=1e-3)
    assert plan.boundaries(plan.recipe.evaluate.every)[8] == plan.step_after(27 * IMAGENET)
    rates = [step_at(plan, epoch).lr for epoch in (0, 4, 8, 8 + 20.8 / 2)]
    assert rates == pytest.approx([0.0, 1.024, 2.048, 1.024], rel=1e-3)
    assert plan[len(plan) - 1].lr == pytest.approx(0, abs=1e-6)
    optimizer = plan.recipe.optimizer  # the decay is the decoupled one
    assert optimizer.weight_decay == pytest.approx(5e-4 * (1 - optimizer.momentum) / 2.048)
    assert optimizer.no_decay == ()
    for step in (plan[index] for index in range(0, len(plan), 50)):
        done = step.start / plan.stop
        scale = 0.5 + 0.5 * min(max((done - 0.4) / 0.4, 0), 1)
        assert step.sizes.sides[0] % 4 == 0
        assert abs(step.sizes.sides[0] - 176 * scale) <= 2.1
    assert [step_at(plan, epoch).sizes.sides[0] for epoch in (0, 11.5, 22.7, 22.8)] == [88, 88, 172, 176]
    assert pixels(plan, 28.8) / 28.8 == pytest.approx(0.33, abs=0.005)
    assert pixels(plan, 27) == pytest.approx(8.4, abs=0.05)


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
    assert plan.recipe.held_out_data.sizes.resize == round(256 / 0.875)
    longer = ["stages.0.until=32ep", "stages.1.until=40ep"]
    assert len(Schedule(load_recipe("resnet50-16ep", longer).recipe, IMAGENET)) == math.ceil(40 * IMAGENET / 4096)
