"""All that is to be known of one GPU, in one run of under ten minutes; raw figures as JSON, and a section of the docs.

    python -m benchmarks gpu gpu                                       on a GPU
    python -m benchmarks gpu gpu --device cpu --model resnet18 --pixels 32 --images 2 --rounds 1 --steps 1 --no-compile

In this order, so that a run that is cut short has what matters most:

    machine     versions and ceilings: a copy, a matrix product, launches one by one and as a graph: the ceilings
    hashes      `digits` and the model at 20 steps, twice on 1 rank, then on 2 and 4, then with `runtime.cuda_graphs`:
                is it one hash?
    speed       images/s of a step with one pass, in turn: the plain loop that people write (torchvision's network if
                it is installed, autocast, channels-last, torch's SGD), the same compiled; torusgd's plain step with
                float32 sums, with exact sums, and with exact sums and deterministic algorithms, as in a run; the same
                as CUDA graphs, plain and compiled; beside the aims
    precision   torusgd in float16 against bfloat16: a row for the table of `auto` in runtime.py
    streams     CUDA graphs of four passes a step, one pass at a time and two (`runtime.cuda_streams`); on a GPU only
    step        what the host does in a step, plain and as CUDA graphs, by torch's profiler: kernels, launches,
                synchronisations

A part that fails is noted with its error, and the next one runs.

Needs: a GPU, or `--device cpu`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.nn import functional as F

from torusgd.comm.base import Liveness
from torusgd.comm.groups import alone
from torusgd.data.pipeline import Batch
from torusgd.launch.local import launch
from torusgd.models import model_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe
from torusgd.recipe.section import Duration
from torusgd.run.build import build
from torusgd.run.fingerprint import conditions
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.runtime import ask_for_repeatable_products, resolve_auto
from torusgd.step.journal import synchronous

from ..step.step_overhead import Ready
from .gpu_section import COMPILED, EXACT, FLOAT, GRAPHS, GRAPHS_COMPILED, PEER, RUN, put_section, section

ROOT = Path(__file__).parents[2]
SECONDS = 560.0
CLASSES = 1000
STEP = "a step of torusgd"
"""range of the profile"""
HOST_CALLS = {
    "launches": "LaunchKernel", "graphs": "GraphLaunch", "copies": "Memcpy", "clears": "Memset",
    "synchronisations": "Synchronize",
}  # fmt: skip
"""by what is counted a part of the names of CUDA's functions"""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make_recipe(args: argparse.Namespace, images: int, *changes: str, workers: int = 1) -> Recipe:
    """The model on synthetic images, `images` a pass."""
    overrides = [
        f"data={{source: synthetic, train_images: {max(256, images)}, eval_images: 8, image_size: {args.pixels}, "
        f"channels: 3, classes: {CLASSES}, mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}}",
        f"model={{name: {args.model}}}",
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


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Of one call, after one that warms up; the mean of `count`."""
    work()
    wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        work()
    wait(device)
    return (time.perf_counter() - begin) / count


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Versions and ceilings."""
    device, is_gpu = args.target, args.target.type == "cuda"
    found: dict[str, Any] = {**conditions(make_recipe(args, 1), device)}
    if is_gpu:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["memory_gb"] = torch.cuda.get_device_properties(device).total_memory / 1e9
    size, side = (1 << 32, 8192) if is_gpu else (1 << 24, 256)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn(side, side, device=device).bfloat16()
    tiny = torch.zeros(1, device=device)
    found["copy_gb_per_s"] = [2e-9 * size / seconds_of(lambda: target.copy_(source), device, 5) for _ in range(3)]
    found["bfloat16_tflops"] = [2e-12 * side**3 / seconds_of(lambda: matrix @ matrix, device, 5) for _ in range(3)]
    found["launch_us"] = [1e6 * seconds_of(lambda: tiny.add_(1), device, 2000) for _ in range(3)]
    if is_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2000):
                tiny.add_(1)
        found["launch_in_graph_us"] = [1e6 / 2000 * seconds_of(graph.replay, device) for _ in range(3)]
    return found


