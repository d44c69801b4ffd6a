"""The runs of a seed: all pairs of values that go together, each pair that does not, and rows at random beyond them."""

import random
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

from torusgd.comm.algorithms import parse_algorithm
from torusgd.errors import UserError
from torusgd.recipe.compatibility import Setup, fixed_ranks, refusals
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import Recipe

STEPS = 10
BASE = ("virtual_workers=6", "stages.0.until=6st", "stages.0.images_per_worker=2", "stages.1.images_per_worker=4",
        "evaluate.every=4st", "evaluate.images_per_chunk=20", "polish={images: 40}", "data.train_images=100",
        "data.eval_images=40", "target_top1=null")  # fmt: skip
"""changes of the recipe `digits` that all runs have, so that both stages are in the few steps"""
RUNTIME: dict[str, tuple[Any, ...]] = {
    "workers": (2, 3, 4),
    "allreduce": ("native", "ring", "direct", "halving-doubling", "torus", "auto"),
    "grid": (None, "2x2"),
    "streams": (None, 2),
    "buckets": (None, 0.05, "cubic"),
    "update": (None, "sharded"),
    "model_parallel": (None, 2, "auto"),
    "weights_first": (None, True),
    "checkpoint_every": ("1ep", "5st"),
    "checkpoint_minutes": (None, 0.005),
    "keep_checkpoints": (None, 1),
    "verify_every": (None, "8st"),
    "audit": (None, 0.3, 1.0),
    "shares": (None, "even", "speed"),
    "work_stealing": (None, True),
    "loader_processes": (None, 1, 2),
    "mixed": (None, True),
    "drift_every": (None, 0, 3),
    "cuda_graphs": (None, True),
    "cuda_streams": (None, 2),
    "track": (None, "[tensorboard]"),
}
"""values of the runtime options; None: left out"""
NO_OPTION = {
    "device": "no GPU", "ranks_per_gpu": "no GPU", "workers_range": "the event join gives it", "software": "plans",
    "profile": "a file of torusgd tune", "node_memory": "torchrun", "timeout": "4 s in all runs",
    "start_timeout": "for starts that hang",
}  # fmt: skip
RECIPE: dict[str, tuple[str, ...]] = {
    "seed": ("", "seed=7"),
    "images": ("", "data.train_images=91;data.eval_images=37", "data.resize=10;data.image_size=10"),
    "pixels": ("", "data.pixels=portable"),
    "crop": ("", "data.augment.crop=none;data.augment.shift=0",
             "data.augment.crop=resized;data.augment.shift=0;data.augment.area=[0.5, 1.0];"
             "data.augment.aspect=[0.8, 1.25]"),
    "flip": ("", "data.augment.flip=0.5", "data.augment.flip=alternating"),
    "pictures": ("", "data.augment.rotation=0.2;data.augment.distortion=0.2", "data.augment.policy=trivialaugment",
                 "data.augment.policy=randaugment;data.augment.operations=1;data.augment.magnitude=5",
                 "data.augment.brightness=0.2;data.augment.contrast=1.2;data.augment.noise=0.1;"
                 "data.augment.by_channel=true"),
    "erase": ("", "data.augment.erase=0.3"),
    "mix": ("", "data.augment.mixup=0.2", "data.augment.cutmix=0.5"),
    "repeats": ("", "data.augment.repeats=2"),
    "norm": ("", "model.batch_norm_momentum=0.3", "model.batch_norm_workers=each"),
    "freeze": ("", "model.freeze=['*bias']"),
    "virtual_workers": ("", "virtual_workers=7"),
    "stages": ("", "stages.0.augment=false", "stages.0.extra_pass=true", "stages.1.lr=linear"),
    "rate": ("", "rate.warmup=null", "rate.decay={shape: cosine, floor: 0.1}",
             "rate.decay={shape: step, milestones: [5st], factor: 0.5}"),
    "noise_scale": ("", "noise_scale.exact=true"),
    "optimizer": ("", "optimizer={name: sgd, nesterov: true, weight_decay: 0.0001, no_decay: []};rate.lr=0.1",
                  "optimizer={name: adamw, beta2: 0.99, layer_decay: 0.9};rate.lr=0.001;stages.1.momentum=null",
                  "optimizer={name: lamb, no_trust: []};rate.lr=0.001;stages.1.momentum=null",
                  "optimizer.variant=fujitsu;optimizer.bias_rate=2.0;optimizer.head_lr=2.0",
                  "optimizer.variant=larc-clip;optimizer.eps=0;optimizer.ramp_weight_decay=true"),
    "clip_grad_norm": ("", "clip_grad_norm=1.0"),
    "average": ("", "average={half_life: 5st}", "average={half_life: 3st, every: 2}"),
    "loss": ("", "loss=binary-cross-entropy", "label_smoothing=0.0"),
    "precision": ("", "precision=bfloat16", "precision=portable", "precision=float16;loss_scale.growth_interval=4"),
    "memory_format": ("", "memory_format=channels_last", "memory_format=contiguous"),
    "reduction": ("", "reduction=float32", "reduction=bfloat16"),
    "float32_norms": ("", "float32_norms=true"),
    "threads": ("", "threads=2"),
    "synchrony": ("", "synchrony={form: local, local_steps: 2}", "synchrony={form: stale, staleness: 1}",
                  "synchrony={form: backup, backups: 2, delays: lognormal}",
                  "synchrony={form: cutoff, threshold: 1.5, delays: lognormal}"),
    "evaluate": ("", "evaluate.every=4st;evaluate.first=2st", "evaluate.flip=true;evaluate.images_per_chunk=17"),
    "column_blocks": ("", "column_blocks=2"),
    "target_top1": ("", "target_top1=0.05"),
    "polish": ("", "polish=null", "polish={steps: 2}", "polish={images: 50, images_per_batch: 15}"),
}  # fmt: skip
"""changes of the recipe's keys, several apart by semicolons; the first value is no change"""
NO_KEY = {
    "name": "a name", "description": "a text", "arithmetic": "has one value", "data.source": "is digits",
    "data.options": "of digits: none", "data.decoder": "digits are not decoded", "data.classes": "those of digits",
    "data.channels": "those of digits", "data.mean": "of digits", "data.std": "of digits",
    "data.max_replaced": "no image is broken", "model.name": "digits-net", "model.options": "of digits-net", 
    "compile": "takes a minute a run",
}  # fmt: skip
"""keys that no run changes"""
EVENTS = ("none", "kill", "forkserver", "loader", "tracker", "freeze", "pause", "slow disk", "stop", "resize", "join")
AXES: dict[str, tuple[Any, ...]] = {**RUNTIME, **RECIPE}
Row = dict[str, Any]
"""a value of each axis"""
Pair = tuple[tuple[str, Any], tuple[str, Any]]
PLAIN: Row = {axis: values[0] for axis, values in AXES.items()}


