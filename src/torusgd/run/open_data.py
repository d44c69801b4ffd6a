"""The images of a run on one rank: found, opened, and read ahead by threads or processes."""

from dataclasses import dataclass

import torch

from ..comm.base import Liveness
from ..data.loader import Loader
from ..data.loader_processes import LoaderProcesses, Opener
from ..data.nvjpeg import decode_on_gpu
from ..data.order import StreamOrder
from ..data.pipeline import Pipeline, allocate_by_torch
from ..data.registry import open_sources
from ..data.to_device import BytePipeline, allocate_pinned, can_normalise_later
from ..recipe.compatibility import LOADER_PROCESSES, NVJPEG, check
from ..runtime import loader_threads
from .host_share import HostShare, KeptArrays, MappedArrays
from .job import Job, images_at, setup_of


@dataclass(frozen=True)
class Data:
    """The images of a run; they know of no ranks, and so stay open when the ranks change."""

    training: Pipeline
    held_out: Pipeline
    loader: Loader
    processes: LoaderProcesses | None
    """makers of the loader's batches; None: its threads make them"""

    def close(self) -> None:
        """Ends threads and processes."""
        self.loader.close()
        if self.processes is not None:
            self.processes.close()


def find_images(job: Job) -> KeptArrays:
    """What there is of a job's images, found by a process that starts ranks; UserError where they can't be used."""
    kept = KeptArrays()
    open_sources(job.recipe.data, job.data, job.recipe.seed, kept)
    return kept


def open_data(job: Job, device: torch.device, liveness: Liveness, once: MappedArrays | HostShare | None = None) -> Data:
    """Opens the images of a job, which may take a while; UserError where they can't be used.

    Args:
        job: Whose images.
        device: Of this rank.
        liveness: Learns for what this rank waits.
        once: Gives the lists of images; None: this process makes them.
    """
    check(setup_of(job, device=device.type), {NVJPEG, LOADER_PROCESSES})
    recipe, once = job.recipe, once or MappedArrays()
    liveness.outside("the list of images", images_at(job))
    train, held_out = open_sources(recipe.data, job.data, recipe.seed, once)
    if recipe.data.decoder == "nvjpeg":
        train, held_out = decode_on_gpu((train, held_out), device)
    is_gpu = device.type == "cuda"
    make = BytePipeline if is_gpu and can_normalise_later(recipe.data.augment) else Pipeline
    allocate = allocate_pinned if is_gpu else allocate_by_torch
    training = make(train, recipe.data, recipe.seed, allocate)
    processes, threads = None, loader_threads(device)
    if job.options.loader_processes:
        threads = job.options.loader_processes  # each of which waits for a process
        opener = Opener(make, recipe.data, job.data, recipe.seed, MappedArrays(once.paths))
        processes = LoaderProcesses(training, opener, threads)
    order = StreamOrder(len(train), recipe.seed, recipe.data.augment.repeats)
    loader = Loader(processes or training, order, threads=threads, ahead=threads + 3)
    evaluated = (BytePipeline if is_gpu else Pipeline)(held_out, recipe.held_out_data, recipe.seed, allocate)
    return Data(training, evaluated, loader, processes)
