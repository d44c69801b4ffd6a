"""Compiles every Triton kernel that a step launches, for a GPU that need not be there: `python FILE CAPABILITY`.

Prints for each kernel its name, and what of its assembly rounds: its fused multiply-adds of float32, and whether a
division or a root is approximate. Not under Triton's interpreter.
"""

import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from torusgd.cuda import triton_kernels
from torusgd.cuda.flat_weights import Update
from torusgd.cuda.sums import Verdict
from torusgd.optim.lars import VARIANTS


def compile_instead(capability: int) -> None:
    """From now on a launch compiles its kernel for these arguments, and launches nothing."""

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        options = {key: keywords.pop(key) for key in ("enable_fp_fusion",) if key in keywords}
        types = {name: mangle_type(value) for name, value in zip(kernel.arg_names, arguments, strict=False)}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=keywords)
        assembly = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        is_near = re.search(r"\b(div|sqrt|rcp)\.(full|approx)", assembly) is not None
        print(kernel.__name__, len(re.findall(r"\bfma\.rn\.f32", assembly)), "approximate" if is_near else "exact")

    JITFunction.run = run


def launch_all() -> None:
    """Each kernel in each of its forms."""
    tensor, one = torch.zeros(4, 3, 2, 2), torch.ones(1)
    scales, message = torch.ones(1), torch.zeros(52, dtype=torch.int32)
    found, wide = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.float64)
    control = torch.zeros(4 * 3 + 2, dtype=torch.int64)
    for dtype in (torch.int32, torch.int64):
        sums = message.to(dtype)
        triton_kernels.add_gradients([tensor], scales, sums, found)
        triton_kernels.add_bounds(found, scales, sums, 48, 8.0, 2.0**27)
        triton_kernels.mean([sums[:48]], scales, 1.0, [tensor])
        triton_kernels.verdict(
            Verdict(
                [sums[48:]], control, control[:2], 3, 8.0, 2**31 - 1, 2**33, one, wide, scales, scales, torch.zeros(2),
                torch.zeros(2), wide,
            )
        )  # fmt: skip
    for is_first in (True, False):
        triton_kernels.add_statistics(torch.zeros(4, 3, dtype=torch.int64), torch.zeros(2), one, is_first)
    for images in (torch.zeros(4, 3, 2, 2), torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)):
        triton_kernels.look_up(images.byte(), torch.zeros(3, 256), images)
    values = torch.zeros(1, 5, dtype=torch.float64)
    for rule, momentum in (("sgd", 0.9), ("nesterov", 0.9), *((variant, 0.9) for variant in VARIANTS), ("sgd", 0.0)):
        triton_kernels.update(Update(torch.zeros(48), torch.zeros(48), [tensor], one, values, [0], momentum, rule, 1.0))


if __name__ == "__main__":
    compile_instead(int(sys.argv[1]))
    launch_all()
