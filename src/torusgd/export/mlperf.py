"""A finished run as a log by MLPerf's rules for training, version 4.0.0, the last with ResNet-50.

`python -m mlperf_logging.compliance_checker --usage training --ruleset 4.0.0 LOG` reads it. It shows that a recipe
keeps the rules; a submission needs more than it holds.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError, as_user_error
from ..recipe.schedule import Schedule
from ..report.read_run import RunRecord
from ..weights import write_text


def write_mlperf_log(run: RunRecord, path: Path, division: str) -> None:
    """Writes the log of a finished run, trained with sgd or lars; `division` is closed or open."""
    if not run.summary or not run.evaluations:
        raise UserError(f"{run.folder}: --format mlperf needs a finished run")
    if run.recipe.optimizer.name not in ("sgd", "lars"):
        raise UserError(f"{run.folder}: MLPerf's rules know sgd and lars, not {run.recipe.optimizer.name}")
    try:
        # The summary is written at the end, and its own clock says how long before that the run began.
        begin = (run.folder / "summary.json").stat().st_mtime - float(run.summary["seconds"])
        # Of a run that was stopped and went on, what lay between counts as its setting up.
        setup = max(0.0, begin - (run.folder / "recipe.yaml").stat().st_mtime)
        text = "".join(_lines(run, division, begin, setup))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run.folder}: its summary or events are damaged: {type(error).__name__} {error}") from None
    with as_user_error(f"{path}: can't be written"):
        write_text(path, text)


def _lines(run: RunRecord, division: str, begin: float, setup: float) -> Iterator[str]:
    """The log's lines; seconds in it count from the training's begin, and `setup` seconds lay before that."""

    def line(kind: str, key: str, value: Any, seconds: float, metadata: dict[str, Any]) -> str:
        tree = {
            "namespace": "", "time_ms": round(1e3 * (begin + seconds)), "event_type": kind, "key": key, "value": value,
            "metadata": {"file": "events.jsonl", "lineno": 0, **metadata},
        }  # fmt: skip
        return f":::MLLOG {json.dumps(tree)}\n"

    def point(key: str, value: Any, seconds: float = 0.0, **metadata: Any) -> str:
        return line("POINT_IN_TIME", key, value, seconds, metadata)

    def interval(kind: str, key: str, seconds: float, **metadata: Any) -> str:
        return line(f"INTERVAL_{kind}", f"{key}_{kind.lower().replace('end', 'stop')}", None, seconds, metadata)

    about = {"benchmark": "resnet", "org": "torusgd", "division": division, "status": "onprem", "platform": "torusgd"}
    yield from (point(f"submission_{key}", value, -setup) for key, value in about.items())
    yield point("cache_clear", False, -setup)  # the checker wants the line; nothing clears the machine's caches
    yield interval("START", "init", -setup)
    yield from (point(key, value, -setup) for key, value in _hyperparameters(run).items())
    yield interval("END", "init", 0.0)
    yield interval("START", "run", 0.0)
    yield point("train_samples", run.summary["train_images"])
    yield point("eval_samples", run.summary["eval_images"])
    before, reached = 0.0, 0.0
    seconds_at = {step["step"]: float(step["seconds"]) for step in run.steps}
    target = run.recipe.target_top1
    has_reached = target is None or any(event["top1"] >= target for event in run.evaluations)
    status = "success" if has_reached else "aborted"
    for event in run.evaluations:
        epoch = round(run.epochs.get(event["step"], 0.0), 3)
        trained = before
        if event["event"] != "polished":  # which is evaluated once more, behind no other block
            trained = seconds_at[event["step"]]
            yield interval("START", "block", before, first_epoch_num=reached, epoch_count=max(epoch - reached, 1e-3))
            yield interval("END", "block", trained, first_epoch_num=reached)
        yield interval("START", "eval", trained, epoch_num=epoch)
        yield point("eval_accuracy", event["top1"], event["seconds"], epoch_num=epoch)
        yield interval("END", "eval", event["seconds"], epoch_num=epoch)
        before, reached = event["seconds"], epoch
    # Its seconds were taken a moment before those of the polished weights' evaluation.
    yield interval("END", "run", max(before, float(run.summary["seconds"])), status=status)


def _hyperparameters(run: RunRecord) -> dict[str, Any]:
    """What the rules want to know, as the recipe has it; of several stages the first one's batch."""
    recipe, summary = run.recipe, run.summary
    optimizer, rate = recipe.optimizer, recipe.rate
    schedule = Schedule(recipe, summary["train_images"])
    warm = 0 if rate.warmup is None else schedule.position(rate.warmup.length)
    warm_steps, warm_epochs = schedule.step_after(warm), float(warm / summary["train_images"])
    first = recipe.stages[0].images_per_worker
    common = {
        "base_learning_rate": rate.lr,
        "end_learning_rate": round(rate.lr * rate.decay.floor, 12),
        "learning_rate_decay_steps": len(schedule) - warm_steps,
        "weight_decay": optimizer.weight_decay,
        "momentum": optimizer.momentum,
    }
    if rate.decay.shape == "polynomial":
        common["learning_rate_decay_poly_power"] = rate.decay.power
    found = {f"{optimizer.name}_opt_{key}": value for key, value in common.items()}
    if optimizer.name == "lars":
        found |= {"lars_epsilon": optimizer.eps, "lars_opt_learning_rate_warmup_epochs": warm_epochs}
    else:
        found |= {"opt_learning_rate_warmup_epochs": warm_epochs, "model_bn_span": first}
    return {
        "seed": recipe.seed,
        "global_batch_size": recipe.virtual_workers * first,
        "gradient_accumulation_steps": -(-recipe.virtual_workers // summary["world_size"]),
        "opt_name": optimizer.name,
        **found,
    }
