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
    parts       the same as CUDA graphs without one of the form's parts each: what does each bring?
    step        what the host does in a step, plain, as CUDA graphs and as compiled ones, by torch's profiler: kernels,
                launches, synchronisations, and the kernels that take longest
    precision   torusgd in float16 against bfloat16: whether `auto` should take it (runtime.py)
    streams     CUDA graphs of four passes a step, one pass at a time and two (`runtime.cuda_streams`)
    jpegs       pictures to batches by the CPU and by nvJPEG
    portable    a step in portable arithmetic against float32 and the usual precision

A part that fails is noted with its error, and the next one runs.

Needs: a GPU, or `--device cpu`.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from torusgd.data import Pipeline, open_sources
from torusgd.data.registry import decode_on_gpu
from torusgd.launch.local import launch
from torusgd.recipe.data_schema import Augment, Data
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.section import Duration
from torusgd.run.fingerprint import conditions
from torusgd.run.job import Job
from torusgd.runtime import ask_for_repeatable_products, resolve_auto

from .gpu_section import COMPILED, EXACT, FLOAT, GRAPHS, GRAPHS_COMPILED, PEER, RUN, RUN_COMPILED, put_section, section
from .programs import DTYPES, Program, Step, make_recipe, our_step, parts_left_out, peer_step, plain_changes

ROOT = Path(__file__).parents[2]
SECONDS = 560.0
STEP = "a step of torusgd"
"""range of the profile"""
HOST_CALLS = {
    "launches": "LaunchKernel", "graphs": "GraphLaunch", "copies": "Memcpy", "clears": "Memset",
    "synchronisations": "Synchronize",
}  # fmt: skip
"""by what is counted a part of the names of CUDA's functions"""


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
                what = f"{run} on {ranks} rank{'s' * (ranks > 1)}"
                found[name][what] = launch(job, fresh=True).summary["weights_sha256"]
                print(f"{name}, {what}: {found[name][what]}", flush=True)
    return found


def in_turn(args: argparse.Namespace, programs: dict[str, Program]) -> dict[str, dict[str, Any]]:
    """Seconds of a step of each program, by round, and the GPU memory in GB that it took; or its error."""
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    steps: dict[str, Step] = {}
    errors: dict[str, str] = {}
    is_gpu = args.target.type == "cuda"
    for turn in range(args.rounds + 1):
        for name, program in programs.items():
            if name in errors:
                continue
            torch.use_deterministic_algorithms(program.deterministic)
            torch.backends.cudnn.benchmark = program.times_algorithms
            try:
                with program.changes():
                    begin = time.perf_counter()
                    if turn == 0:  # the first round warms up, and compiles
                        torch.cuda.empty_cache()
                        before = torch.cuda.memory_reserved() if is_gpu else 0
                        steps[name] = program.make()
                    for i in range(args.steps):
                        steps[name](turn * args.steps + i)
                    wait(args.target)
            except Exception as error:
                traceback.print_exc()
                errors[name] = summary_of(error)
                continue
            if turn == 0:
                memory[name] = 1e-9 * (torch.cuda.memory_reserved() - before) if is_gpu else 0.0
                print(f"{name}: ready in {time.perf_counter() - begin:.1f} s", flush=True)
            else:
                seconds.setdefault(name, []).append((time.perf_counter() - begin) / args.steps)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    for name, times in seconds.items():
        print(f"{name}: {1e3 * statistics.median(times):.3f} ms a step, {memory[name]:.1f} GB", flush=True)
    return {"seconds": seconds, "memory_gb": memory, **({"errors": errors} if errors else {})}


def by_images(
    args: argparse.Namespace, programs: Callable[[int], dict[str, Program]], images: Sequence[int]
) -> dict[str, Any]:
    """Of each number of images a pass, what `in_turn` finds."""
    found: dict[str, Any] = {"precision": make_recipe(args, 1).precision, "network": args.model, "pixels": args.pixels}
    for count in images:
        if time.perf_counter() > args.until:  # compiling takes its time
            found["left_out"] = f"{count} images and more: the time is up"
            break
        for key, values in in_turn(args, programs(count)).items():
            found.setdefault(key, {})[str(count)] = values
        free(args)
    return found


def free(args: argparse.Namespace) -> None:
    """Gives back what the programs of a part held, the memory of their graphs included."""
    gc.collect()
    torch.compiler.reset()
    if args.target.type == "cuda":
        torch.cuda.empty_cache()


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step with one pass, by images and program."""

    def programs(images: int) -> dict[str, Program]:
        peer, ours = partial(peer_step, args, images), partial(our_step, args, images)
        found = {PEER: Program(partial(peer, compiled=False), times_algorithms=True)}
        if args.compile:
            found[COMPILED] = Program(partial(peer, compiled=True), times_algorithms=True)
            found[RUN_COMPILED] = Program(partial(ours, "compile=true"), deterministic=True)
            found[GRAPHS_COMPILED] = Program(partial(ours, "compile=true", cuda_graphs=True), deterministic=True)
        found[FLOAT] = Program(partial(ours, "reduction=float32"))
        found[EXACT] = Program(ours)
        found[RUN] = Program(ours, deterministic=True)
        found[GRAPHS] = Program(partial(ours, cuda_graphs=True), deterministic=True)
        return found

    return by_images(args, programs, args.images)


def parts(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step as CUDA graphs without one of their parts each, and of a plain one with other parts."""
    if args.device == "cpu":
        return {"left_out": "a CPU has neither CUDA graphs nor kernels"}

    def programs(images: int) -> dict[str, Program]:
        ours = partial(our_step, args, images, cuda_graphs=True)
        found = {GRAPHS: Program(ours, deterministic=True)}
        for name, changes in parts_left_out().items():
            found[f"graphs without {name}"] = Program(ours, deterministic=True, changes=changes)
        plain = partial(our_step, args, images)
        found[RUN] = Program(plain, deterministic=True)
        for name, changes in plain_changes().items():
            found[f"plain with {name}"] = Program(plain, deterministic=True, changes=changes)
        return found

    return by_images(args, programs, args.images[:1])


