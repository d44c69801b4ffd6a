"""Runs by portable arithmetic: one hash on any machine, and nothing of a run beside its rules."""

import base64
import gc
import json
import os
import re
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from tests.commands import command, ran
from tests.messages import refuses
from tests.run.processes import Process, held_port
from tests.run.runs import DIGITS_NET, TINY, run_here, sets
from torusgd.arithmetic import METHODS, portable
from torusgd.arithmetic.mode import PortableMode
from torusgd.arithmetic.passes import compiled
from torusgd.data.decode import DECODER_SET
from torusgd.errors import RunError
from torusgd.recipe.load import load_recipe
from torusgd.step.forward_backward import portable_price

STEPS = 6
GOLDEN = "78aaee783219be474864b96aaeb97b4504262c988bd28d8be30d6a76ec1882bc"
"""of `digits-portable` after six steps, on every machine; it changes with `arithmetic.VERSION` only"""
FEW = ["--max-steps", "2", *sets("data.eval_images=60", "polish.images=64")]
GOLDEN_OF_FEW = "145fd37e47dce64bf1642ad7a81e78ead28c24ba58cd5a3b9091fbecdcb07419"
"""after two steps, with so few images in the polish: for machines that compute slowly"""

DATA = (
    "precision=portable",
    "data={source: digits, train_images: 60, eval_images: 20, image_size: 8, channels: 1, mean: [0.3], std: [0.4], "
    "augment: {crop: shift, shift: 1, flip: 0.5, rotation: 0.2, noise: 0.1, mixup: 0.8, erase: 0.3}}",
    "virtual_workers=2",
)
WHOLE = (*DATA, "clip_grad_norm=0.5", "average={half_life: 2st}", "label_smoothing=0.1", "polish.images=16")


def test_a_pass_outside_of_portable_arithmetic_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.run.runs.arithmetic_of", lambda recipe: nullcontext())
    refuses("a pass outside of portable arithmetic", run_here, tmp_path, *DATA, kind=RunError)


_NAMES = """
    _has_compatible_shallow_copy_type _local_scalar_dense _reshape_alias _to_copy _unsafe_view abs add add_ alias
    amax amin aminmax as_strided as_strided_ ceil_ clamp clamp_ clamp_min_ clone constant_pad_nd contiguous copy_
    detach detach_ div dropout empty_like eq expand fill_ flatten flip floor_ frexp full_like gather gt index isfinite
    isnan item lift_fresh lt mT
    masked_fill masked_fill_ max maximum mul mul_ nan_to_num narrow ne neg neg_ new_empty new_empty_strided new_ones
    new_zeros ones_like pad permute relu_ reshape resolve_conj resolve_neg round round_ rsub scatter_ select set_
    slice split split_with_sizes squeeze sub sub_ t threshold_backward to transpose trunc unbind unflatten unsqueeze
    view where zero_ zeros_like
"""
SINGLE = set(_NAMES.split())
"""ATen operators that move floats, compare them, or are one IEEE operation"""
OF_RULES = SINGLE | {"mm", "matmul", "bmm", "sum", "sqrt_"}
"""those that rules call: products and sums of integers, and a root of float64"""


def test_no_floating_operator_of_a_run_is_beside_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = PortableMode.__torch_dispatch__

    def marked(self: PortableMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with record_function("a rule"):
            return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(PortableMode, "__torch_dispatch__", marked)
    for name in ("check_stored", "operators_of_passes"):  # which record torch's own operators, and use no value
        monkeypatch.setattr(f"torusgd.run.fingerprint.{name}", lambda *_: ())
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    compiled()  # which is compared with torch's operators once
    gc.collect()  # of what earlier tests left: torch crashed once in a collection while it profiled all threads
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=every_thread) as found:
        run_here(tmp_path / "run", *WHOLE, max_steps=2)
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    outside, inside = floating_operators(json.loads((tmp_path / "trace.json").read_text()))
    assert inside, "rules were profiled"
    assert (outside - SINGLE, inside - OF_RULES) == (set(), set())


