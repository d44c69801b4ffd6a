"""The scripts beside the package: each starts; two that put a step together of the package's classes take one."""

import json
import math
import os
import re
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from runpy import run_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from benchmarks import compare, tables
from benchmarks.__main__ import commands, main
from benchmarks.compare import compared
from benchmarks.portable.rules import other_products, with_ratio
from benchmarks.record import RESULTS, recorded, runs, sample
from benchmarks.slow_ranks import late_work
from benchmarks.tables import PAGES, written
from torch._C._autograd import DeviceType

from tests.arithmetic.test_rules import threads
from tests.commands import ran
from torusgd.arithmetic.methods import matmul
from torusgd.data.pipeline import Batch

ROOT = Path(__file__).parents[1]
RANK_ALONE = {  # as torchrun sets them
    "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


@pytest.mark.parametrize("command", [" ".join(name) for name in commands()])
def test_a_benchmark_can_be_started(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """All that it imports is there, and its options are well formed."""
    monkeypatch.setenv("TORUSGD_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [])
    for name in ("PYTHONPATH", "PYTHONHASHSEED"):  # some set them for the processes that they start
        monkeypatch.setenv(name, os.environ.get(name, "0" if name == "PYTHONHASHSEED" else ""))
    main([*command.split(), "--help"])
    assert "usage:" in capsys.readouterr().out.lower(), "it runs"


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "step audit --rounds 1 --steps 1", "input node-memory --megabytes 1", "slow-ranks synchrony local --seeds 2",
    "allreduce exact-all-reduce --elements 100 --repetitions 2", "input decode --rounds 2 --height 60 --width 80",
])  # fmt: skip
def test_a_benchmark_leaves_its_record(command: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "TORUSGD_RESULTS": str(tmp_path)}
    environment |= RANK_ALONE if command.startswith("allreduce") else {}
    for number in (1, 2):
        ran([sys.executable, "-m", "benchmarks", *command.split()], cwd=ROOT, env=os.environ | environment)
        (file,) = tmp_path.glob("*.json")
        found = runs(file)
        assert len(found) == number
    assert found[-1]["command"] == f"python -m benchmarks {command}"
    assert {"commit", "date", "processor", "versions", "load"} < set(found[-1])
    assert all(found[-1]["samples"].values())


def test_a_run_that_fails_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORUSGD_RESULTS", str(tmp_path))
    with suppress(SystemExit), recorded("x", "x"):
        sample("a, ms", [1.0])
        sys.exit(1)
    assert not list(tmp_path.iterdir())
    with recorded("x", "x"):
        sample("a, ms", [1.0])
        sample("a, ms", [2.0])
    assert runs(tmp_path / "x.json")[0]["samples"] == {"a, ms": [1.0, 2.0]}


def test_what_moved_by_more_than_its_spread_is_named() -> None:
    def run(command: str, *values: float) -> dict[str, Any]:
        about = {"commit": "a", "date": "2026-11-23", "processor": "p", "load": [0.0, 0.0]}
        return {"command": command, **about, "samples": {"x, ms": list(values)}}

    before, other = run("a", 1.0, 1.1, 1.2, 1.3, 1.4), run("b", 9.0)
    assert compared([before]) == []
    assert compared([before, other, run("a", 2.0, 2.1, 2.2, 2.3, 2.4)])[1].endswith("MOVED")
    assert compared([before, run("a", 1.1, 1.2, 1.3, 1.4, 1.5)])[1] == "  x, ms: 1.2 to 1.3 (+8.3%)"
    assert compared([before, run("a", 2.0)])[1].endswith("n 1"), "one sample can't say"


@pytest.mark.slow
def test_what_has_moved_since_the_run_before_is_shown(tmp_path: Path, monkeypatch, capsys) -> None:
    """Of all records, with two runs of today among them."""
    shutil.copytree(RESULTS, tmp_path / "results")
    monkeypatch.setenv("TORUSGD_RESULTS", str(tmp_path / "results"))
    command = "input node-memory --megabytes 1"
    for _ in range(2):
        with suppress(SystemExit):
            main(command.split())
    compare.main(tmp_path / "results")
    shown = capsys.readouterr().out
    for path in sorted((tmp_path / "results").glob("*.json")):
        found = runs(path)
        if isinstance(found, list) and any(each["command"] == found[-1]["command"] for each in found[:-1]):
            assert all(f"  {name}: " in shown for name in found[-1]["samples"]), path
    assert f"python -m benchmarks {command}: " in shown
    with capsys.disabled():
        print(shown)


def test_tables_of_the_docs_are_those_of_the_results() -> None:
    """`python -m benchmarks.tables` writes them."""
    pages = {page: page.read_text() for page in PAGES}
    assert any("<!-- benchmarks.tables: " in text for text in pages.values())
    assert all(written(text) == text for text in pages.values())


def test_all_reduces_by_auto_beside_the_best_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    case = "far, plain, 4096 bytes, 1 streams"
    times = {"native": 90.0, "auto": 10.0, "ring": 20.0, "direct": 9.0}
    samples = {f"{case}, {name}, ms": [each] * 7 for name, each in times.items()}
    samples |= {f"{case}, auto, skew and error of clocks, ms": [1.0], f"{case}, auto, ran as x": [7.0]}
    found = [{"command": "c", "load": [0.1, 2], "samples": each} for each in (samples, {f"{case}, ring, ms": [1.0]})]
    (tmp_path / "allreduce-allreduce.json").write_text(json.dumps(found))
    (row,) = tables.all_reduces().splitlines()[2:]
    assert row[7:] == "plain | 4,096 | x | 10.0 (10.0 to 10.0) | direct, 9.0 | 0.90 | 9.00 | 8 | 1.0 * | 7 | 0 to 2 |"


def test_the_steps_of_step_overhead_and_of_hybrid() -> None:
    script = run_module("benchmarks.step.step_overhead")
    case = script["Case"]("digits-net", size=8, channels=1, classes=10, images=4, precision="float32")
    batch = Batch(torch.randn(4, 1, 8, 8), torch.arange(4), np.arange(4), replaced=0)
    with threads(torch.get_num_threads()):
        script["bare_step"](case, batch, workers=2)(0)
        for reduction in ("float32", "exact"):
            stats = script["our_step"](case, reduction, batch, workers=2)(0)
            assert stats.step.index == 0
            assert 1.0 < stats.loss < 5.0, "of ten classes, untrained"
    step = run_module("benchmarks.rehearse.hybrid")["make_step"](images=2, parallel=1)
    step()
    step()


def test_the_section_that_the_gpu_benchmark_writes() -> None:
    """From raw figures: what a part measured, and what failed."""
    script = run_module("benchmarks.gpu.gpu_section")
    result = {
        "date": "2026-11-22", "command": "python -m benchmarks gpu gpu", "device": "cuda",
        "machine": {"gpu": "NVIDIA H200", "torch": "2.15.0", "copy_gb_per_s": [4000.0, 4300.0, 4200.0]},
        "hashes": {"steps": 20, "digits": {"a run on 1 rank": "a", "the same on 2 ranks": "a"},
                   "resnet50": {"a run on 1 rank": "a", "the same on 2 ranks": "b"}},
        "speed": {
            "precision": "bfloat16", "network": "resnet50", "pixels": 224,
            "seconds": {"64": {
                script["PEER"]: [0.02, 0.02, 0.025], script["FLOAT"]: [0.01, 0.01, 0.01],
                script["EXACT"]: [0.0102, 0.0102, 0.0103], script["RUN"]: [0.0204, 0.0204, 0.0204],
            }},
        },
        "parts": {"seconds": {"32": {script["GRAPHS"]: [0.01], "graphs without copies": [0.0103]}}},
        "precision": {"error": "OutOfMemoryError: no"},
        "streams": {"images": 16, "seconds": {"1": [0.02, 0.02, 0.03], "2": [0.016, 0.016, 0.016]}},
        "step": {"error": "the time is up"},
    }  # fmt: skip
    text = script["section"](result)
    for line in (
        "- 4200 GB/s copied",
        "- digits, weights after 20 steps, a run on 1 rank; the same on 2 ranks: one hash",
        "- resnet50, weights after 20 steps, a run on 1 rank; the same on 2 ranks: DIFFERENT HASHES",
        "| 64 | torusgd, exact sums | 6,274.5 | 6,213.6 - 6,274.5 | 1.961 |",
        "- 64 images: exact sums cost +2.0% of a step, deterministic algorithms +100.0%",
        *("- 32 images, graphs without copies: 10.30 ms a step, +3.0%", "- precision failed: OutOfMemoryError: no"),
        "- two passes of 16 images at once: 1.250 times as fast as in turn",
        f"- 64 images: aim 4,500 images/s, missed: 3,137 ({script['RUN']})",
        "- 64 images: aim, at least the plain loop, missed: 0.980 of it",
    ):
        assert line in text
    assert "on a CPU" not in text
    assert script["section"](result | {"device": "cpu"}).splitlines()[2] == script["TRIAL"]
    assert script["put_section"]("", text).startswith(script["BEGIN"]), "a page that is not there yet"
    once = script["put_section"]("# Benchmarks\n", text)
    again = script["put_section"](once + "\n## More\n", text.replace("4200", "4100"))
    assert re.fullmatch(r"# Benchmarks\n(?!.*4200 GB/s).*4100 GB/s.*## More\n", again, re.DOTALL)


def test_the_gpu_benchmark_on_the_cpu() -> None:
    """Each part that starts no ranks, at a tiny size."""
    script = run_module("benchmarks.gpu.gpu")
    words = "--device cpu --model fashion-net --pixels 16 --images 2 --rounds 1 --steps 1 --no-compile"
    args = script["parse"](words.split())
    assert args.docs is None
    args.until = math.inf
    speed = script["speed"](args)["seconds"]["2"]
    assert set(speed) == {script[name] for name in ("PEER", "FLOAT", "EXACT", "RUN", "GRAPHS")}
    assert all(len(times) == 1 for times in speed.values())
    assert all(script["counts"](args)[form]["operators"] > 100 for form in ("plain", "graphs"))


def test_the_gpu_benchmark_counts_what_the_host_asks_for_in_the_step_alone() -> None:
    """Not its own wait after the step, and no copy twice, for the host and for the GPU."""
    script = run_module("benchmarks.gpu.gpu")

    def event(name: str, begin: float, end: float, device: Any) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=begin, end=end))

    on_host = {
        script["STEP"]: (10.0, 2010.0), "aten::add_": (20.0, 30.0), "cudaLaunchKernel": (21.0, 22.0),
        "cuLaunchKernelEx": (31.0, 32.0), "cudaGraphLaunch": (40.0, 41.0), "cudaMemcpyAsync": (42.0, 43.0),
        "cudaMemsetAsync": (44.0, 45.0), "cudaDeviceSynchronize": (2020.0, 3000.0),
    }  # fmt: skip
    on_device = {
        "kernel": (25.0, 26.0), "another kernel": (2500.0, 2600.0), "Memcpy HtoD (Pinned -> Device)": (50.0, 51.0),
        script["STEP"]: (25.0, 2600.0),
    }  # fmt: skip
    found = script["counted"](
        [event(name, *times, device) for device, events in ((DeviceType.CPU, on_host), (DeviceType.CUDA, on_device))
         for name, times in events.items()]
    )  # fmt: skip
    assert found == {
        "host_seconds": pytest.approx(0.002), "operators": 1, "kernels": 2, "launches": 2, "graphs": 1, "copies": 1,
        "clears": 1, "synchronisations": 0,
    }  # fmt: skip


