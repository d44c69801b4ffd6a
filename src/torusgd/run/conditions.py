"""The conditions under which the bits of a run repeat: processor, GPU, builds of libraries, and their environment.

A floating-point kernel is chosen by the processor's instructions and caches, by the build of a library, and by
variables of the environment. Equal conditions are to mean equal bits, so all of these are in them; what has no part in
the arithmetic (clock speeds, the kernel's version, where threads are placed) is not.
"""

import hashlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from ..data.registry import PICTURES
from ..recipe.schema import Recipe
from ..runtime import cpu_flags, cpu_info

Conditions = dict[str, str | int]

_ARITHMETIC_FLAG = re.compile(r"\d*s?sse|avx|fma|f16c|amx|vnni|bf16|asimd|sve|sme|fp|i8mm|neon")
"""of a processor's flags those of which kernels make a choice; others come and go with the version of the kernel"""
_LIBRARY_VARIABLE = re.compile(
    r"(DNNL|ONEDNN|MKL|ATEN|OPENBLAS|NPY|CUBLAS|CUBLASLT|CUDNN|NVIDIA|TORCH_(MKLDNN|CUDNN|ALLOW|BLAS))_"
    r"|(OMP_DYNAMIC|OMP_THREAD_LIMIT|KMP_DETERMINISTIC_REDUCTION)$"
)
_HARMLESS = re.compile(r"_(VERBOSE|NUM_THREADS|VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_CUDA|CUDA_VERSION)")
"""a recipe says how many threads there are, whatever the environment says"""
_DECODERS = ("simplejpeg", "opencv-python-headless", "opencv-python", "pillow")
_GPU_DECODERS = ("torchvision", "nvidia-nvjpeg", "nvidia-nvjpeg-cu12")


def conditions(recipe: Recipe, device: torch.device) -> Conditions:
    """Of this process, once `runtime.prepare_process` has prepared it; plain JSON, recorded with a run.

    Ranks of one run need the same, unless it allows mixed ones; a run that is resumed under others says so.
    """
    return {
        "device": device.type,
        **_cpu(),
        **(_gpu(device) if device.type == "cuda" else {}),
        **_builds(recipe),
        "threads": recipe.threads,
        "environment": " ".join(library_variables()),
    }


def library_variables() -> list[str]:
    """The environment's `NAME=value` by which numerical libraries may choose other kernels, sorted."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if _LIBRARY_VARIABLE.match(name) and not _HARMLESS.search(name)
    )


def _cpu() -> Conditions:
    """Family, model and stepping name a design; flags and caches are what a virtual machine shows of it."""
    design = [cpu_info(f"{x86}\t") or cpu_info(arm) for x86, arm in _DESIGN]
    return {
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cpu_design": "-".join(filter(None, design)),
        "cpu_flags": " ".join(sorted(flag for flag in cpu_flags() if _ARITHMETIC_FLAG.match(flag))),
        "cpu_caches": _caches(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


_DESIGN = (("cpu family", "CPU implementer"), ("model", "CPU part"), ("stepping", "CPU revision"))
"""lines of /proc/cpuinfo, on x86 and on ARM"""


def _caches() -> str:
    """Sizes of the first core's caches, by which blocks of a matrix product are cut; empty where nobody tells."""
    found = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        return " ".join(path.read_text().strip() for path in found)
    except OSError:
        return ""


def _gpu(device: torch.device) -> Conditions:
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    number = re.search(r"\d+\.\d+[.\d]*", driver)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpu_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": str(torch.version.cuda),
        "cudnn": torch.backends.cudnn.version() or 0,
        "driver": number[0] if number else "",
        "triton": _version("triton"),
    }


def _builds(recipe: Recipe) -> Conditions:
    """Versions of what computes; those of decoders where a recipe reads pictures, or may."""
    build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12]
    found: Conditions = {"torusgd": _version("torusgd"), "torch": torch.__version__, "torch_build": build}
    found["numpy"] = np.__version__
    if recipe.data.source in PICTURES or ":" in recipe.data.source:
        names = _DECODERS + (_GPU_DECODERS if recipe.data.decoder == "nvjpeg" else ())
        found["decoders"] = " ".join(f"{name}-{_version(name)}" for name in names if _version(name))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