class Draw(NamedTuple):
    """One run."""

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    row: Row
    event: str

    @property
    def refusal(self) -> list[str]:
        """The lines with which it may be refused; none: it must end with the weights of the plain run."""
        return refused(self.row, self.event == "join")


def recipe_changes(row: Row) -> list[str]:
    """What `--set` gets for the recipe."""
    return [*BASE, *(change for axis in RECIPE for change in row[axis].split(";") if change)]


def options_of(row: Row) -> dict[str, Any]:
    """The runtime options that are given, beside the number of ranks."""
    given = {key: row[key] for key in RUNTIME if key != "workers" and row[key] is not None}
    return given | {"timeout": 4}


@cache
def _load(changes: tuple[str, ...]) -> "tuple[Recipe, Any] | str":
    try:
        return load_recipe("digits", [*changes])
    except UserError as error:
        return str(error)


def refused(row: Row, listens: bool = False) -> list[str]:
    """The lines of the project's own table for a row; empty: it must run."""
    setup = _setup(row, listens)
    return [setup] if isinstance(setup, str) else refusals(setup)


def _setup(row: Row, listens: bool = False) -> Setup | str:
    """What the table takes; a line if the recipe, or one option by itself, is refused."""
    recipe = _load(tuple(recipe_changes(row)))
    both = _load((*BASE, *(f"runtime.{key}={value}" for key, value in options_of(row).items())))
    for found in (recipe, both):
        if isinstance(found, str):
            return found
    assert isinstance(recipe, tuple)
    assert isinstance(both, tuple)
    # What a recipe's runtime block gives for another number of ranks is left out, with a line that says so.
    options = both[1].without(both[1].unfit(row["workers"]))
    if listens:
        options = options.model_copy(update={"workers_range": (3, 4)})
    try:
        if options.allreduce not in ("native", "auto"):
            parse_algorithm(options.allreduce, row["workers"], options.grid_size)
    except UserError as error:
        return str(error)
    return Setup(recipe[0], options, "cpu", row["workers"], listens=listens)


