"""Networks whose bits repeat: a layer without such a gradient is named, and blocks are compiled without a stopwatch."""

import copy
import ctypes
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from ..errors import UserError, as_user_error
from ..recipe.schema import Recipe
from ..recipe.section import sides

_MOST_COMPILED = 1 << 16  # shapes of all blocks of one class
_PATIENCE = 120  # seconds for a compiler that needs a tenth of one
_ELF = b"\x7fELF\x02\x01"  # of 64 bits, little-endian


def check_repeatable(network: nn.Module, recipe: Recipe) -> None:
    """One pass forward and back, of a copy, on the network's device; UserError names a layer that torch refuses."""
    # Exact sums need gradients with the same bits on every run. Under `torch.use_deterministic_algorithms` torch
    # refuses an operation that can't give them, nearly always in the backward pass: adaptive average pooling to more
    # than one value a channel, pooling in three dimensions, fractional pooling, some padding and interpolation. Which
    # ones depends on torch and the device, so that a list would be wrong soon: one pass of two images finds them.
    if recipe.precision == "portable":  # all of whose sums are exact, in whatever order a GPU adds them
        return
    # A copy: the pass changes batch norm's statistics, and hooks would stay.
    trial, device = copy.deepcopy(network).train(), next(network.parameters()).device
    last = "the input"  # of the layers, the one whose forward or backward pass began last

    def note(layer: str, *_: object) -> None:
        nonlocal last
        last = layer

    def note_both(layer: str, module: nn.Module, inputs: object, output: object) -> None:
        note(layer)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(note, layer))

    for name, module in trial.named_modules():
        if not any(module.children()):
            layer = f"{name or 'the network'} ({type(module).__name__})"
            module.register_forward_hook(partial(note_both, layer))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            trial(torch.randn(2, recipe.data.channels, *sides(recipe.data.image_size), device=device)).sum().backward()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        operation = str(error).split()[0]
        raise UserError(
            f"model.name: {recipe.model.name}, layer {last}: no gradient with the same bits on every run "
            f"({operation}) on {device.type}; take another layer, or reduction: float32, whose bits are not promised"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)


def compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Has each block of a network compiled by Inductor at its first pass, in place.

    UserError if the compiler for the device is not installed, or this torch can't be kept from timing kernels.
    """
    # Block by block and not as a whole: the backward pass of a compiled region is one operation, so the gradients of a
    # network that is compiled whole would all come at its end, and none could travel meanwhile (torch.compile's FAQ).
    # Equal blocks share their code.
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("compile: true: needs Triton on a GPU; pip install triton, or set compile: false")
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UserError(f"compile: true: needs the C++ compiler {compiler}; install it, or set compile: false")
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor  # takes a second, which others need not wait for
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if not hasattr(inductor, "deterministic"):
        raise UserError(f"compile: true: torch {torch.__version__} may time kernels; take 2.11, or set compile: false")
    inductor.deterministic = True  # else it may time kernels, and the fastest of the day decides the bits
    # Of each block each shape is compiled, in training and in evaluation. Torch would give up after eight of one class
    # and take the rest uncompiled, with other bits, and with others again in a run that was resumed.
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MOST_COMPILED
    dynamo.fail_on_recompile_limit_hit = True
    if device.type == "cpu":
        check_compiler(compiler, cache_dir())
        drop_torn_libraries(Path(cache_dir()))
    # A network without blocks is compiled whole.
    for block in dict(blocks(model)).values() or [model]:
        block.compile(dynamic=False)


def check_compiler(compiler: str, folder: str) -> None:
    """UserError if it makes no library, or none that can be loaded from there: in the first step it is a traceback."""
    what, remedy = f"compile: true: {compiler} makes no library that loads from {folder}", "TORCHINDUCTOR_CACHE_DIR"
    remedy = f"mend it, have {remedy} name a folder without noexec, or set compile: false"
    failures = (OSError, subprocess.SubprocessError)
    with as_user_error(what, remedy, of=failures), tempfile.TemporaryDirectory(dir=folder) as made:
        arguments = [compiler, "-x", "c++", "-shared", "-fPIC", "-o", library := f"{made}/empty.so", os.devnull]
        subprocess.run(arguments, check=True, capture_output=True, timeout=_PATIENCE)
        ctypes.CDLL(library)


class CompilerHook:
    """Calls a function whenever torch begins to compile something in this process; `remove` ends that."""

    def __init__(self, begins: Callable[[], object]) -> None:
        from torch._dynamo.callback import callback_handler

        self._handler = callback_handler
        self._call = callback_handler.register_start_callback(lambda _: cast(None, begins()))

    def remove(self) -> None:
        with suppress(ValueError):  # somebody has reset the compiler
            self._handler.remove_start_callback(self._call)


def blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that consist of layers, by name; a list of such modules counts as its elements.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> [name for name, block in blocks(net)]
    ['1']
    """
    for name, child in model.named_children():
        parts = list(child.children())
        if isinstance(child, nn.Sequential | nn.ModuleList) and any(list(part.children()) for part in parts):
            yield from blocks(child, f"{prefix}{name}.")
        elif parts and any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def drop_torn_libraries(cache: Path) -> None:
    """Deletes from Inductor's cache the libraries whose compiler was killed, or which a machine lost as it went down.

    Torch takes a file that is there for whole: each later run would fail to load it. Worse, if it is the one that shows
    which vectors the processor has, torch goes on without any, to other bits.
    """
    for library in cache.glob("*/*.so"):
        # Torch holds this lock as it compiles one.
        lock = FileLock(cache / "locks" / f"{library.name.partition('.')[0]}.lock", timeout=0)
        with suppress(OSError, Timeout):  # gone by now, another user's; or at work
            if _is_torn(library):
                with lock:
                    if _is_torn(library):
                        library.unlink()


def _is_torn(library: Path) -> bool:
    # A linker writes ELF's header last; the table of sections, to which it points, is where the file ends.
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) == 64 and not header.startswith(_ELF):
        return header[:4] == bytes(4)  # other systems have other forms
    table, rows = int.from_bytes(header[40:48], "little"), int.from_bytes(header[60:62], "little")
    return len(header) < 64 or library.stat().st_size < table + rows * int.from_bytes(header[58:60], "little")
