"""One machine as many: the same weights under other instruction sets, threads, libraries and methods."""

import ast
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.arithmetic.small_training import train
from tests.commands import ran

import torusgd
from torusgd.arithmetic import (
    METHODS,
    VERSION,
    Bits,
    convolution,
    counting,
    draws,
    functions,
    passes,
    portable,
    reductions,
)  # fmt: skip
from torusgd.arithmetic.draws import bernoulli_
from torusgd.arithmetic.methods import order_of_preference
from torusgd.arithmetic.scales import Pairs

# Of five steps, on every machine; it changes with `arithmetic.VERSION` and with the network only.
GOLDEN = "31247c0ebc40597fc70344a9e26d9977e06a93e267cc0ad78f5e7ec19bbf26cc"
FAR = {
    "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3", "OMP_NUM_THREADS": "3",
}  # fmt: skip
# torch refuses a capability that the processor lacks.
CAPABILITIES = ["default", *(name for name in ("avx2", "avx512") if name in Path("/proc/cpuinfo").read_text())]
VALUES = {
    "ATEN_CPU_CAPABILITY": CAPABILITIES, "ONEDNN_MAX_CPU_ISA": ["SSE41", "AVX", "AVX2", "AVX512_CORE"],
    "MKL_ENABLE_INSTRUCTIONS": ["SSE4_2", "AVX", "AVX2"], "MKL_CBWR": ["COMPATIBLE", "SSE4_2", "AVX2"],
    "OMP_NUM_THREADS": ["1", "2", "3", "4"],
}  # fmt: skip
SETTINGS: list[dict[str, str]] = [{}, *({name: each} for name, values in VALUES.items() for each in values), FAR]


def run(settings: dict[str, str], *words: str) -> str:
    """The hash that a process of its own prints."""
    script = Path(__file__).with_name("small_training.py")
    known = {key: value for key, value in os.environ.items() if key not in FAR}
    environment = known | {"OMP_NUM_THREADS": "1"} | settings
    return ran([sys.executable, script, *words], timeout=300, env=environment).stdout.strip()


def test_the_hash_is_the_golden_one_under_the_farthest_settings_too() -> None:
    assert VERSION == 1
    assert train(portable()) == GOLDEN
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, (FAR, {}), ("portable", "portable"), ("float32", "int8")))
    assert found == [GOLDEN, GOLDEN]


