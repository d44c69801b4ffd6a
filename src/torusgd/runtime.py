"""The runtime: how a recipe is computed, on which device, by how many ranks and threads.

Nothing here may change the trained weights.
"""

import ctypes
import os
from pathlib import Path

import torch

from .errors import UserError
from .recipe.compatibility import WORKERS, Setup, check
from .recipe.runtime_options import RuntimeOptions
from .recipe.schema import Recipe

# Numbers of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Compute capability of Ampere: before it there are no bfloat16 tensor cores, and torch only emulates the type.
_BFLOAT16_FROM = (8, 0)
_KERNELS_FROM = (8, 0)  # of Triton's kernels


def ranks_are_given() -> bool:
    """Whether a launcher (torchrun, Slurm scripts) has set the variables of a process group."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def launcher_name() -> str:
    """`torchrun` or `other`, if such a launcher has started the ranks; empty: torusgd starts its own."""
    if not ranks_are_given():
        return ""
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "other"


def resolve_device(options: RuntimeOptions) -> str:
    """`cpu` or `cuda`; UserError if CUDA is requested and missing."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = cuda: this torch sees no GPU; use --device cpu, or install a CUDA build of torch")
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def resolve_workers(options: RuntimeOptions, device: str, recipe: Recipe, begins_alone: bool = True) -> int:
    """Ranks to start on this machine, at most one a virtual worker; UserError if more are requested.

    If other machines can join, a run that does not begin alone leaves it to them to reach its fewest ranks.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    available = gpus * options.ranks_per_gpu if device == "cuda" else len(os.sched_getaffinity(0))
    if options.workers_range is not None:
        fewest, most = options.workers_range
        if fewest > most:
            raise UserError(f"workers = {fewest}:{most}: give the smaller number first")
        check(Setup(recipe, ranks=most), {WORKERS})
        return max(fewest if begins_alone else 1, min(available, most))
    if options.workers is None:
        return max(1, min(available, recipe.virtual_workers))
    check(Setup(recipe, ranks=options.workers), {WORKERS})
    if device == "cuda" and options.workers > available:
        raise UserError(
            f"workers = {options.workers}: this machine has {gpus} GPUs; use at most {available}, "
            f"or --set runtime.ranks_per_gpu={-(-options.workers // gpus)}"
        )
    return options.workers


def expected_ranks(options: RuntimeOptions, device: str, recipe: Recipe) -> int:
    """Ranks of the coming run: those that a launcher has announced, else those to start on this machine."""
    announced = os.environ.get("WORLD_SIZE", "")
    return int(announced) if ranks_are_given() and announced.isdigit() else resolve_workers(options, device, recipe)


def prepare_process(recipe: Recipe, device: torch.device) -> None:
    """Sets threads, on CUDA deterministic algorithms, and the allocator, as the recipe needs them."""
    keep_freed_memory()
    torch.set_num_threads(recipe.threads)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False  # it times algorithms, and the fastest of the day decides the bits
        if recipe.reduction == "exact":
            ask_for_repeatable_products()
            # Not in portable arithmetic, whose sums are exact in any order: what torch has in the place of atomic
            # additions sorts, and asks the host, which a CUDA graph can't.
            torch.use_deterministic_algorithms(recipe.precision != "portable")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def ask_for_repeatable_products() -> None:
    """Makes cuBLAS give a product the same bits on every run, unless the environment has a setting already."""
    # Torch reads the environment once, at the first product on a GPU of a process. If the variable was not set then,
    # it refuses every later product under deterministic algorithms.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def keep_freed_memory() -> None:
    """Lets the C library reuse freed memory of any size for the next step, instead of handing it back (glibc only)."""
    # A step frees and allocates the same activations again; fresh pages come zeroed, one by one, which was 6 to 8 % of
    # a step on CPUs (notes/log.md). Not if the environment already tunes it.
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # neither musl nor macOS has it
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)  # most bytes of a freed block that stays in the process
        mallopt(_TRIM_THRESHOLD, -1)  # never


def loader_threads(device: torch.device) -> int:
    """Threads that prepare images: one beside a rank that computes on a core, else this rank's share of the cores."""
    if device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def resolve_auto(recipe: Recipe, device: str) -> Recipe:
    """Replaces `auto` by the fastest precision and memory format of the device, which become part of the recipe."""
    # By the kind of the device, never by timing it: the same machine always gets the same recipe.
    if device == "cuda":
        precision = "bfloat16" if torch.cuda.get_device_capability() >= _BFLOAT16_FROM else "float16"
    else:
        precision = "bfloat16" if {"avx512_bf16", "amx_bf16"} & cpu_flags() else "float32"
    return recipe.resolve(precision=precision, memory_format="channels_last")


def runs_kernels(device: torch.device | None = None) -> bool:
    """Whether the kernels of CUDA graphs are made for a GPU (None: the current one); AMD's nobody has tried."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _KERNELS_FROM


def cpu_info(key: str) -> str:
    """The first line of /proc/cpuinfo whose name begins so, without the name; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def cpu_flags() -> set[str]:
    """The instruction sets of this machine's processor, as Linux names them."""
    return set((cpu_info("flags") or cpu_info("Features")).split())