def floating_operators(trace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Names of ATen operators with a floating argument: those that go by no rule, and the last ones within rules."""
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            threads.setdefault(event["tid"], []).append(event)
    outside, inside = set[str](), set[str]()
    for events in threads.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        around: list[dict[str, Any]] = []
        for event in events:
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            event["is_inside"] = any(each["name"] == "a rule" for each in around)
            for each in around:
                each["has_rule"] = each.get("has_rule") or event["name"] == "a rule"
            around.append(event)
        for event in events:
            types = event.get("args", {}).get("Input type", ())
            name = event["name"].removeprefix("aten::")
            if name != event["name"] and not event.get("has_rule") and {"float", "double"} & set(types):
                (inside if event["is_inside"] else outside).add(name)
    return outside, inside


def test_a_run_on_odd_memory_has_the_same_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that an operator makes begins four bytes behind where an allocator would put it."""
    dispatch, moved = PortableMode.__torch_dispatch__, set[int]()

    def odd(value: Any, known: set[int]) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(odd(each, known) for each in value)
        is_new = isinstance(value, Tensor) and value.dtype == torch.float32 and value.data_ptr() not in known
        if not is_new or value.numel() < 2 or not (
            value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))
        ):  # fmt: skip
            return value
        room = torch.empty(value.numel() + 1)[1:]
        moved.add(room.data_ptr() % 64)
        return room.as_strided(value.shape, value.stride()).copy_(value)

    def moving(self: PortableMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(self, func, types, args, kwargs)
        if func._schema.is_mutable or any(each.alias_info for each in func._schema.returns):
            return result  # in place, or a view
        return odd(result, {x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)})

    plain, _ = run_here(tmp_path / "plain", *WHOLE, max_steps=2)
    monkeypatch.setattr(PortableMode, "__torch_dispatch__", moving)
    found, _ = run_here(tmp_path / "odd", *WHOLE, max_steps=2)
    assert moved
    assert all(place % 16 for place in moved)
    assert found["weights_sha256"] == plain["weights_sha256"]


@pytest.mark.parametrize("method", ["float32", *(pytest.param(m, marks=pytest.mark.slow) for m in ("float64", "int8"))])
def test_the_golden_hash_by_every_method(tmp_path: Path, method: str) -> None:
    with portable([method]):
        found, _ = run_here(tmp_path, "data.eval_images=60", recipe="digits-portable", tiny=False, max_steps=STEPS)
    assert found["weights_sha256"] == GOLDEN
    assert 0 < found["lost_pairs"] < 0.2


