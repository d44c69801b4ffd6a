"""Before a run: layers that torch refuses are named, blocks compiled with bits that repeat, or who can't is told."""

import importlib.util
import re
import shutil
import struct
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from tests.messages import refused, refuses
from tests.run.runs import TINY, run_here
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.comm.base import Liveness
from torusgd.models import repeatable
from torusgd.models.networks import resnet50
from torusgd.models.repeatable import blocks, check_compiler, check_repeatable, compile_blocks, drop_torn_libraries
from torusgd.recipe.load import load_recipe

RECIPE = load_recipe("digits", []).recipe  # of 8 x 8 images with one channel


def ready(*pooling: nn.Module) -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), *pooling]
    made = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)).train()
    made(torch.zeros(2, 1, 8, 8))
    return made


class RefusesAsCuda(TorchDispatchMode):
    """Torch's refusal of an operation on a GPU, on the CPU."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "_adaptive_avg_pool2d_backward":
            raise RuntimeError(f"{name}_cuda does not have a deterministic implementation, but you set ...")
        return function(*arguments, **(keywords or {}))


def test_the_layer_is_named_in_one_line_be_it_refused_on_a_gpu_or_on_the_cpu() -> None:
    made = ready(nn.AdaptiveAvgPool2d(2), nn.Tanh())
    with refused("a layer that CUDA refuses", "model.name: digits-net, layer 3 "), RefusesAsCuda():
        check_repeatable(made, RECIPE)
    with RefusesAsCuda():
        check_repeatable(made, load_recipe("digits-portable", []).recipe)  # whose rules take the operation's place

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.clone().put_(torch.tensor([0]), torch.tensor([0.0]))

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scatter.apply(x)

    refuses("a layer that torch refuses", check_repeatable, ready(Layer()), RECIPE)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_network_that_repeats_is_left_as_it_is_and_other_errors_stay_what_they_are() -> None:
    made = ready(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5))
    before, state = {k: v.clone() for k, v in made.state_dict().items()}, torch.random.get_rng_state()
    with RefusesAsCuda():
        check_repeatable(made, RECIPE)
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in made.parameters())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        check_repeatable(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), RECIPE)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    refuses("a pooling layer that CUDA refuses", check_repeatable, ready(nn.AdaptiveAvgPool2d(2)).cuda(), RECIPE)
    check_repeatable(ready(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)).cuda(), RECIPE)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_max_pooling_has_the_same_gradient_again_on_a_gpu(layout: torch.memory_format) -> None:
    """Its windows overlap, and many of their elements are equal."""
    x = torch.randint(0, 8, (32, 64, 56, 56), device="cuda").bfloat16().contiguous(memory_format=layout)
    x.requires_grad_()
    grad = torch.randn(32, 64, 28, 28, device="cuda").bfloat16().contiguous(memory_format=layout)
    found = [torch.autograd.grad(nn.functional.max_pool2d(x, 3, 2, 1), x, grad)[0] for _ in range(20)]
    assert all(torch.equal(found[0], each) for each in found)


CPU = torch.device("cpu")


def test_residual_networks_are_compiled_block_by_block_and_layers_alone_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        found = dict(blocks(resnet50(classes=10, channels=3)))
    assert list(found) == [f"layer{i + 1}.{j}" for i, depth in enumerate((3, 4, 6, 3)) for j in range(depth)]
    asked: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(self))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    monkeypatch.setattr(import_module("torch._inductor"), "config", SimpleNamespace(deterministic=False))
    monkeypatch.setattr(repeatable, "check_compiler", lambda compiler, folder: None)
    compile_blocks(net, CPU)
    assert asked == [net]


def test_who_cannot_compile_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    refuses("compile without a compiler", compile_blocks, nn.Linear(2, 2), CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("compile without Triton", compile_blocks, nn.Linear(2, 2), torch.device("cuda"))
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(import_module("torch._inductor"), "config", SimpleNamespace())
    refuses("compile by a torch that may time kernels", compile_blocks, nn.Linear(2, 2), CPU, TORCH=torch.__version__)
    refuses("compile of a network in column blocks", load_recipe, "digits", [*TINY, "compile=true", "column_blocks=2"])


def test_a_compiler_whose_libraries_cannot_be_had_is_told_before_the_first_step(tmp_path: Path) -> None:
    hidden = {"TMP": tmp_path, "MADE": re.compile(r"(?<=TMP/)tmp\w+")}
    refuses("a compiler that fails", check_compiler, "false", str(tmp_path), about="compile: true", **hidden)
    torn = tmp_path / "c++"
    torn.write_text("#!/bin/sh\nwhile [ $1 != -o ]; do shift; done; : > $2\n")
    torn.chmod(0o755)
    refuses("a compiler's library that doesn't load", check_compiler, str(torn), str(tmp_path), **hidden)
    assert [*tmp_path.iterdir()] == [torn]


def test_each_beginning_of_a_compiler_is_told_in_a_run_and_to_nobody_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By torch's tracer alone, without Inductor, which takes many seconds."""
    from torch._dynamo.callback import callback_handler

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(repeatable, "check_compiler", lambda compiler, folder: None)
    told, before = list[None](), [*callback_handler.start_callbacks]
    monkeypatch.setattr(Liveness, "compiles", lambda self: told.append(None))
    compile_it = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_it(self, backend="eager", **options))
    run_here(tmp_path / "run", "compile=true", "polish=null", max_steps=1)
    assert len(told) >= 2, "in training and in evaluation"
    assert callback_handler.start_callbacks == before


def test_a_library_whose_compiler_was_killed_is_compiled_anew_and_one_at_work_is_left_alone(tmp_path: Path) -> None:
    header = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<QLHHHHHH", 100, 0, 64, 56, 0, 64, 2, 1)
    whole = header.ljust(100 + 2 * 64, b"\0")  # two rows of 64 bytes from byte 100
    held = {"whole": whole, "empty": b"", "short": whole[:-1], "header": whole[:20], "unfinished": bytes(len(whole))}
    others = {"at work": b"", "other": b"\xcf\xfa\xed\xfe" + bytes(100), "old": b"\x7fELF\1\1" + bytes(60)}
    for name, data in (held | others).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.main.so").write_bytes(data)
    with FileLock(tmp_path / "at work.lock"):
        (tmp_path / "locks").mkdir()
        (tmp_path / "locks" / "at work.lock").symlink_to(tmp_path / "at work.lock")
        drop_torn_libraries(tmp_path)
    assert sorted(path.parent.name for path in tmp_path.glob("*/*.so")) == ["at work", "old", "other", "whole"]
    drop_torn_libraries(tmp_path / "none")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_run_repeats_its_bits_and_is_about_as_accurate(tmp_path: Path) -> None:
    def run(name: str, *changes: str) -> dict[str, Any]:
        return run_here(tmp_path / name, "rate={lr: 0.05}", *changes)[0]

    plain, *both = run("plain"), run("first", "compile=true"), run("second", "compile=true")
    assert both[0]["weights_sha256"] == both[1]["weights_sha256"]
    assert both[0]["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_run_that_is_resumed_has_the_same_bits(tmp_path: Path) -> None:
    """Its blocks meet more shapes than the eight of one class that torch compiles by itself."""

    def run(name: str, steps: int) -> str:
        torch.compiler.reset()  # as in a process of its own
        changes = ("compile=true", "model={name: resnet18}", "rate={lr: 0.01}", "polish=null")
        return run_here(tmp_path / name, *changes, max_steps=steps)[0]["weights_sha256"]

    whole = run("whole", 4)
    run("cut", 2)
    assert run("cut", 4) == whole
