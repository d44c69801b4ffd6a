"""What a process is prepared with before it computes."""

import os
import sys

import pytest
import torch

from tests.commands import ran
from torusgd import runtime
from torusgd.recipe.load import load_recipe

PAGES = """
import resource
import numpy
from torusgd.runtime import keep_freed_memory
keep_freed_memory()
taken = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
numpy.empty(64 << 20, numpy.uint8).fill(1)
before = taken()
for _ in range(4):
    numpy.empty(64 << 20, numpy.uint8).fill(1)
print(taken() - before)
"""


def pages_taken_again(**environment: str) -> int:
    """Pages that the system hands out anew when 64 MiB are freed and taken four times."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    return int(ran([sys.executable, "-c", PAGES], env=clean | environment).stdout)


def test_freed_memory_stays_for_the_next_step_unless_the_environment_tunes_the_allocator():
    assert pages_taken_again() < 1000
    assert pages_taken_again(MALLOC_TOP_PAD_="131072") > 4 * (64 << 20) // (2 << 20)


@pytest.mark.parametrize(("capability", "wanted"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((10, 0), "bfloat16")])
def test_auto_takes_the_16_bit_type_of_the_tensor_cores(monkeypatch, capability, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # so says torch of emulation too
    resolved = runtime.resolve_auto(load_recipe("digits", ["precision=auto", "memory_format=auto"]).recipe, "cuda")
    assert (resolved.precision, resolved.memory_format) == (wanted, "channels_last")


@pytest.mark.gpu
def test_auto_on_the_gpu_at_hand():
    recipe = load_recipe("digits", ["precision=auto"]).recipe
    fast = torch.cuda.is_bf16_supported(including_emulation=False)
    assert runtime.resolve_auto(recipe, "cuda").precision == ("bfloat16" if fast else "float16")


@pytest.mark.parametrize(("recipe", "reduction", "is_asked"), [
    ("digits", "exact", True), ("digits", "float32", False), ("digits-portable", "exact", False),
])  # fmt: skip
def test_no_algorithm_is_chosen_by_timing(monkeypatch, recipe, reduction, is_asked):
    """What CUDA is set to needs no GPU; deterministic algorithms are not asked for where all sums are exact."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        runtime.prepare_process(load_recipe(recipe, [f"reduction={reduction}"]).recipe, torch.device("cuda"))
        assert not torch.backends.cudnn.benchmark
        assert torch.are_deterministic_algorithms_enabled() == is_asked
    finally:
        torch.use_deterministic_algorithms(False)