@pytest.mark.gpu
def test_a_gpu_has_the_golden_hash(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", "--device", "cuda") == GOLDEN


def test_a_run_says_before_it_begins_what_a_pass_costs() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    recipe = load_recipe("digits-portable", ["memory_format=contiguous"]).recipe
    with portable():
        line = portable_price(recipe, 10, torch.device("cpu"))
    times = re.fullmatch(r"portable .* by (\w+); a pass of 8 images takes about ([\d.]+) times float32's \(.*\)", line)
    assert times is not None
    assert (times[1] in METHODS, float(times[2]) > 0) == (True, True)
    assert torch.equal(torch.get_rng_state(), state)


# Other data than digits.

IMAGES = "channels: 3, mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]"
SOURCES: dict[str, tuple[str, ...]] = {
    "folder": (
        "a0e1378e7dc206983d22029632afae2816dfd9c216d5fde39f9892b1c07aab2c",
        f"data={{source: folder, image_size: 16, resize: 20, pixels: portable, {IMAGES}, augment: {{crop: resized, "
        "flip: 0.5, policy: trivialaugment, erase: 0.3, mixup: 0.3, cutmix: 2.0}}",
        DIGITS_NET,
    ),
    "synthetic": (
        "a98130dcde99a38758cac8d4287b03770291aeb1e27d0960501d3160c6ecf0b7",
        f"data={{source: synthetic, train_images: 48, eval_images: 20, image_size: 12, classes: 4, {IMAGES}, "
        "augment: {crop: shift, shift: 1, rotation: 0.2, distortion: 0.1, brightness: 0.1, contrast: 1.2}}",
        DIGITS_NET,
        "polish={images_per_batch: 8}",
    ),
    "frames": (
        "270e8a097e1bcccc991d0f5f711f71ca2973aaa709efb0eb243612abb8dc71f2",
        "data={source: frames, train_images: 48, eval_images: 20, classes: 9, image_size: [11, 39], channels: 1, "
        "mean: [0.5], std: [0.2]}",
        "model={name: cd-dnn, options: {hidden: 2, width: 32}}",
    ),
}
"""the hash after three steps, and changes of the recipe"""


def write_pictures(root: Path) -> Path:
    """The decoders' built-in set, JPEGs and PNGs of 14 kinds, as a folder of two classes."""
    pictures = json.loads(files("torusgd.data").joinpath(DECODER_SET).read_text())
    for number, (name, (data, _)) in enumerate(pictures.items()):
        for split in ("train", "val"):
            folder = root / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.{name.split()[0].lower()}").write_bytes(base64.b64decode(data))
    return root


@pytest.mark.parametrize("source", SOURCES)
def test_runs_on_other_data_have_a_hash_too(tmp_path: Path, source: str) -> None:
    golden, *changes = SOURCES[source]
    data = write_pictures(tmp_path / "pictures") if source == "folder" else None
    found, _ = run_here(tmp_path / "run", "precision=portable", *changes, max_steps=3, data=data)
    assert found["weights_sha256"] == golden
    assert found["conditions"] == {"arithmetic": 1, **({"decoder_set": 1} if source == "folder" else {})}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_other_machines_have_the_hash_of_other_data(tmp_path: Path, source: str) -> None:
    golden, *changes = SOURCES[source]
    words = ["--max-steps", "3", "--workers", "2", *sets(*TINY, "precision=portable", *changes)]
    if source == "folder":
        words += ["--data", str(write_pictures(tmp_path / "pictures"))]
    elsewhere = FAR | {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3", "JSIMD_FORCENONE": "1"}
    assert trained(tmp_path / "run", *words, recipe="digits", **elsewhere) == golden


# One hash over ways to divide the work, and over what one machine can show of others.

FAR = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
"""under which this machine's libraries choose other kernels"""


def trained(out: Path, *words: str, recipe: str = "digits-portable", **environment: str) -> str:
    """The hash of a run of `torusgd train`, over the golden hash's steps unless the words say otherwise."""
    words = ("--max-steps", str(STEPS), "--out", str(out), *words)
    known = {name: value for name, value in os.environ.items() if name not in FAR}
    ran(command("train", recipe, *words), timeout=540, env=known | environment)
    return str(json.loads((out / "summary.json").read_text())["weights_sha256"])


def test_ranks_under_other_conditions_train_in_shards_and_go_on_elsewhere(tmp_path: Path) -> None:
    """A step by two ranks, of which one has other kernels; then one rank with a third kind."""
    out, shards = tmp_path / "run", ["--update", "sharded", "--allreduce", "ring"]
    words = command("train", "digits-portable", "--out", out, *FEW, "--max-steps", "1", *shards)
    pair = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held_port())}
    ranks = [Process(tmp_path / str(rank), *words, environment={**pair, "RANK": str(rank), **kernels})
             for rank, kernels in enumerate(({}, FAR))]  # fmt: skip
    assert [rank.end() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert "images takes about" in ranks[0].out, "what it costs is told"
    assert trained(out, *FEW, MKL_CBWR="COMPATIBLE", **pair | {"WORLD_SIZE": "1", "RANK": "0"}) == GOLDEN_OF_FEW
    assert not json.loads((out / "summary.json").read_text())["other_conditions"]


_FLAGS = [
    *(f"--workers {words}" for words in ("2", "3", "5", "2 --work-stealing", "2 --audit 1.0", "3 --update sharded")),
    *(f"--allreduce {words}" for words in ("ring --workers 3", "halving-doubling --workers 2", "auto --workers 2")),
    "--workers 4 --allreduce torus --grid 2x2",
    "--workers 2 --set runtime.weights_first=true",
    *(f"--set {key}" for key in ("threads=2", "threads=3", "threads=4")),
    *(f"--set memory_format={name}" for name in ("contiguous", "channels_last")),
]
WAYS = {flags: flags.split() for flags in _FLAGS}
MACHINES: list[dict[str, str]] = [
    *({"ATEN_CPU_CAPABILITY": value} for value in ("default", "avx2")),
    *({"ONEDNN_MAX_CPU_ISA": value} for value in ("SSE41", "AVX", "AVX2")),
    *({"MKL_ENABLE_INSTRUCTIONS": value} for value in ("SSE4_2", "AVX", "AVX2")),
    *({"MKL_CBWR": value} for value in ("COMPATIBLE", "SSE4_2", "AVX2")),
    {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"}, FAR,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("way", "machine"), [*((way, {}) for way in WAYS), *(("--workers 2", m) for m in MACHINES)])
def test_one_hash_however_a_run_is_divided_and_on_other_machines(tmp_path, way: str, machine: dict[str, str]) -> None:
    assert trained(tmp_path / "run", *WAYS[way], **machine) == GOLDEN


@pytest.mark.slow
def test_column_blocks_have_one_hash_on_one_rank_and_on_two(tmp_path: Path) -> None:
    blocks = sets("column_blocks=2")
    alone = trained(tmp_path / "one", "--workers", "1", *blocks)
    pair = trained(tmp_path / "two", "--workers", "2", "--model-parallel", "2", *blocks, **FAR)
    assert alone == pair != GOLDEN
