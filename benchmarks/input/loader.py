"""Threads against processes: our Loader with either, and torch's DataLoader, run one Pipeline over the same JPEG files.

    python -m benchmarks input loader [--workers 2] [--rounds 7]

Pictures as in decode.py. The consumer only takes the batches. The sides take turns within each round; each
starts its workers once, before the clock runs.

Needs: the extra images, and scikit-learn for its photographs.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import typer
from torch.utils.data import DataLoader, Dataset

from torusgd.data import Loader, Pipeline, Share, StreamOrder, open_sources
from torusgd.data.file_lists import make_here
from torusgd.data.loader import LoaderProcesses, open_pipeline
from torusgd.recipe.data_schema import Augment, Data

from ..record import sample
from .decode import PICTURES, SIZE, write_pictures

BATCH, BATCHES = 32, 12


class Batches(Dataset[torch.Tensor]):
    """Item i is the i-th batch of the stream."""

    def __init__(self, pipeline: Pipeline, order: StreamOrder) -> None:
        self.pipeline, self.order = pipeline, order

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.pipeline.training_batch(*self.order.at(number * BATCH, BATCH), augment=True).images


def images_per_second(run: Callable[[], int]) -> float:
    started = time.perf_counter()
    return run() / (time.perf_counter() - started)


def main(
    workers: int = 2,
    rounds: int = 7,
) -> None:
    torch.set_num_threads(1)
    data = Data(source="folder", image_size=SIZE, augment=Augment(crop="resized", flip=0.5))
    shares = [Share(number, 0, number * BATCH, BATCH, augment=True) for number in range(BATCHES)]
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), 375, 500, 90)
        source, _ = open_sources(data, Path(folder), seed=0)
        pipeline, order = Pipeline(source, data, 0), StreamOrder(PICTURES, 0)
        processes = DataLoader(Batches(pipeline, order), batch_size=None, num_workers=workers, persistent_workers=True)
        sides: dict[str, Callable[[], int]] = {"DataLoader": lambda: sum(len(images) for images in processes)}

        def add(name: str, loader: Loader) -> None:
            sides[name] = lambda: sum(len(loader.take(share, shares[share.step + 1 :]).images) for share in shares)

        for threads in sorted({1, workers}):
            add(f"{threads} thread{'s' if threads > 1 else ''}", Loader(pipeline, order, threads, 2 * workers))
        ours = LoaderProcesses(pipeline, partial(open_pipeline, Pipeline, data, Path(folder), 0, make_here), workers)
        add(f"{workers} loader_processes", Loader(ours, order, workers, 2 * workers))
        for run in sides.values():
            run()
        found = [{name: images_per_second(run) for name, run in sides.items()} for _ in range(rounds)]
        ours.close()
    print(f"{BATCHES} batches of {BATCH} JPEGs of 500 x 375, {workers} worker processes, {rounds} rounds")
    for name in sides:
        speeds = [speed[name] for speed in found]
        sample(f"{name}, images/s", speeds)
        ratio = statistics.median(speed[name] / speed["DataLoader"] for speed in found)
        low, high = min(speeds), max(speeds)
        print(f"{name:20} {statistics.median(speeds):7.0f} images/s ({low:.0f} to {high:.0f}), {ratio:.2f}")


if __name__ == "__main__":
    typer.run(main)
