"""`torusgd doctor`: what works on this machine, and what to install for the rest."""

import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from importlib.metadata import requires

import typer

from ..errors import RunError, UserError, in_one_line
from ..ranks.forkserver import start_forkserver
from ..text import NOT_INSTALLED, byte_size, listed, plural, version_of
from .output import console

_SHARED = "/dev/shm"
LEAST_SHARED = 1 << 28  # bytes that batches of two ranks and their loader processes take


def doctor() -> None:
    """Print what works on this machine, and what to install for the rest.

    Exit code 0: recipes can be trained here. 1: they can't, and a line says why.
    """
    start_forkserver()
    checks = {
        "torusgd": _versions, "machine": _machine, "device": _device, "ranks": _ranks, "memory": _memory,
        "portable": _portable, "pictures": _pictures, "extras": _installed, "missing": _missing,
    }  # fmt: skip
    terminal, unfit = console(), []
    for name, check in checks.items():
        try:
            text = check()
        except RunError as error:  # what a run can't do without is missing
            unfit.append(name)
            text = f"NO: {error}"
        terminal.print(f"{name:9} {text}")
    terminal.print(f"not fit to train: {listed(unfit)}" if unfit else "fit to train: torusgd train digits --workers 2")
    raise typer.Exit(1 if unfit else 0)


def _versions() -> str:
    import numpy as np
    import torch

    return (
        f"{version_of() or NOT_INSTALLED} on Python {platform.python_version()}, torch {torch.__version__}, "
        f"NumPy {np.__version__}"
    )


def _machine() -> str:
    import torch

    from ..run.fingerprint import machine

    found = machine(torch.device("cpu"))
    return f"{found['cpu']}, {plural(len(os.sched_getaffinity(0)), 'core')}, torch's kernels for {found['isa']}"


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU that this torch can use; training is on the CPU, over Gloo"
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{plural(torch.cuda.device_count(), 'GPU')}: {listed(sorted(names))}"


def _ranks() -> str:
    from ..recipe.runtime_options import RuntimeOptions
    from .bench import bench_on_rank, on_ranks

    try:
        seconds = on_ranks(RuntimeOptions(workers=2), bench_on_rank, [4096], ["native"], {})[0]["median_s"]
    except (RunError, UserError, OSError) as error:
        raise RunError(f"two ranks on this machine can't sum: {in_one_line(error)}; look at lo and at hosts") from error
    return f"two ranks sum 4 KiB over loopback in {1e3 * seconds:.2g} ms"


def _memory() -> str:
    import resource

    found = []
    with suppress(OSError):
        free = shutil.disk_usage(_SHARED).free
        if free < LEAST_SHARED:
            raise RunError(
                f"{_SHARED} has {byte_size(free)}, ranks hand batches over there; give it {byte_size(LEAST_SHARED)} "
                "(docker: --shm-size)"
            )
        found.append(f"{byte_size(free)} free in {_SHARED}")
    found.append(f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} open files")
    return ", ".join(found)


def _portable() -> str:
    import torch

    from ..arithmetic.methods import METHODS, multiply, order_of_preference
    from ..arithmetic.passes import compiled

    device = torch.device("cpu")
    torch.set_num_threads(1)  # as in a run
    exact = []
    for name in order_of_preference(device, 1):
        operand = METHODS[name].prepare(torch.arange(-2048.0, 2048.0).view(64, 64), torch.ones(1, 1))
        with suppress(Exception):
            multiply(METHODS[name], operand, operand)
            exact.append(name)
    if not exact:
        return "no product of this machine is exact: precision portable can't run here"
    passes = f"passes by torch, a quarter slower: {why}" if isinstance(why := compiled(), str) else "passes in C"
    return f"exact products by {listed(exact)}, the fastest first; {passes}"


def _pictures() -> str:
    from ..data.decode import other_decoders

    try:
        wrong = [name for is_jpeg in (True, False) for name in other_decoders(is_jpeg)]
    except UserError as error:
        return f"{error}"
    same = "with the pixels that portable recipes ask for" if not wrong else f"portable recipes refuse {listed(wrong)}"
    return f"JPEG and PNG are decoded, {same}"


def _extras() -> dict[str, list[str]]:
    """The packages of each extra that aren't installed."""
    found: dict[str, list[str]] = {}
    for line in (version_of() and requires("torusgd")) or []:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[2] != "all":  # of all the others
            found.setdefault(match[2], []).extend([] if version_of(match[1]) else [match[1]])
    return dict(sorted(found.items()))


def _installed() -> str:
    return listed(extra for extra, lacking in _extras().items() if not lacking) or "none"


def _missing() -> str:
    found = {extra: lacking for extra, lacking in _extras().items() if lacking}
    if not found:
        return "none"
    packages = " ".join(next(iter(found.values())))
    return f"{listed(found)}; the first comes by {sys.executable} -m pip install {packages}"
