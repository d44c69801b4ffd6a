"""A folder as the Hugging Face hub takes it: a card with what was measured, the weights, and their configuration."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, as_user_error
from ..recipe.section import sides
from ..report.read_run import RunRecord
from ..report.tables import batches, records_sha256
from ..run.trained_weights import TrainedModel
from ..rundir.run_dir import RECORDS
from ..text import count, duration, percent
from ..weights import replacing, write_text

_NAMED = r"timm|hf:[\w./@-]+"  # names by which others find the data and the weights too


def write_hub_folder(run: RunRecord, trained: TrainedModel, folder: Path, license_name: str | None) -> None:
    """Writes README.md, config.json, recipe.yaml, model.safetensors and the records of a finished run.

    `license_name` is the hub's name of the weights' licence, such as apache-2.0; None: the card has none. UserError if
    the run is not finished, or the folder, which is made if it is missing, can't be written.
    """
    if not run.summary:
        raise UserError(f"{run.folder}: --format hub needs a finished run, whose accuracy and hash the card shows")
    with as_user_error(f"--out {folder}: can't be written"):
        folder.mkdir(parents=True, exist_ok=True)
        copied = {"model.safetensors": trained.path}
        copied |= {name: run.folder / name for name in ("recipe.yaml", RECORDS) if (run.folder / name).is_file()}
        for name, source in copied.items():
            with replacing(folder / name) as temporary:
                shutil.copyfile(source, temporary)
        write_text(folder / "config.json", json.dumps(configuration(trained), indent=2) + "\n")
        write_text(folder / "README.md", card(run, license_name))


def configuration(trained: TrainedModel) -> dict[str, Any]:
    data, name = trained.recipe.held_out_data, trained.recipe.model.name
    height, width = sides(data.image_size)
    return {
        "architecture": name.partition(":")[2] or name,
        "model_args": dict(trained.recipe.model.options),
        "num_classes": trained.recipe.data.classes or len(trained.classes),
        "label_names": list(trained.classes),
        "pretrained_cfg": {
            "input_size": [data.channels, height, width],
            "mean": list(data.mean),
            "std": list(data.std),
            "crop_pct": 1.0 if data.resize is None else min(height, width) / data.resize,
        },
    }


def card(run: RunRecord, license_name: str | None) -> str:
    """README.md: front matter by the hub's rules, then what was trained, by which recipe, and how to repeat it."""
    summary, recipe = run.summary, run.recipe
    head: dict[str, Any] = {
        **({"license": license_name} if license_name else {}),
        "library_name": "torusgd",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "pytorch", "torusgd"],
        "model-index": [{"name": run.name, "results": [_result(recipe.data.source, summary)]}],
    }
    rows = {
        "top-1": percent(summary.get("top1")),
        "top-5": percent(summary.get("top5")),
        "held-out images": count(summary.get("eval_images")),
        "training images": count(summary.get("train_images")),
        "network": recipe.model.name,
        "data": recipe.data.source,
        "batch by stage": batches(recipe),
        "optimiser": f"{recipe.optimizer.name}, rate {recipe.rate.lr:g}",
        "steps": count(summary.get("steps")),
        "training time": f"{duration(summary.get('seconds'))} on {count(summary.get('world_size'))} ranks",
        "weights (SHA-256)": f"`{summary.get('weights_sha256')}`",
        "recipe (SHA-256)": f"`{recipe.sha256()}`",
        "data (SHA-256)": f"`{summary.get('data_sha256')}`",
        "initial weights (SHA-256)": str(summary.get("init_sha256") or "drawn from the seed"),
        "last record (SHA-256)": f"`{records_sha256(run) or 'none'}`",
    }
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    exact = (
        "With the same data and initial weights, and under the conditions below, the recipe gives the same weights bit "
        "for bit, on any number of ranks."
        if recipe.reduction == "exact"
        else f"Gradients are summed as {recipe.reduction}: the bits depend on the number of ranks."
    )
    conditions = "\n".join(
        f"- {name}: {_cell(str(value))}" for name, value in run.summary.get("conditions", {}).items()
    )
    checked = ""
    if records_sha256(run):
        checked = (
            "The last record stands for all hashes of the state that the run wrote in training. Whoever has its "
            "folder and the data computes some steps anew and compares:\n\n    torusgd verify RUN --sample 3\n\n"
        )
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return (
        f"---\n{front}---\n\n# {_cell(run.name)}\n\n{_cell(recipe.description or recipe.name)}\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n## The same again\n\n{exact}\n\n"
        f"    {_command(run)}\n\n{checked}## Conditions\n\n{conditions}\n"
    )


def _command(run: RunRecord) -> str:
    """The command that trains the same elsewhere, with words for the paths of files."""
    words = ["torusgd train recipe.yaml"]
    for key, file in (("data", "PATH"), ("init", "WEIGHTS")):
        if given := run.status.get(key):
            words.append(f"--{key} {given if re.fullmatch(_NAMED, str(given)) else file}")
    if isinstance(steps := run.status.get("max_steps"), int):
        words.append(f"--max-steps {steps}")
    return " ".join(words)


def _result(data: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    metrics = [
        {"type": "accuracy", "name": name, "value": summary[key]}
        for key, name in (("top1", "top-1 accuracy"), ("top5", "top-5 accuracy"))
        if key in summary
    ]
    return {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"name": data, "type": data},
        "metrics": metrics,
    }


def _cell(text: str) -> str:
    """Text of a stranger for Markdown: one line, no HTML, no table within a table."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
