"""Blocks that are compiled: which they are, who can't have them, and that they are trained with bits that repeat."""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from tests.messages import refused
from tests.run.runs import TINY, run_here
from torch import nn

from torusgd.models.networks import resnet50
from torusgd.models.registry import blocks, compile_blocks
from torusgd.recipe.load import load_recipe

CPU = torch.device("cpu")


def test_residual_networks_are_compiled_block_by_block_and_layers_alone_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        found = dict(blocks(resnet50(classes=10, channels=3)))
    assert list(found) == [f"layer{i + 1}.{j}" for i, depth in enumerate((3, 4, 6, 3)) for j in range(depth)]
    asked: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(self))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    monkeypatch.setattr(torch._inductor, "config", SimpleNamespace(deterministic=False))
    assert compile_blocks(net, CPU) == [""]
    assert asked == [net]


def test_who_cannot_compile_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with refused("compile without a compiler"):
        compile_blocks(nn.Linear(2, 2), CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("compile without Triton"):
        compile_blocks(nn.Linear(2, 2), torch.device("cuda"))
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch._inductor, "config", SimpleNamespace())
    with refused("compile by a torch that may time kernels", TORCH=torch.__version__):
        compile_blocks(nn.Linear(2, 2), CPU)
    with refused("compile of a network in column blocks"):
        load_recipe("digits", [*TINY, "compile=true", "column_blocks=2"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_run_repeats_its_bits_and_is_about_as_accurate(tmp_path: Path) -> None:
    def run(name: str, *changes: str) -> dict[str, Any]:
        return run_here(tmp_path / name, "rate={lr: 0.05}", *changes)[0]

    plain, *both = run("plain"), run("first", "compile=true"), run("second", "compile=true")
    assert both[0]["weights_sha256"] == both[1]["weights_sha256"]
    assert both[0]["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-3)
