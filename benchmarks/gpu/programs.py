"""The training steps that benchmarks/gpu/gpu.py compares: the loops that people write, and torusgd's in its forms."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional as F

from torusgd.comm.base import Liveness
from torusgd.comm.groups import alone
from torusgd.data.pipeline import Batch
from torusgd.models import model_of
from torusgd.precision import arithmetic_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe
from torusgd.run.build import build
from torusgd.run.job import Job
from torusgd.run.open_data import Data, open_data
from torusgd.runtime import resolve_auto
from torusgd.step.journal import synchronous

from ..step.step_overhead import Ready

CLASSES = 1000
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Step = Callable[[int], object]


@dataclass(frozen=True)
class Program:
    """One kind of step: what makes it, torch's switches under which it runs, and changes that hold meanwhile."""

    make: Callable[[], Step]
    deterministic: bool = False
    times_algorithms: bool = False
    """whether cuDNN times its algorithms, as for those who write a loop by hand"""
    changes: Callable[[], AbstractContextManager[object]] = nullcontext


def make_recipe(args: argparse.Namespace, images: int, *changes: str, workers: int = 1) -> Recipe:
    """The model on synthetic images, `images` a pass."""
    overrides = [
        f"data={{source: synthetic, train_images: {max(256, images)}, eval_images: 8, image_size: {args.pixels}, "
        f"channels: 3, classes: {CLASSES}, mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}}",
        f"model={{name: {args.model}}}",
        "precision=auto",
        "memory_format=auto",
        f"virtual_workers={workers}",
        f"stages=[{{until: 1000st, images_per_worker: {images}}}]",
        "rate={lr: 0.01}",
        "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
        "evaluate={every: null, images_per_chunk: 8}",
        "polish=null",
        "target_top1=null",
        *changes,
    ]
    return resolve_auto(load_recipe("digits", overrides).recipe, args.device)


def data_of(args: argparse.Namespace, recipe: Recipe) -> tuple[Job, Data, Batch]:
    """A job, what it opens, and a batch as its loader gives it: for a GPU bytes in pinned memory."""
    job = Job(recipe, RuntimeOptions(), args.device, Path())
    data, indices = open_data(job, args.target, Liveness()), np.arange(recipe.stages[0].images_per_worker)
    return job, data, data.training.training_batch(indices, np.zeros(len(indices), int), augment=False)


def our_step(args: argparse.Namespace, images: int, *changes: str, workers: int = 1, **options: Any) -> Step:
    """The trainer's own step, put together as `torusgd train` does, but for the loader; `options` of the runtime."""
    recipe = make_recipe(args, images, *changes, workers=workers)
    with arithmetic_of(recipe):
        job, data, batch = data_of(args, recipe)
        data, job = replace(data, loader=Ready(batch)), replace(job, options=RuntimeOptions(**options))
        trainer = build(job, data, alone(args.target), Liveness())

    def step(index: int) -> None:
        with arithmetic_of(recipe):
            (trainer.ahead or trainer.step).run(trainer.membership, synchronous(index, workers))

    return step


def peer_step(args: argparse.Namespace, images: int, compiled: bool) -> Step:
    """What people write by hand; compiled with CUDA graphs, as torch's mode `reduce-overhead` has it."""
    recipe, device = make_recipe(args, images), args.target
    try:
        from torchvision.models import get_model

        model = get_model(args.model, weights=None, num_classes=CLASSES)
    except (ImportError, OSError, RuntimeError, ValueError):
        model = model_of(recipe, CLASSES)
    model = model.to(device, memory_format=torch.channels_last).train()
    # A run that is compiled forbids Inductor to time kernels, for the whole process; nobody's own loop does.
    options = {"deterministic": False, "triton.cudagraphs": args.device == "cuda"}
    network = torch.compile(model, options=options) if compiled else model
    dtype = DTYPES.get(recipe.precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler(args.device, enabled=dtype is torch.float16)
    _, _, batch = data_of(args, recipe)
    mean, std = (
        255 * torch.tensor(each, device=device).view(1, 3, 1, 1) for each in (recipe.data.mean, recipe.data.std)
    )

    def step(index: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        pixels = batch.images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        if pixels.dtype == torch.uint8:
            pixels = pixels.float().sub_(mean).div_(std)
        targets = batch.targets.to(device, non_blocking=True)
        with torch.autocast(args.device, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(network(pixels).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss.item()

    return step


def parts_left_out() -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """By the part of the GPU form what leaves it out, of a step that is made and taken inside; a GPU must be there."""
    from torusgd.cuda import form, run_ahead

    return {
        "captured passes": partial(_changed, (form, "pass_streams", lambda device, count: [])),
        "steps in advance": partial(_changed, (run_ahead, "AHEAD", 0)),
        "Triton's sums": _sums_by_torch(),
    }


def plain_changes() -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Changes of the plain step, by what they put in place of a part; a GPU must be there."""
    return {
        "torch's sums": _sums_by_torch(),
    }


def _sums_by_torch() -> Callable[[], AbstractContextManager[object]]:
    from torusgd.cuda import sums, triton_kernels

    names = ("add_gradients", "add_bounds", "add_statistics", "mean", "verdict")
    return partial(_changed, *((triton_kernels, name, getattr(sums, name)) for name in names))


@contextmanager
def _changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield
