"""Every field of a recipe is read: a change of each is seen in the plan, the events or the weights."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.run.runs import TINY, events, run_here
from torusgd.errors import RunError, UserError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import SIMULATED, Recipe
from torusgd.recipe.section import section_in
from torusgd.simulate import Setting, simulate

RESIZED = "data.augment={crop: resized, area: [0.3, 1.0], aspect: [0.75, 1.4]}"
STEPS = "rate.decay={shape: step, milestones: [2st], factor: 0.1}"
# A CPU computes float16 slowly.
HALF = ("precision=float16", "model.options={width: 4}")
# Images that must be cropped: 12 pixels a side, of which the recipe takes 8.
LARGER = "data.resize=12"
CUTOFF = "synchrony={form: cutoff, count: 2, warmup: 2, delays: exponential}"
THRESHOLD = "synchrony={form: cutoff, threshold: 1.5, warmup: 2, delays: exponential}"
# Keys of a summary in which the recipe's own hash is.
HASHED = ("recipe_sha256", "journal")
LOCAL = ["stages=[{until: 4st, images_per_worker: 6}]", "synchrony={form: local, local_steps: 1}"]

# A change a word: of a key of the recipe, with nothing set before.
SIMPLE = """
    name=other description='[/other]' seed=1 virtual_workers=3 loss=binary-cross-entropy clip_grad_norm=0.1
    label_smoothing=0.3 precision=bfloat16 memory_format=contiguous compile=true reduction=float16 arithmetic=2
    column_blocks=4 target_top1=0.5
    data.source=tests.run.sources:Half data.decoder=nvjpeg data.train_images=90 data.validation_images=20
    data.eval_images=20 data.image_size=10 data.channels=3 data.classes=5 data.mean=[0.4] data.std=[0.3]
    data.augment.shift=2 data.augment.rotation=0.5 data.augment.distortion=0.2 data.augment.brightness=0.2
    data.augment.contrast=1.5 data.augment.noise=0.1 data.augment.flip=0.0 data.augment.policy=trivialaugment
    data.augment.erase=0.5 data.augment.mixup=0.5 data.augment.cutmix=1.0 data.augment.repeats=2
    model.batch_norm_momentum=1.0 model.batch_norm_workers=each model.freeze=[conv1]
    noise_scale.exact=true noise_scale.batch=10 noise_scale.lr=2.0 noise_scale.momentum=0.8
    optimizer.bias_rate=2.0 optimizer.momentum=0.8 optimizer.weight_decay=0.1 optimizer.variant=tensorflow
    optimizer.trust=0.1 optimizer.eps=0.1 optimizer.no_trust=[] optimizer.head_lr=2.0 optimizer.layer_decay=0.5
    stages.0.until=1st stages.1.images_per_worker=4 stages.1.lr=2.0 stages.1.momentum=0.5 stages.1.resize=12
    stages.1.extra_pass=true stages.1.augment=false
    rate.lr=2.0 rate.warmup.length=2st rate.warmup.start=0.1 rate.decay.shape=cosine rate.decay.power=1.0
    rate.decay.floor=0.5 rate.decay.start=3st rate.decay.end=3st
    evaluate.every=1st evaluate.flip=true
    polish.steps=2 polish.images=16 polish.augment=true polish.images_per_batch=6
