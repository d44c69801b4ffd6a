"""The runs of a seed: a covering array of all pairs of values, shuffled values beyond it, and what each run must do."""

import random
from typing import Any, NamedTuple

from allpairspy import AllPairs

from torusgd.recipe.compatibility import Setup, refusals
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions

EVENTS = ("none", "kill", "forkserver", "freeze", "stop", "resize")
"""what happens to a run: SIGKILL of a rank or of the fork server, SIGSTOP of a rank, SIGTERM and a resume, new ranks"""
RUNTIME: dict[str, tuple[Any, ...]] = {
    "workers": (2, 3, 4),
    "allreduce": ("native", "ring", "direct", "halving-doubling", "auto"),
    "streams": (1, 2),
    "buckets": ("auto", "0.05", "cubic"),
    "update": ("replicated", "sharded"),
    "model_parallel": ("1", "auto", "2"),
    "weights_first": (False, True),
    "checkpoint_every": ("1ep", "5st"),
    "keep_checkpoints": (2, 1),
    "verify_every": (None, "8st"),
    "audit": (0.0, 0.3, 1.0),
    "shares": (None, "even", "speed"),
    "work_stealing": (False, True),
    "loader_processes": (0, 1, 2),
    "mixed": (False, True),
    "drift_every": (None, 0, 3),
}
"""values of the runtime options; None: the option is left out"""
RECIPE: dict[str, tuple[Any, ...]] = {
    "optimizer": ("lars", "sgd", "adamw", "lamb"),
    "clip_grad_norm": (None, "1.0"),
    "model.freeze": (None, "['*bias']"),
    "model.batch_norm_workers": (None, "each"),
    "column_blocks": (None, "2"),
    "precision": (None, "bfloat16", "portable"),
    "reduction": (None, "float32"),
    "synchrony": (None, "{form: local, local_steps: 2}", "{form: backup, backups: 2, delays: lognormal}"),
    "polish": (None, "null", "{images: 100}", "{steps: 2}"),
    "average": (None, "{half_life: 5st}"),
    "evaluate.every": (None, "4st"),
    "evaluate.flip": (None, "true"),
    "data.augment.mixup": (None, "0.2"),
    "data.augment.flip": (None, "alternating"),
    "label_smoothing": (None, "0.0"),
    "memory_format": (None, "channels_last"),
}
"""values of the recipe's keys; None: as in digits"""
_OPTIMIZERS = {
    "lars": {},
    "sgd": {"optimizer": "{name: sgd}", "rate.lr": "0.1"},
    "adamw": {"optimizer": "{name: adamw}", "rate.lr": "0.001"},
    "lamb": {"optimizer": "{name: lamb}", "rate.lr": "0.001"},
}
AXES = {**RUNTIME, **RECIPE, "event": EVENTS}
NO_AXIS = {
    "device": "there is no GPU", "cuda_graphs": "there is no GPU", "cuda_streams": "there is no GPU",
    "ranks_per_gpu": "there is no GPU", "workers_range": "--workers MIN:MAX gives it", "software": "plans only",
    "grid": "fits one number of ranks", "profile": "a file of torusgd tune", "track": "needs other packages",
    "node_memory": "under torchrun only", "checkpoint_minutes": "minutes", "timeout": "the same in all runs",
    "start_timeout": "seconds of a start",
}  # fmt: skip
"""runtime options that no run draws, and why"""


class Draw(NamedTuple):
    """One run."""

    index: int
    values: dict[str, Any]  # by axis

    @property
    def changes(self) -> list[str]:
        """Arguments of --set."""
        chosen = {key: self.values[key] for key in RECIPE if key != "optimizer" and self.values[key] is not None}
        return [f"{key}={value}" for key, value in (_OPTIMIZERS[self.values["optimizer"]] | chosen).items()]

    @property
    def options(self) -> dict[str, Any]:
        """Runtime options that are given, the short liveness limit among them."""
        given = {key: self.values[key] for key in RUNTIME if self.values[key] is not None}
        return {key: value for key, value in given.items() if value is not False} | {"timeout": 10}

    def refusal(self) -> list[str]:
        """The lines with which the table of compatibility refuses the run; empty if it must end with the weights."""
        try:
            recipe = load_recipe("digits", self.changes)[0]
        except Exception as error:
            return [str(error)]
        options = RuntimeOptions.model_validate({k: v for k, v in self.options.items() if k != "workers"})
        return refusals(Setup(recipe, options, ranks=self.values["workers"]))


def draws(seed: int, count: int) -> list[Draw]:
    """The first runs of a seed: every pair of values, in an order of their own, then values at random."""
    rng = random.Random(seed)
    # Half of the runs have no event, in which all the others share equally: an array alone would have them all alike.
    axes = {key: rng.sample(values, len(values)) for key, values in AXES.items()}
    rows = [dict(zip(axes, row, strict=True)) for row in AllPairs(list(axes.values()))]
    while len(rows) < count:
        # Mostly defaults, so that most of these runs are not refused.
        row = {key: values[0] if rng.random() < 0.75 else rng.choice(values) for key, values in AXES.items()}
        row["workers"] = rng.choice(RUNTIME["workers"])
        row["event"] = rng.choice(EVENTS[1:]) if rng.random() < 0.6 else "none"
        rows.append(row)
    return [Draw(index, row) for index, row in enumerate(rows[:count])]


def pairs(values: dict[str, Any]) -> set[tuple[str, str]]:
    """The pairs of values in a run, each value with its axis."""
    words = sorted(f"{key}={value}" for key, value in values.items())
    return {(a, b) for i, a in enumerate(words) for b in words[i + 1 :]}
