"""The runtime: how a recipe is computed. Nothing here may change the trained weights.

Ranks, devices, process groups and the conditions (device model, torch build, threads) under which bits repeat.
"""

import ctypes
import os
import platform
from pathlib import Path

import torch

from .errors import UserError
from .recipe.runtime_options import RuntimeOptions
from .recipe.schema import Recipe

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""numbers of glibc's malloc.h"""
_LARGEST = 1 << 30
"""bytes of a block that is kept"""
_NEVER = -1


def ranks_are_given() -> bool:
    """Whether a launcher (torchrun, Slurm scripts) has set the variables of a process group."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def resolve_device(options: RuntimeOptions) -> str:
    """`cpu` or `cuda`; UserError when CUDA is asked for and missing."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = cuda: this torch sees no GPU; use --device cpu, or install a CUDA build of torch")
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def resolve_workers(options: RuntimeOptions, device: str, recipe: Recipe) -> int:
    """Ranks to start on this machine, at most one a virtual worker; UserError when more are asked for."""
    available = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    if options.workers is None:
        return max(1, min(available, recipe.virtual_workers))
    check_world_size(options.workers, recipe)
    if device == "cuda" and options.workers > available:
        raise UserError(f"workers = {options.workers}: this machine has {available} GPUs; use at most as many")
    return options.workers


def expected_ranks(options: RuntimeOptions, device: str, recipe: Recipe) -> int:
    """Ranks of the coming run: those that a launcher has announced, else those to start on this machine."""
    announced = os.environ.get("WORLD_SIZE", "")
    return int(announced) if ranks_are_given() and announced.isdigit() else resolve_workers(options, device, recipe)


def check_world_size(size: int, recipe: Recipe) -> None:
    """Each rank needs a virtual worker to compute."""
    if size > recipe.virtual_workers:
        raise UserError(
            f"workers = {size}: the recipe has {recipe.virtual_workers} virtual workers to share; "
            f"use at most {recipe.virtual_workers}"
        )


def prepare_process(recipe: Recipe, device: torch.device) -> None:
    """Sets what the recipe promises of the arithmetic (threads, on CUDA deterministic algorithms), and keeps memory."""
    keep_freed_memory()
    torch.set_num_threads(recipe.threads)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        exact = recipe.reduction == "exact"
        torch.backends.cudnn.benchmark = not exact
        if exact:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Lets the C library keep what a step frees for the next one, however large, instead of handing it back.

    A step frees and takes the same activations again; fresh ones come zeroed, page by page, which was 6 to 8 % of a
    step on CPUs (docs/log.md). glibc only, and not where the environment already tunes it.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # neither musl nor macOS has it
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _NEVER)


def loader_threads(device: torch.device) -> int:
    """Threads that prepare images: one beside a rank that computes on a core, else this rank's share of the cores."""
    if device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def resolve_auto(recipe: Recipe, device: str) -> Recipe:
    """Replaces `auto` by what the device computes fastest; the answer becomes part of the run's recipe."""
    if device == "cuda":
        fast = torch.cuda.is_bf16_supported()
        return recipe.resolve(precision="bfloat16" if fast else "float16", memory_format="channels_last")
    flags = _cpu_flags()
    fast = bool({"avx512_bf16", "amx_bf16"} & flags)
    return recipe.resolve(precision="bfloat16" if fast else "float32", memory_format="channels_last")


def conditions(recipe: Recipe, device: torch.device) -> dict[str, str | int]:
    """What must be equal for bits to repeat; recorded with the run and compared when it is resumed."""
    cpu = {"cpu": _cpu_model(), "isa": torch.backends.cpu.get_cpu_capability()}
    gpu = {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)} if device.type == "cuda" else {}
    return {"device": device.type, **cpu, **gpu, "torch": torch.__version__, "threads": recipe.threads}


def _cpu_info(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    return set(_cpu_info("flags").split())
