"""Every kind of source of encoded images trains to the same weights on any number of ranks, which make the batches in
threads, or, where there is one rank, in processes."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.comm.gloo_world import run_ranks
from tests.data.pictures import write_folder
from tests.data.tables import write_lists, write_parquet
from tests.data.tars import write_shards
from tests.run.runs import train_on_ranks
from torusgd.comm.groups import group_of
from torusgd.data.tar_index import FILE, make_index, write_index
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions

RECIPE = (
    "virtual_workers=3",
    "stages=[{until: 3st, images_per_worker: 3}]",
    "rate={lr: 1.0, warmup: {length: 1st, start: 0.5}}",
    "evaluate={every: 2st, images_per_chunk: 4}",
    "polish={images_per_batch: 5}",
)
DATA = "image_size: 8, resize: 10, channels: 1, mean: [0.5], std: [0.25], augment: {crop: resized, flip: 0.5}"
CASES = {"tar": "shards", "csv": "folder", **({"parquet": "tables"} if find_spec("pyarrow") else {})}
"""by source: the folder of its images"""


def write_images(root: Path) -> None:
    write_shards(root / "shards")
    write_index(root / "shards" / FILE, make_index(root / "shards"))
    write_lists(write_folder(root / "folder"))
    if "parquet" in CASES:
        write_parquet(root / "tables")


def train_cases(images: str, out: str) -> None:
    ranks = group_of().size
    for source, folder in CASES.items():
        recipe = load_recipe("digits", [*RECIPE, f"data={{source: {source}, {DATA}}}"]).recipe
        recipe = recipe.resolve(precision="float32", memory_format="channels_last")
        options = RuntimeOptions(drift_every=1, loader_processes=2 if ranks == 1 else 0)
        train_on_ranks(Path(out) / source, recipe, options, data=Path(images) / folder)


def run_world(size: int, images: Path, out: Path) -> dict[str, Any]:
    if size == 1:
        train_cases(str(images), str(out))
    else:
        run_ranks(size, train_cases, str(images), str(out), timeout=200)
    summaries = {source: json.loads((out / source / "summary.json").read_text()) for source in CASES}
    keys = ("weights_sha256", "top1", "loss", "train_loss", "replaced_images")
    return {source: {key: summary[key] for key in keys} for source, summary in summaries.items()}


@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_same_bits_on_any_number_of_ranks(sizes: tuple[int, int], tmp_path: Path) -> None:
    write_images(tmp_path)
    one, other = (run_world(size, tmp_path, tmp_path / f"{size} ranks") for size in sizes)
    assert one == other