def hashes(args: argparse.Namespace) -> dict[str, Any]:
    """weights_sha256 after 20 steps, of each recipe by run and number of ranks."""
    steps = 20 if args.device == "cuda" else 2
    found: dict[str, Any] = {"steps": steps}
    network = make_recipe(args, args.images[0], workers=4)
    for name, recipe in (("digits", resolve_auto(load_recipe("digits").recipe, args.device)), (args.model, network)):
        found[name] = {}
        runs = (("a run", 1, False), ("the same again", 1, False), ("the same", 2, False), ("the same", 4, False),
                ("CUDA graphs", 1, True))  # fmt: skip
        for run, ranks, graphs in runs:
            with tempfile.TemporaryDirectory() as folder:
                options = RuntimeOptions(
                    workers=ranks, ranks_per_gpu=ranks, checkpoint_every=Duration(1000, "st"), cuda_graphs=graphs
                )
                job = Job(recipe, options, args.device, Path(folder) / "run", max_steps=steps)
                found[name][f"{run} on {ranks} rank{'s' * (ranks > 1)}"] = launch(job, fresh=True).summary[
                    "weights_sha256"
                ]
    return found


def images_of(args: argparse.Namespace, images: int) -> Batch:
    """Images of noise."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(images, 3, args.pixels, args.pixels, generator=generator)
    targets = torch.randint(0, CLASSES, (images,), generator=generator)
    if args.device == "cuda":
        pixels, targets = pixels.pin_memory(), targets.pin_memory()
    return Batch(pixels, targets, np.arange(images), 0)


def our_step(
    args: argparse.Namespace, images: int, *changes: str, workers: int = 1, **options: Any
) -> Callable[[int], object]:
    """The trainer's own step, put together as `torusgd train` does, but for the loader; `options` of the runtime."""
    recipe = make_recipe(args, images, *changes, workers=workers)
    job = Job(recipe, RuntimeOptions(**options), args.device, Path())
    world, liveness = alone(args.target), Liveness()
    data = replace(open_data(job, world.device, liveness), loader=Ready(images_of(args, images)))
    trainer = build(job, data, world, liveness)
    take = (trainer.ahead or trainer.step).run
    return lambda index: take(trainer.membership, synchronous(index, workers))


