"""A folder as the Hugging Face hub takes it: a card with what was measured, the weights, and their configuration."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, as_user_error
from ..models import head_of
from ..recipe.section import sides
from ..report.page import Table, conditions_table, records_sha256, result_table, time_table, training_table
from ..report.read_run import RunRecord
from ..run.trained_weights import TrainedModel
from ..rundir.run_dir import RECORDS
from ..untrusted import is_there
from ..weights import replacing, weights_sha256, write_text

_NAMED = r"timm|hf:[\w./@-]+"  # names by which others find the data and the weights too


def write_hub_folder(run: RunRecord, trained: TrainedModel, folder: Path, license_name: str | None) -> list[str]:
    """Writes README.md, config.json, recipe.yaml, model.safetensors and the records of a finished run; their names.

    `license_name` is the hub's name of the weights' licence, such as apache-2.0; None: the card has none.
    """
    if not run.summary:
        raise UserError(f"{run.folder}: --format hub needs a finished run, whose accuracy and hash the card shows")
    if weights_sha256(trained.model.state_dict()) != run.summary.get("weights_sha256"):
        remedy = "put the run's own there, or train it again"
        raise UserError(f"{trained.path}: holds other weights than those that summary.json names; {remedy}")
    with as_user_error(f"--out {folder}: can't be written"):
        folder.mkdir(parents=True, exist_ok=True)
        copied = {"model.safetensors": trained.path}
        copied |= {name: run.folder / name for name in ("recipe.yaml", RECORDS) if is_there(run.folder / name)}
        for name, source in copied.items():
            with replacing(folder / name) as temporary:
                shutil.copyfile(source, temporary)
        write_text(folder / "config.json", json.dumps(configuration(trained), indent=2) + "\n")
        write_text(folder / "README.md", card(run, license_name))
    return ["README.md", "config.json", *copied]


def configuration(trained: TrainedModel) -> dict[str, Any]:
    data, name = trained.recipe.held_out_data, trained.recipe.model.name
    height, width = sides(data.image_size)
    head = {tensor.rpartition(".")[0] for tensor in head_of(trained.recipe, len(trained.classes))}
    return {
        "architecture": name.partition(":")[2] or name,
        "model_args": dict(trained.recipe.model.options),
        "num_classes": trained.recipe.data.classes or len(trained.classes),
        "label_names": list(trained.classes),
        "pretrained_cfg": {
            "input_size": [data.channels, height, width],
            "mean": list(data.mean),
            "std": list(data.std),
            "crop_pct": 1.0 if data.resize is None else crop_share(min(height, width), data.resize),
            "interpolation": "bilinear",  # as the accuracy on the card was measured; timm's own is bicubic
            "classifier": sorted(head),
        },
    }


def crop_share(side: int, resize: int) -> float:
    """The share of which timm's floor(side / share) is `resize`: 224 / (224 / 354) is below 354 in float64."""
    share = side / resize
    while math.floor(side / share) < resize:
        share = math.nextafter(share, 0)
    return share


def card(run: RunRecord, license_name: str | None) -> str:
    """README.md: front matter by the hub's rules, then a report's tables, and how to train the same again."""
    recipe, names = run.recipe, {"top1": "top-1 accuracy", "top5": "top-5 accuracy"}
    figures = {name: run.summary[key] for key, name in names.items() if key in run.summary}
    result = {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"name": recipe.data.source, "type": recipe.data.source},
        "metrics": [{"type": "accuracy", "name": name, "value": value} for name, value in figures.items()],
    }
    head: dict[str, Any] = {
        **({"license": license_name} if license_name else {}),
        "library_name": "torusgd",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "pytorch", "torusgd"],
        "model-index": [{"name": run.name, "results": [result]}],
    }
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    facts = (result_table([run]), training_table([run]), time_table([run]), conditions_table([run]))
    sections = [f"# {_cell(run.name)}", _cell(recipe.description or recipe.name), *map(_section, facts)]
    sections += ["## The same again", f"    {_command(run)}\n"]
    if records_sha256(run):
        sections += [
            "The last record stands for all hashes of the state that the run wrote in training. Whoever has its "
            "folder and the data computes some steps anew and compares:\n\n    torusgd verify RUN --sample 3\n"
        ]
    return f"---\n{front}---\n\n" + "\n\n".join(sections)


def _section(table: Table) -> str:
    rows = "\n".join(f"| {_cell(row.label)} | {_cell(row.cells[0])} |" for row in table.rows)
    return f"## {table.title}\n\n| | |\n| --- | --- |\n{rows}" + (f"\n\n{table.note}" if table.note else "")


def _command(run: RunRecord) -> str:
    """The command that trains the same elsewhere, with words for the paths of files."""
    words = ["torusgd train recipe.yaml"]
    for key, file in (("data", "PATH"), ("init", "WEIGHTS")):
        if given := run.status.get(key):
            words.append(f"--{key} {given if re.fullmatch(_NAMED, str(given)) else file}")
    if isinstance(steps := run.status.get("max_steps"), int):
        words.append(f"--max-steps {steps}")
    return " ".join(words)


def _cell(text: str) -> str:
    """Text of a stranger for Markdown: one line, no HTML, no table within a table."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