@pytest.mark.parametrize("size", [1 << 24, 1 << 9])
def test_blocks_of_any_size_give_the_golden_hash(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones as a GPU takes them."""
    for module in (convolution, functions, passes, reductions):
        monkeypatch.setattr(module, "at_a_time", lambda device, in_cache=0: size)
    monkeypatch.setattr(passes, "compiled", lambda: "not asked for")
    assert train(portable()) == GOLDEN


def test_draws_on_a_device_are_those_of_the_host() -> None:
    """As those of a pass that a CUDA graph replays: each call has the bits that it would have taken."""
    bits, shares = Bits(torch.device("cpu")), torch.linspace(0.1, 0.9, 5)
    torch.manual_seed(3)
    expected = [bernoulli_(torch.empty(7, 300), float(share)) for share in shares]
    left = torch.get_rng_state()
    torch.manual_seed(3)
    bits.draw(len(shares))
    assert torch.equal(torch.get_rng_state(), left)
    for _ in range(2):
        with bits.given():
            found = [bernoulli_(torch.empty(7, 300), float(share)) for share in shares]
        assert bits.count == len(shares)
        assert all(map(torch.equal, expected, found))
    assert 0 < expected[0].mean() < expected[-1].mean() < 1


def test_a_pass_with_more_draws_than_there_is_room_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_MOST_CALLS", 2)
    bits = Bits(torch.device("cpu"))
    with bits.given():
        for _ in range(2):
            bernoulli_(torch.empty(1))
        with pytest.raises(RuntimeError, match="draws more than 2 times"):
            bernoulli_(torch.empty(1))
    bits.draw(bits.count)  # as a plain pass goes on


@pytest.mark.slow
@pytest.mark.parametrize("method", ["float64", "float32", "int8"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda found: " ".join(map("=".join, found.items())) or "plain")
def test_one_hash_under_every_setting(method: str, settings: dict[str, str]) -> None:
    assert run(settings, "portable", method) == GOLDEN


@pytest.mark.slow
def test_float32_has_several_hashes_under_these_settings() -> None:
    assert len({run(settings, "float32") for settings in ({}, FAR, *SETTINGS[1:5])}) > 1, "they would prove nothing"


FLUSHED = """
import torch
torch.set_num_threads(2)
torch.set_flush_denormal(True)
torch.ones(1 << 20) * 2  # the other thread begins here
from torusgd.arithmetic import portable
with portable():
    pass
"""


def test_threads_that_take_denormals_for_zero_are_refused() -> None:
    """Half of a large tensor's denormals would be 0."""
    done = ran([sys.executable, "-c", FLUSHED], code=1)
    assert "UserError: portable arithmetic: torch's threads take denormals for 0" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_has_the_golden_hash_by_every_method(method: str) -> None:
    """Where it has the method: one that is inexact on this device leaves none, which is an error."""
    if method not in order_of_preference(torch.device("cuda"), torch.get_num_threads()):
        pytest.skip(f"no {method} on this device")
    assert train(portable([method]), device="cuda") == GOLDEN


@pytest.mark.gpu
def test_products_by_tf32_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert train(portable(), device="cuda") == GOLDEN


@pytest.mark.gpu
def test_a_gpus_backward_passes_are_counted_too() -> None:
    """They run in the thread that counts, and not in one of autograd's for the GPU."""

    def pairs(device: str) -> Pairs:
        torch.manual_seed(0)
        with portable(), counting() as found:
            layer = torch.nn.Linear(64, 64)
            layer.to(device)(torch.randn(8, 64).to(device)).square().sum().backward()
        return found

    assert pairs("cuda") == pairs("cpu")


# Of the package: what is on the way to a weight.
ON_THE_WAY = [
    "arithmetic", "gradients", "models", "optim", "tensor_parallel", "recipe/schedule.py", "rng.py",
    *(f"comm/{name}.py" for name in ("exact_sum", "fixed_point")),
    *(f"step/{name}.py" for name in ("batchnorm", "control_vector", "forward_backward", "model_state", "polish")),
    *(f"data/{name}.py" for name in ("arrays", "augment", "geometry", "order", "pipeline", "to_device")),
]  # fmt: skip
OFF_THE_WAY = {"layout.py"}  # files there that decide the time alone
# Of `math`: constants, single operations, and what rounds once.
EXACT = ("sqrt", "floor", "ceil", "fsum", "prod", "inf", "nan", "pi", "e", "isfinite", "isinf", "isnan")
# Sums of Python's that round nothing.
OF_INTEGERS = {
    "sum(counts)",
    "sum((b.length for b in buckets))",
    "sum((len(each.gradients) for each in self._arrived))",
    "sum((samples >= milestone for milestone in self._milestones))",
    "sum((shape.numel() for shape in shapes))",
    "sum((slot.tensor.numel() for slot in layout.slots))",
    "sum((part.numel() for part in parts))",
    "sum(self._sections)",
    # bytes, by which ranks share a layer: the time alone
    "sum(hybrid_volume(inputs, weights, nodes, batch, g, overlap))",
    # float64 of 16 bits each
    "sum((((bits >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48)))",
}
SUMS = {ast.unparse(ast.parse(text)) for text in OF_INTEGERS}


@pytest.mark.parametrize("place", ON_THE_WAY)
def test_no_library_is_asked_for_a_power_or_a_function(place: str) -> None:
    root = Path(torusgd.__file__).parent / place
    assert root.exists(), "a place that is gone would be looked through in vain"
    found = []
    for path in [root] if root.is_file() else root.rglob("*.py"):
        for node in () if path.name in OFF_THE_WAY else ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.BinOp(left=ast.Constant(value=2), op=ast.Pow()):
                    continue
                case ast.BinOp(op=ast.Pow()):
                    found.append((path.name, node.lineno, "a power of another number than 2"))
                case ast.Attribute(value=ast.Name(id="math"), attr="erf") if path.name == "operations.py":
                    continue  # which compares it with what is right
                case ast.Attribute(value=ast.Name(id="math"), attr=name) if name not in EXACT:
                    found.append((path.name, node.lineno, f"math.{name}"))
                case ast.Call(func=ast.Name(id="sum")) if (text := ast.unparse(node)) not in SUMS:
                    found.append((path.name, node.lineno, f"{text}, whose rounding of floats changes by version"))
    assert not found
