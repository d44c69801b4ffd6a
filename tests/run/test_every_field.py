"""Every field of a recipe is read: a change of each is seen in the plan, the events or the weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from tests.run.runs import TINY, events, run_here
from torusgd.errors import RunError, UserError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import SIMULATED, Recipe
from torusgd.simulate import Setting, simulate

SGD = "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}"
RESIZED = "data.augment={crop: resized, area: [0.3, 1.0], aspect: [0.75, 1.4]}"
STEPS = "rate.decay={shape: step, milestones: [2st], factor: 0.1}"
RAND = "data.augment.policy=randaugment"
# A CPU computes float16 slowly.
HALF = ("precision=float16", "model.options={width: 4}", "virtual_workers=2")
# Images that must be cropped: 12 pixels a side, of which the recipe takes 8.
LARGER = "data.resize=12"
CUTOFF = "synchrony={form: cutoff, count: 2, warmup: 2, delays: exponential}"
THRESHOLD = "synchrony={form: cutoff, threshold: 1.5, warmup: 2, delays: exponential}"
BACKUP = "synchrony={form: backup, backups: 1, warmup: 2, delays: exponential}"
SAMPLED = "synchrony={form: sampled, sample: 1, staleness: 0}"
# Keys of a summary in which the recipe's own hash is.
HASHED = ("recipe_sha256", "journal")
LOCAL = ["stages=[{until: 4st, images_per_worker: 6}]", "synchrony={form: local, local_steps: 1}"]

# key of the recipe -> (what must be set before, the change)
CHANGES: dict[str, tuple[list[str], str]] = {
    "name": ([], "name=other"),
    "description": ([], "description=other"),
    "seed": ([], "seed=1"),
    "data.source": ([], "data.source=tests.run.sources:Half"),
    "data.decoder": ([], "data.decoder=nvjpeg"),
    "data.options": ([], "data.options={noise: 0.9}"),
    "data.train_images": ([], "data.train_images=90"),
    "data.validation_images": ([], "data.validation_images=20"),
    "data.eval_images": ([], "data.eval_images=20"),
    "data.image_size": ([], "data.image_size=10"),
    "data.resize": ([], LARGER),
    "data.pixels": ([RESIZED], "data.pixels=portable"),
    "data.channels": ([], "data.channels=3"),
    "data.classes": ([], "data.classes=5"),
    "data.mean": ([], "data.mean=[0.4]"),
    "data.std": ([], "data.std=[0.3]"),
    "data.augment.crop": ([], "data.augment={crop: none, flip: 0.5}"),
    "data.augment.shift": ([], "data.augment.shift=2"),
    "data.augment.area": ([RESIZED], "data.augment.area=[0.2, 0.4]"),
    "data.augment.aspect": ([RESIZED], "data.augment.aspect=[1.0, 3.0]"),
    "data.augment.rotation": ([], "data.augment.rotation=0.5"),
    "data.augment.distortion": ([], "data.augment.distortion=0.2"),
    "data.augment.brightness": ([], "data.augment.brightness=0.2"),
    "data.augment.contrast": ([], "data.augment.contrast=1.5"),
    "data.augment.noise": ([], "data.augment.noise=0.1"),
    "data.augment.by_channel": (
        ["data.channels=3", "data.mean=[0.5, 0.5, 0.5]", "data.std=[0.2, 0.2, 0.2]", "data.augment.contrast=1.5"],
        "data.augment.by_channel=true",
    ),
    "data.augment.flip": ([], "data.augment.flip=0.0"),
    "model.batch_norm_momentum": ([], "model.batch_norm_momentum=1.0"),
    "model.batch_norm_workers": ([], "model.batch_norm_workers=each"),
    "noise_scale.exact": ([], "noise_scale.exact=true"),
    "noise_scale.batch": ([], "noise_scale.batch=10"),
    "noise_scale.lr": ([], "noise_scale.lr=2.0"),
    "noise_scale.momentum": ([], "noise_scale.momentum=0.8"),
    "optimizer.bias_rate": ([], "optimizer.bias_rate=2.0"),
    "data.augment.policy": ([], "data.augment.policy=trivialaugment"),
    "data.augment.operations": ([RAND], "data.augment.operations=1"),
    "data.augment.magnitude": ([RAND], "data.augment.magnitude=20"),
    "data.augment.erase": ([], "data.augment.erase=0.5"),
    "data.augment.mixup": ([], "data.augment.mixup=0.5"),
    "data.augment.cutmix": ([], "data.augment.cutmix=1.0"),
    "data.augment.repeats": ([], "data.augment.repeats=2"),
    "data.max_replaced": (["data.source=tests.run.sources:Torn"], "data.max_replaced=1.0"),
    "model.name": ([], "model={name: fashion-net}"),
    "model.options": ([], "model.options={dropout: 0.5}"),
    "model.freeze": ([], "model.freeze=[conv1]"),
    "virtual_workers": ([], "virtual_workers=3"),
    "stages.until": ([], "stages.0.until=1st"),
    "stages.images_per_worker": ([], "stages.1.images_per_worker=4"),
    "stages.lr": ([], "stages.1.lr=2.0"),
    "stages.momentum": ([], "stages.1.momentum=0.5"),
    "stages.image_size": ([], "stages.1={until: 4st, images_per_worker: 5, image_size: 6, resize: 6}"),
    "stages.resize": ([], "stages.1.resize=12"),
    "average.half_life": (["average={half_life: 1st}"], "average.half_life=3st"),
    "average.every": (["average={half_life: 1st}"], "average.every=2"),
    "loss": ([], "loss=binary-cross-entropy"),
    "stages.extra_pass": ([], "stages.1.extra_pass=true"),
    "stages.augment": ([], "stages.1.augment=false"),
    "rate.lr": ([], "rate.lr=2.0"),
    "rate.warmup.length": ([], "rate.warmup.length=2st"),
    "rate.warmup.shape": (["rate.warmup.length=3st"], "rate.warmup.shape=quadratic"),
    "rate.warmup.start": ([], "rate.warmup.start=0.1"),
    "rate.decay.shape": ([], "rate.decay.shape=cosine"),
    "rate.decay.power": ([], "rate.decay.power=1.0"),
    "rate.decay.floor": ([], "rate.decay.floor=0.5"),
    "rate.decay.start": ([], "rate.decay.start=3st"),
    "rate.decay.end": ([], "rate.decay.end=3st"),
    "rate.decay.milestones": ([STEPS], "rate.decay.milestones=[3st]"),
    "rate.decay.factor": ([STEPS], "rate.decay.factor=0.5"),
    "optimizer.name": (["optimizer={}"], "optimizer.name=lars"),
    "optimizer.momentum": ([], "optimizer.momentum=0.8"),
    "optimizer.nesterov": ([SGD], "optimizer.nesterov=true"),
    "optimizer.weight_decay": ([], "optimizer.weight_decay=0.1"),
    "optimizer.no_decay": (["optimizer.weight_decay=0.1"], "optimizer.no_decay=[]"),
    "optimizer.ramp_weight_decay": (["optimizer.weight_decay=0.1"], "optimizer.ramp_weight_decay=true"),
    "optimizer.variant": ([], "optimizer.variant=tensorflow"),
    "optimizer.trust": ([], "optimizer.trust=0.1"),
    "optimizer.eps": ([], "optimizer.eps=0.1"),
    "optimizer.no_trust": ([], "optimizer.no_trust=[]"),
    "optimizer.beta2": (["optimizer={name: adamw}"], "optimizer.beta2=0.9"),
    "optimizer.head_lr": ([], "optimizer.head_lr=2.0"),
    "optimizer.layer_decay": ([], "optimizer.layer_decay=0.5"),
    "clip_grad_norm": ([], "clip_grad_norm=0.1"),
    "label_smoothing": ([], "label_smoothing=0.3"),
    "precision": ([], "precision=bfloat16"),
    "loss_scale.initial": ([*HALF], "loss_scale.initial=1.0e+30"),
    "loss_scale.growth_interval": ([*HALF, "loss_scale.initial=256.0"], "loss_scale.growth_interval=1"),
    "memory_format": ([], "memory_format=contiguous"),
    "compile": ([], "compile=true"),
    "reduction": ([], "reduction=float16"),
    "float32_norms": (["reduction=float16"], "float32_norms=true"),
    "arithmetic": ([], "arithmetic=2"),
    # Two threads wait busily for each other where processors are few.
    "threads": (["stages=[{until: 2st, images_per_worker: 3}]", "evaluate.every=null"], "threads=2"),
    "evaluate.every": ([], "evaluate.every=1st"),
    "evaluate.first": (["evaluate.every=2st"], "evaluate.first=1st"),
    "evaluate.image_size": ([], "evaluate={image_size: 10, resize: 12}"),
    "evaluate.resize": ([LARGER], "evaluate.resize=10"),
    "evaluate.flip": ([], "evaluate.flip=true"),
    # On some processors no library picks another kernel for another chunk, and the logits have the same bits.
    "evaluate.images_per_chunk": (["model={name: 'tests.run.sources:Counting'}"], "evaluate.images_per_chunk=1"),
    "column_blocks": ([], "column_blocks=4"),
    "synchrony.form": (LOCAL[:1], LOCAL[1]),
    "synchrony.backups": ([BACKUP], "synchrony.backups=2"),
    "synchrony.count": ([CUTOFF], "synchrony.count=3"),
    "synchrony.threshold": ([THRESHOLD], "synchrony.threshold=2.5"),
    "synchrony.warmup": ([CUTOFF], "synchrony.warmup=3"),
    "synchrony.delays": ([THRESHOLD], "synchrony.delays='constant:0.1'"),
    "synchrony.local_steps": (LOCAL, "synchrony.local_steps=2"),
    "synchrony.sample": ([SAMPLED], "synchrony.sample=4"),
    "synchrony.staleness": ([SAMPLED], "synchrony.staleness=2"),
    "synchrony.probability": ([], "synchrony={form: gossip, probability: 0.5}"),
    "synchrony.pull_every": (["synchrony={form: elastic, pull_every: 1}"], "synchrony.pull_every=2"),
    "synchrony.outer.lr": (LOCAL, "synchrony.outer.lr=1.0"),
    "synchrony.outer.momentum": (LOCAL, "synchrony.outer.momentum=0.5"),
    "synchrony.outer.nesterov": (LOCAL, "synchrony.outer.nesterov=false"),
    "target_top1": ([], "target_top1=0.5"),
    "polish.steps": ([], "polish.steps=2"),
    "polish.images": ([], "polish.images=16"),
    "polish.augment": ([], "polish.augment=true"),
    "polish.images_per_batch": ([], "polish.images_per_batch=6"),
}
# Overrides with which a run ends so: no GPU and no JPEGs are here, too many images are torn, unless all may be, the
# arithmetic has one version, and a mean has a value a channel.
ENDS: dict[str, type[Exception]] = {
    "data.decoder=nvjpeg": UserError,
    "data.source=tests.run.sources:Torn": RunError,
    "arithmetic=2": UserError,
    "data.channels=3": UserError,
}


def leaves(model: type[BaseModel], path: str = "") -> list[str]:
    found = []
    for key, field in model.model_fields.items():
        inner = next((m for m in _models(field.annotation)), None)
        found += leaves(inner, f"{path}{key}.") if inner else [path + key]
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in get_args(annotation) for m in _models(a)]


def test_the_table_covers_every_field() -> None:
    assert set(CHANGES) == set(leaves(Recipe))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`seen`, once for runs that are alike: most keys are changed in the same one."""

    @cache
    def run(*overrides: str) -> Any:
        return seen(tmp_path_factory.mktemp("run") / "out", *overrides)

    return run


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if key == "compile" else ()) for key in sorted(CHANGES)]
)
def test_a_changed_field_is_seen(key: str, runs: Callable[..., Any]) -> None:
    before, change = CHANGES[key]
    if not key.startswith("polish."):  # which takes a third of so short a run
        before = ["polish=null", *before]
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