"""
# What must be set before, and the changes then.
AFTER: list[tuple[list[str], list[str]]] = [
    ([], [*SIMPLE.split(), "data.options={noise: 0.9}", LARGER, "model.options={dropout: 0.5}"]),
    ([RESIZED], ["data.pixels=portable", "data.augment.area=[0.2, 0.4]", "data.augment.aspect=[1.0, 3.0]"]),
    (["data.channels=3", "data.mean=[0.5, 0.5, 0.5]", "data.std=[0.2, 0.2, 0.2]", "data.augment.contrast=1.5"],
     ["data.augment.by_channel=true"]),
    (["data.augment.policy=randaugment"], ["data.augment.operations=1", "data.augment.magnitude=20"]),
    (["data.source=tests.run.sources:Torn"], ["data.max_replaced=1.0"]),
    (["average={half_life: 1st}"], ["average.half_life=3st", "average.every=2"]),
    (["rate.warmup.length=3st"], ["rate.warmup.shape=quadratic"]),
    ([STEPS], ["rate.decay.milestones=[3st]", "rate.decay.factor=0.5"]),
    (["optimizer={}"], ["optimizer.name=lars"]),
    (["optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}"], ["optimizer.nesterov=true"]),
    (["optimizer.weight_decay=0.1"], ["optimizer.no_decay=[]", "optimizer.ramp_weight_decay=true"]),
    (["optimizer={name: adamw}"], ["optimizer.beta2=0.9"]),
    ([*HALF], ["loss_scale.initial=1.0e+30"]),
    ([*HALF, "loss_scale.initial=256.0"], ["loss_scale.growth_interval=1"]),
    (["reduction=float16"], ["float32_norms=true"]),
    # Two threads wait busily for each other where processors are few.
    (["stages=[{until: 2st, images_per_worker: 3}]", "evaluate.every=null"], ["threads=2"]),
    (["evaluate.every=2st"], ["evaluate.first=1st"]),
    ([LARGER], ["evaluate.resize=10"]),
    # On some processors no library picks another kernel for another chunk, and the logits have the same bits.
    (["model={name: 'tests.run.sources:Counting'}"], ["evaluate.images_per_chunk=1"]),
    (["synchrony={form: backup, backups: 1, warmup: 2, delays: exponential}"], ["synchrony.backups=2"]),
    ([CUTOFF], ["synchrony.count=3", "synchrony.warmup=3"]),
    ([THRESHOLD], ["synchrony.threshold=2.5", "synchrony.delays='constant:0.1'"]),
    (["synchrony={form: sampled, sample: 1, staleness: 0}"], ["synchrony.sample=4", "synchrony.staleness=2"]),
    (LOCAL, ["synchrony.local_steps=2", "synchrony.outer.lr=1.0", "synchrony.outer.momentum=0.5",
             "synchrony.outer.nesterov=false"]),
    (["synchrony={form: elastic, pull_every: 1}"], ["synchrony.pull_every=2"]),
]  # fmt: skip
# Key of the recipe -> (what must be set before, the change), which begins with the key or with that of its section.
CHANGES: dict[str, tuple[list[str], str]] = {
    **{re.sub(r"\.\d+", "", each.partition("=")[0]): (own, each) for own, changes in AFTER for each in changes},
    "data.augment.crop": ([], "data.augment={crop: none, flip: 0.5}"),
    "model.name": ([], "model={name: fashion-net}"),
    "stages.image_size": ([], "stages.1={until: 4st, images_per_worker: 5, image_size: 6, resize: 6}"),
    "evaluate.image_size": ([], "evaluate={image_size: 10, resize: 12}"),
    "synchrony.form": (LOCAL[:1], LOCAL[1]),
    "synchrony.probability": ([], "synchrony={form: gossip, probability: 0.5}"),
}
# Overrides with which a run ends so: no GPU and no JPEGs are here, too many images are torn, unless all may be, the
# arithmetic has one version, and a mean has a value a channel.
ENDS: dict[str, type[Exception]] = {
    "data.source=tests.run.sources:Torn": RunError,
    **dict.fromkeys(("data.decoder=nvjpeg", "arithmetic=2", "data.channels=3"), UserError),
}


def leaves(model: type[BaseModel], path: str = "") -> list[str]:
    found = []
    for key, field in model.model_fields.items():
        inner = section_in(field.annotation)
        found += leaves(inner, f"{path}{key}.") if inner else [path + key]
    return found


def test_the_table_covers_every_field() -> None:
    assert set(CHANGES) == set(leaves(Recipe))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`seen`, once for runs that are alike: most keys are changed in the same one."""
    return cache(lambda *overrides: seen(tmp_path_factory.mktemp("run") / "out", *overrides))


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if key == "compile" else ()) for key in sorted(CHANGES)]
)
def test_a_changed_field_is_seen(key: str, runs: Callable[..., Any]) -> None:
    own, change = CHANGES[key]
    # Polish takes a third of so short a run, and each virtual worker as much as the first.
    quick = {"polish.": "polish=null", "synchrony.": "virtual_workers=2"}
    before = [*(each for part, each in quick.items() if not key.startswith(part)), *own]
    assert runs(*before) != runs(*before, change)


def seen(out: Path, *overrides: str) -> Any:
    """What a user sees of a run, without times and without the recipe's own hash."""
    if any(form in each for each in overrides for form in SIMULATED):
        recipe = load_recipe("digits", [*TINY, *overrides]).recipe
        return simulate(Setting(recipe, "", recipe.virtual_workers, "exponential", lr=0.1), images=48)
    try:
        summary, plan = run_here(out, *overrides)
    except tuple(ENDS[each] for each in overrides if each in ENDS) as error:
        return type(error), str(error)
    steps = [{k: v for k, v in event.items() if "seconds" not in k} for event in events(out)]
    result = {k: v for k, v in summary.items() if "second" not in k and "share" not in k and k not in HASHED}
    # These may change no bit; they are seen in the recipe that the run writes down.
    may_change_nothing = any(each.startswith(("memory_format", "compile")) for each in overrides)
    return plan, steps, result, (out / "recipe.yaml").read_text() if may_change_nothing else ""