def pairs(row: Mapping[str, Any]) -> set[Pair]:
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def covering(rng: random.Random) -> Iterator[Row]:
    """Rows with every pair of values in one that runs, and each pair that is refused alone in one that is refused.

    The greedy method of AETG (Cohen et al. 1997, "The AETG system", section 4): a row begins with a pair that is left,
    and takes axis after axis the value with the most pairs that are left, here among those that are not refused.
    """
    alone = {(axis, value) for axis in AXES for value in AXES[axis] if _way({axis: value}) is None}
    yield from (PLAIN | dict([one]) for one in sorted(alone, key=repr))
    left = {
        ((a, x), (b, y))
        for a, b in combinations(sorted(AXES), 2) for x in AXES[a] for y in AXES[b]
        if (a, x) not in alone and (b, y) not in alone
    }  # fmt: skip
    for pair in sorted(left, key=lambda each: (rng.random(), repr(each))):
        if pair not in left:
            continue
        fixed = _way(dict(pair))
        left.discard(pair)
        if fixed is None:
            yield PLAIN | dict(pair)
            continue
        row = PLAIN | fixed
        for axis in rng.sample(sorted(set(AXES) - set(fixed)), len(AXES) - len(fixed)):
            news = {value: sum(_pair((axis, value), item) in left for item in fixed.items()) for value in AXES[axis]}
            for value in sorted(AXES[axis], key=lambda v: (-news[v], rng.random())):
                if (axis, value) not in alone and not refused(row | {axis: value}):
                    row[axis] = fixed[axis] = value
                    break
        left -= pairs(row)
        yield row


def _way(wanted: Row) -> Row | None:
    """Values with which some others run, such as an all-reduce for a grid; None: they are refused in all ways."""
    ways = (
        {"workers": workers, "allreduce": name, "column_blocks": blocks} | wanted
        for workers in (2, 4) for name in ("native", "ring", "torus") for blocks in RECIPE["column_blocks"]
    )  # fmt: skip
    return next((way for way in [wanted, *ways] if not refused(PLAIN | way)), None)


def _pair(one: tuple[str, Any], other: tuple[str, Any]) -> Pair:
    return (one, other) if one[0] < other[0] else (other, one)


def draws(seed: int, count: int) -> list[Draw]:
    """The first runs of a seed: the covering rows, then rows with one of their recipes and other options and events."""
    rng = random.Random(seed)
    rows = [*covering(rng)]
    good = [row for row in rows if not refused(row)]
    while len(rows) < count:
        row = dict(rng.choice(good))
        for axis in RUNTIME:
            value = rng.choice(AXES[axis]) if rng.random() < 0.4 else row[axis]
            if not refused(row | {axis: value}):
                row[axis] = value
        # Each process that makes batches imports torch, which takes longer than all that is tried here.
        if rng.random() < 0.8:
            row["loader_processes"] = None
        rows.append(row)
    return [Draw(index, row, _event(row, rng)) for index, row in enumerate(rows)]


def _event(row: Row, rng: random.Random) -> str:
    """One that can strike a row."""
    if refused(row) or rng.random() >= 0.55:
        return "none"
    event = "loader" if row["loader_processes"] and rng.random() < 0.4 else rng.choice(EVENTS[1:])
    setup = _setup(row)
    assert isinstance(setup, Setup)
    if (event == "loader" and not row["loader_processes"]) or (event == "resize" and fixed_ranks(setup)):
        return "kill"
    return "stop" if event == "join" and refused(row, listens=True) else event
