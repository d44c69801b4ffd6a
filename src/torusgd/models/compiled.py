"""Blocks of a network compiled by torch's Inductor: fewer and larger kernels, with other bits."""

import importlib.util
import os
import shutil
from collections.abc import Iterator

import torch
from torch import nn

from ..errors import UserError

_LISTS = (nn.Sequential, nn.ModuleList)


def compile_blocks(model: nn.Module, device: torch.device) -> list[str]:
    """Has each block of a network compiled at its first pass, in place; returns the names of the blocks.

    UserError if the compiler for the device is not installed.
    """
    # Block by block and not as a whole: the backward pass of a compiled region is one operation, so the gradients of a
    # network that is compiled whole would all come at its end, and none could travel meanwhile (torch.compile's FAQ).
    # Equal blocks share their code.
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("compile: true: needs Triton on a GPU; pip install triton, or set compile: false")
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UserError(f"compile: true: needs the C++ compiler {compiler}; install it, or set compile: false")
    import torch._inductor.config as inductor  # takes a second, which others need not wait for

    inductor.deterministic = True  # else it may time kernels, and the fastest of the day decides the bits
    # A network without blocks is compiled whole.
    named = dict(blocks(model)) or {"": model}
    for block in named.values():
        block.compile(dynamic=False)
    return list(named)


def blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that consist of layers, by name; a list of such modules counts as its elements.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> [name for name, block in blocks(net)]
    ['1']
    """
    for name, child in model.named_children():
        parts = list(child.children())
        if isinstance(child, _LISTS) and any(list(part.children()) for part in parts):
            yield from blocks(child, f"{prefix}{name}.")
        elif parts and any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child