def precision(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step, by precision; the winner by the median."""
    images, graphs = args.images[len(args.images) // 2], args.device == "cuda"
    programs: dict[str, Program] = {
        name: Program(partial(our_step, args, images, f"precision={name}", cuda_graphs=graphs), deterministic=True)
        for name in DTYPES
    }
    found = in_turn(args, programs)
    times = found["seconds"]
    faster = min(times, key=lambda name: statistics.median(times[name]))
    return {"images": images, **found, "faster": faster}


def portable(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step in portable arithmetic, plain and with captured passes, and in two other precisions."""
    images, usual = args.images[0], make_recipe(args, 1).precision
    programs: dict[str, Program] = {
        name: Program(partial(our_step, args, images, f"precision={name}"), deterministic=True)
        for name in dict.fromkeys((usual, "float32", "portable"))
    }
    captured = partial(our_step, args, images, "precision=portable", cuda_graphs=True)
    programs["portable, passes as CUDA graphs"] = Program(captured, deterministic=True)
    few = argparse.Namespace(**{**vars(args), "rounds": min(args.rounds, 3), "steps": 1})
    return {"images": images, **in_turn(few, programs)}


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of four passes, by the passes that run at the same time."""
    if args.device == "cpu":
        return {"left_out": "a CPU has no CUDA streams"}
    images = args.images[0] // 2
    ours = partial(our_step, args, images, workers=4, cuda_graphs=True)
    programs = {str(n): Program(partial(ours, cuda_streams=n), deterministic=True) for n in (1, 2)}
    return {"images": images, **in_turn(args, programs)}


def jpegs(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds for 256 images of ImageNet's usual size, from files to batches: by the CPU on one core, and by nvJPEG."""
    if args.device == "cpu":
        return {"left_out": "a CPU has no nvJPEG"}
    from ..input.decode import PICTURES, write_pictures

    count, data = 256, Data(source="folder", image_size=args.pixels, augment=Augment(crop="resized", flip=0.5))
    found: dict[str, Any] = {"images": count, "seconds": {}, "errors": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), 375, 500, 90)
        for name in ("one core", "nvjpeg"):
            try:
                source = open_sources(data, Path(folder), seed=0)
                source = decode_on_gpu(source, args.target) if name == "nvjpeg" else source
                pipeline, indices = Pipeline(source[0], data, seed=0), np.arange(count) % PICTURES

                def batch(pipeline: Pipeline = pipeline, indices: Any = indices) -> Tensor:
                    return pipeline.training_batch(indices, np.zeros(count, int), augment=True).images

                found["seconds"][name] = [seconds_of(batch, args.target) for _ in range(3)]
            except Exception as error:
                traceback.print_exc()
                found["errors"][name] = summary_of(error)
    return found


def counts(args: argparse.Namespace) -> dict[str, Any]:
    """What the host does in one step, by the profiler, which counts the CPU's operators if there is no GPU."""
    found, images = {}, args.images[len(args.images) // 2]
    torch.use_deterministic_algorithms(True)
    compiled = {"graphs, compiled": ("compile=true",)} if args.compile else {}
    for name, changes in {"plain": (), "graphs": (), **compiled}.items():
        step = our_step(args, images, *changes, cuda_graphs=name != "plain")
        for index in range(5):
            step(index)
        wait(args.target)
        with torch.profiler.profile() as profile:
            with torch.profiler.record_function(STEP):
                step(5)
            wait(args.target)
        found[name] = counted(profile.events()) | {"images": images, "longest": longest(profile.events())}
        del step
        free(args)
    return found


def longest(events: Sequence[Any], most: int = 40) -> list[tuple[float, int, str]]:
    """The GPU's kernels by their microseconds, how often, and their names, the longest first."""
    of: dict[str, list[float]] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA and event.name != STEP:
            of.setdefault(event.name[:120], []).append(event.time_range.end - event.time_range.start)
    return sorted(((round(sum(times), 1), len(times), name) for name, times in of.items()), reverse=True)[:most]


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
    "machine": machine, "hashes": hashes, "speed": speed, "parts": parts, "step": counts, "precision": precision,
    "streams": streams, "jpegs": jpegs, "portable": portable,
}  # fmt: skip


def run(args: argparse.Namespace, keep: Callable[[dict[str, Any]], object] = lambda result: None) -> dict[str, Any]:
    """All parts, `keep` being told after each; what fails, or comes too late, leaves its error."""
    ask_for_repeatable_products()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as in a run
    args.until = time.perf_counter() + SECONDS
    wanted = {name: part for name, part in PARTS.items() if name in {"machine", *args.parts}}
    result: dict[str, Any] = {name: {"error": "the run was cut short"} for name in wanted}
    for name, part in wanted.items():
        started = time.perf_counter()
        if started > args.until:
            result[name] = {"error": "the time is up"}
            continue
        try:
            result[name] = part(args)
        except Exception as error:
            traceback.print_exc()
            result[name] = {"error": summary_of(error)}
        finally:
            torch.use_deterministic_algorithms(False)
            free(args)
        print(json.dumps({name: result[name], "took": round(time.perf_counter() - started, 1)}), flush=True)
        keep(result)
    return result


def summary_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--images", type=int, nargs="+", default=[32, 64, 256], help="of one pass")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each program, in turn")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument(
        "--parts", nargs="+", choices=[*PARTS], default=[*PARTS], help="of the list above; default: all"
    )
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