def peer_step(args: argparse.Namespace, images: int, compiled: bool) -> Callable[[int], object]:
    """What people write by hand."""
    recipe, device = make_recipe(args, images), args.target
    try:
        from torchvision.models import get_model

        model = get_model(args.model, weights=None, num_classes=CLASSES)
    except (ImportError, OSError, RuntimeError, ValueError):
        model = model_of(recipe, CLASSES)
    model = model.to(device, memory_format=torch.channels_last).train()
    # A run that is compiled forbids Inductor to time kernels, for the whole process; nobody's own loop does.
    network = torch.compile(model, options={"deterministic": False}) if compiled else model
    dtype = DTYPES.get(recipe.precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler(args.device, enabled=dtype is torch.float16)
    batch = images_of(args, images)

    def step(index: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        pixels = batch.images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        targets = batch.targets.to(device, non_blocking=True)
        with torch.autocast(args.device, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(network(pixels).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss.item()

    return step


def in_turn(args: argparse.Namespace, steps: dict[str, tuple[Callable[[int], object], bool]]) -> dict[str, list[float]]:
    """Seconds of a step of each program, by round; the second of a pair says whether algorithms are deterministic.

    The plain loop has cuDNN time its algorithms, as those who write one do.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 1):
        for name, (step, deterministic) in steps.items():
            torch.use_deterministic_algorithms(deterministic)
            torch.backends.cudnn.benchmark = name in (PEER, COMPILED)
            wait(args.target)
            begin = time.perf_counter()
            for i in range(args.steps):
                step(turn * args.steps + i)
            wait(args.target)
            if turn:  # the first round warms up, and compiles
                times[name].append((time.perf_counter() - begin) / args.steps)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    return times


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step with one pass, by images and program."""
    found: dict[str, Any] = {"precision": make_recipe(args, 1).precision, "network": args.model, "pixels": args.pixels}
    found["seconds"] = {}
    for images in args.images:
        if time.perf_counter() > args.until:  # compiling takes its time
            found["left_out"] = f"{images} images and more: the time is up"
            break
        steps = {PEER: (peer_step(args, images, compiled=False), False)}
        if args.compile:
            steps[COMPILED] = (peer_step(args, images, compiled=True), False)
            steps[GRAPHS_COMPILED] = (our_step(args, images, "compile=true", cuda_graphs=True), True)
        steps[FLOAT] = (our_step(args, images, "reduction=float32"), False)
        steps[EXACT] = (our_step(args, images), False)
        steps[RUN] = (our_step(args, images), True)
        steps[GRAPHS] = (our_step(args, images, cuda_graphs=True), True)
        found["seconds"][str(images)] = in_turn(args, steps)
    return found


def precision(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step, by precision; the winner by the median."""
    images = args.images[len(args.images) // 2]
    steps = {name: (our_step(args, images, f"precision={name}"), True) for name in DTYPES}
    times = in_turn(args, steps)
    return {"images": images, "seconds": times, "faster": min(times, key=lambda name: statistics.median(times[name]))}


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of four passes, by the passes that run at the same time."""
    if args.device == "cpu":
        return {"left_out": "a CPU has no CUDA streams"}
    images = args.images[0]
    steps = {
        str(count): (our_step(args, images, workers=4, cuda_graphs=True, cuda_streams=count), True) for count in (1, 2)
    }
    return {"images": images, "seconds": in_turn(args, steps)}


def counts(args: argparse.Namespace) -> dict[str, Any]:
    """What the host does in one step, by the profiler, which counts the CPU's operators if there is no GPU."""
    found = {}
    for name, graphs in (("plain", False), ("graphs", True)):
        step = our_step(args, args.images[0], cuda_graphs=graphs)
        for index in range(3):
            step(index)
        wait(args.target)
        with torch.profiler.profile() as profile:
            with torch.profiler.record_function(STEP):
                step(3)
            wait(args.target)
        found[name] = counted(profile.events())
    return found


def counted(events: Sequence[Any]) -> dict[str, Any]:
    """Of a profile, what the host asked for inside the range named STEP; kernels are those of the whole profile."""
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    of_host = [event for event in events if event.device_type != DeviceType.CUDA]
    (step,) = (event.time_range for event in of_host if event.name == STEP)
    names = [event.name for event in of_host if step.start <= event.time_range.start <= step.end]
    return {
        "host_seconds": 1e-6 * (step.end - step.start),
        "operators": sum(name.startswith("aten::") for name in names),
        "kernels": sum(not event.name.startswith(("Mem", STEP)) for event in on_gpu),
        **{kind: sum(word in name for name in names) for kind, word in HOST_CALLS.items()},
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "machine": machine, "hashes": hashes, "speed": speed, "precision": precision, "streams": streams,
    "step": counts,
}  # fmt: skip


def run(args: argparse.Namespace, keep: Callable[[dict[str, Any]], object] = lambda result: None) -> dict[str, Any]:
    """All parts, `keep` being told after each; what fails, or comes too late, leaves its error."""
    ask_for_repeatable_products()
    args.until = time.perf_counter() + SECONDS
    result: dict[str, Any] = {name: {"error": "the run was cut short"} for name in PARTS}
    for name, part in PARTS.items():
        started = time.perf_counter()
        if started > args.until:
            result[name] = {"error": "the time is up"}
            continue
        try:
            result[name] = part(args)
        except Exception as error:
            traceback.print_exc()
            result[name] = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        finally:
            torch.use_deterministic_algorithms(False)
            if args.target.type == "cuda":
                torch.cuda.empty_cache()
        print(json.dumps({name: result[name], "took": round(time.perf_counter() - started, 1)}), flush=True)
        keep(result)
    return result


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--images", type=int, nargs="+", default=[32, 64, 256], help="of one pass")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each program, in turn")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, help="document for the section; default: docs/benchmarks.md for a GPU")
    args = parser.parse_args(words)
    args.target = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    args.docs = args.docs or (ROOT / "docs" / "benchmarks.md" if args.device == "cuda" else None)
    args.command = " ".join(["python -m benchmarks gpu gpu", *(words or [])])
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if args.device == "cpu":
        torch.set_num_threads(1)
    about = {"date": str(date.today()), "command": args.command, "device": args.device}
    args.results.mkdir(parents=True, exist_ok=True)

    def keep(parts: dict[str, Any]) -> None:
        """Of a run that is killed there is what its parts have found until then."""
        found = parts["machine"]
        name = "-".join([*str(found.get("gpu") or "cpu").lower().split(), str(found.get("torch", "")), about["date"]])
        (args.results / f"gpu-{name}.json").write_text(json.dumps(about | parts, indent=1) + "\n")

    result = about | run(args, keep)
    text = section(result)
    print(text)
    if args.docs is not None:
        before = args.docs.read_text() if args.docs.exists() else ""
        args.docs.write_text(put_section(before, text))


if __name__ == "__main__":
    main()