def test_the_gpu_benchmark_lets_the_plain_loop_have_all_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run forbids itself for its bits, in the same process, slows down nobody beside it."""
    script = run_module("benchmarks.gpu.gpu")
    seen: dict[str, tuple[bool, bool]] = {}

    def step_of(name: str) -> Any:
        deterministic = torch.are_deterministic_algorithms_enabled
        return lambda index: seen.update({name: (torch.backends.cudnn.benchmark, deterministic())})

    words = "--device cpu --rounds 1 --steps 1 --model resnet18 --pixels 16"
    args = script["parse"](words.split())
    make, names = script["Program"], {script["PEER"]: True, script["COMPILED"]: True, script["RUN"]: False}
    programs = {name: make(partial(step_of, name), not timed, timed) for name, timed in names.items()}
    script["in_turn"](args, programs)
    assert list(seen.values()) == [(True, False), (True, False), (False, True)]
    assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch, "compile", compiled := Mock(side_effect=lambda model, **options: model))
    script["peer_step"](args, 2, compiled=True)
    options = {"deterministic": False, "triton.cudagraphs": False}
    assert [call.kwargs for call in compiled.call_args_list] == [{"options": options}], "Inductor may time its kernels"


def test_the_gpu_benchmark_first_asks_for_repeatable_products_and_keeps_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch decides at a process' first product whether any may follow under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    script = run_module("benchmarks.gpu.gpu")
    script["PARTS"].clear()
    script["PARTS"]["machine"] = lambda args: {"config": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}
    script["PARTS"]["hashes"] = lambda args: {"hash": 1}
    kept: list[str] = []
    script["run"](script["parse"](["--device", "cpu"]), lambda result: kept.append(json.dumps(result)))
    assert kept == [
        '{"machine": {"config": ":4096:8"}, "hashes": {"error": "the run was cut short"}}',
        '{"machine": {"config": ":4096:8"}, "hashes": {"hash": 1}}',
    ]


@pytest.mark.parametrize(("words", "listed", "code"), [
    ("", 20, 0), ("--help", 20, 0), ("elastic", 3, 0), ("slow_ranks --help", 3, 0), ("nope", 20, 2),
    ("step nope", 3, 2),
])  # fmt: skip
def test_the_list_of_benchmarks(words: str, listed: int, code: int) -> None:
    done = ran([sys.executable, "-m", "benchmarks", *words.split()], cwd=ROOT, code=code)
    assert len(done.stdout.splitlines()) >= listed
    assert ("none of that name" in done.stderr) == (code == 2)


@pytest.mark.parametrize("delays", late_work.DELAYS.values())
def test_late_work_is_done_by_others_in_less_time(delays: str) -> None:
    """Rules that leave nothing out, and those that do, on the same delays; stealing never takes longer."""
    clock, taken = late_work.Clock(late_work.one_slow(delays, 0)), dict[str, float]()
    for name, rule in late_work.RULES.items():
        steps = list(rule(clock))
        taken[name] = sum(seconds for seconds, _ in steps[late_work.WARMUP :])
        is_exact = all(sorted(pieces) == list(late_work.ALL) for _, pieces in steps)
        assert is_exact == (name not in ("Cutoff", "DropCompute"))
    assert taken["work stealing"] < taken["synchronous"]
    assert taken["shares by speed"] <= taken["synchronous"]
    assert taken["DropCompute"] < taken["synchronous"]
    if delays.startswith("slow"):
        assert taken["shares by speed"] < taken["work stealing"]


def test_products_that_version_1_is_not_are_near_it_and_worse() -> None:
    a, b = with_ratio((64, 96), 10, 1), with_ratio((96, 32), 10, 2)
    right = a.double() @ b.double()
    errors = [(each.double() - right).norm() / right.norm() for each in (matmul(a, b), *other_products(a, b).values())]
    assert 0 < errors[0] < errors[2] < errors[1] < 1e-2
