"""The runtime: how a recipe is computed. Nothing here may change the trained weights.

Ranks, devices, process groups and the conditions (device model, torch build, threads) under which bits repeat.
"""

import ctypes
import os
import platform
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.distributed_c10d import PrefixStore

from .comm.base import ConnectionLost
from .comm.groups import Group
from .errors import UserError
from .recipe.duration import Duration
from .recipe.schema import Recipe, Section

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""numbers of glibc's malloc.h"""
_LARGEST = 1 << 30
"""bytes of a block that is kept"""
_NEVER = -1


class RuntimeOptions(Section):
    """The `runtime:` block of a recipe file and the flags that override it; no part of the recipe's hash."""

    device: Literal["cpu", "cuda"] | None = None
    """null: cuda where there is a GPU"""
    workers: Annotated[int, Field(ge=1)] | None = None
    """ranks on this machine; null: as many as GPUs, else as cores"""
    allreduce: str = "native"
    """auto, native, ring, torus, hierarchical, halving-doubling, doubling or direct; auto measures and picks"""
    grid: Annotated[str, Field(pattern=r"^[1-9][0-9]*x[1-9][0-9]*$")] | None = None
    """YxX, vertical by horizontal ranks, for torus and hierarchical; null: hosts by ranks a host"""
    profile: str | None = None
    """for auto: a file of torusgd tune; null: a probe of a few seconds"""
    buckets: Literal["auto", "cubic"] | Annotated[float, Field(gt=0)] | tuple[Annotated[int, Field(ge=1)], ...] = "auto"
    """which gradients travel together: a size in MiB of int32 or float32; how many tensors each, from the output on;
    cubic: 3, 21, 57, ... tensors (Fujitsu); auto: with allreduce auto by the first steps' times, else 4 MiB"""
    update: Literal["replicated", "sharded"] = "replicated"
    """sharded: each rank updates a shard of the weights and keeps momentum for that only"""
    model_parallel: Literal["auto"] | Annotated[int, Field(ge=1)] = 1
    """ranks that share the column blocks of the last, linear layers; auto: for each layer as many as send least"""
    checkpoint_every: Duration = Duration(1, "ep")
    """from one checkpoint to the next"""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """the newest so many stay"""
    tensorboard: bool = False
    """also write TensorBoard files into the run's folder"""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """seconds without a heartbeat after which a rank counts as frozen or lost"""
    start_timeout: Annotated[float, Field(gt=0)] = 120.0
    """seconds for the ranks to meet, and from there until the first of them has computed a first gradient"""

    @property
    def grid_size(self) -> tuple[int, int] | None:
        """(vertical, horizontal)."""
        if self.grid is None:
            return None
        vertical, horizontal = self.grid.split("x")
        return int(vertical), int(horizontal)


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0 alone prints and writes."""
        return self.rank == 0

    def share_of(self, virtual_workers: int) -> range:
        """The virtual workers of this rank: contiguous, sizes differ by one at most."""
        return range(self.rank * virtual_workers // self.size, (self.rank + 1) * virtual_workers // self.size)


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


def check_world_size(size: int, recipe: Recipe) -> None:
    """Each rank needs a virtual worker to compute."""
    if size > recipe.virtual_workers:
        raise UserError(
            f"workers = {size}: the recipe has {recipe.virtual_workers} virtual workers to share; "
            f"use at most {recipe.virtual_workers}"
        )


def ranks_of(world: Group) -> Ranks:
    """This process among the others, for whatever does not take a `Group` yet; makes torch's default group as well."""
    if world.size > 1 and not dist.is_initialized():
        assert world._store is not None
        dist.init_process_group(
            "nccl" if world.has_nccl else "gloo",
            store=PrefixStore("default", world._store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout),
        )
    return Ranks(world.rank, world.size, world.device)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Gives bare errors of torch's default group, which `ranks_of` makes, and of a `Group` the type of a lost rank."""
    try:
        yield
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = ("torch/distributed/", "torusgd/comm/groups.py")
        if type(error) is RuntimeError and any(place in frames[-1].filename for place in places):
            raise ConnectionLost(str(error)) from error
        raise


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
