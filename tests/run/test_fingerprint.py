"""One value says whether ranks, or parts of a run, belong together: recipe, data, weights, operators, conditions."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.comm.gloo_world import on_ranks
from tests.run.processes import RECIPE, run_alone
from tests.run.runs import run_here
from torusgd.arithmetic import operators_of
from torusgd.arithmetic.mode import PortableMode, _Recorder
from torusgd.comm.groups import group_of
from torusgd.data.file_lists import Names
from torusgd.data.pictures import PictureFiles, list_pictures
from torusgd.data.registry import data_sha256
from torusgd.errors import UserError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.fingerprint import Fingerprint, check_ranks_agree, check_stored, conditions
from torusgd.run.job import Job
from torusgd.run.saving import finished
from torusgd.runtime import resolve_auto

MINE = Fingerprint("r", 96, "d", "", "w", {"cpu": "Xeon", "threads": 1, "cpu_flags": " ".join(["avx", *"abc" * 90])})


@on_ranks(3)
def test_ranks_that_differ_are_named_with_host_key_and_both_values() -> None:
    world = group_of()

    def compared(changes: dict[str, Any], options: dict[str, Any], mixed: bool) -> Any:
        """What is found where the last rank's fingerprint and options are changed so."""
        is_other = world.rank == world.size - 1
        mine = replace(MINE, **changes) if is_other else MINE
        return check_ranks_agree(mine, {"update": "replicated", **(options if is_other else {})}, world, mixed)

    other = {"cpu": "EPYC", "threads": 1, "cpu_flags": f"{MINE.conditions['cpu_flags']} avx512f"}
    flags = {**MINE.conditions, "cpu_flags": other["cpu_flags"]}
    named: dict[tuple[str, str, str], tuple[dict[str, Any], dict[str, Any], bool]] = {
        ("recipe_sha256", "'x'", "'r'"): ({"recipe_sha256": "x"}, {}, True),
        ("drawn_sha256", "'y'", "'w'"): ({"drawn_sha256": "y"}, {}, False),
        ("operators", "'add.2 mul.3'", "''"): ({"operators": "add.2 mul.3"}, {}, True),
        ("update", "'sharded'", "'replicated'"): ({}, {"update": "sharded"}, True),
        ("cpu", "'EPYC'", "'Xeon'"): ({"conditions": other}, {}, False),
        ("cpu_flags", "'avx512f'", "''"): ({"conditions": flags}, {}, False),
    }
    assert (compared({}, {}, False), compared({"conditions": other}, {}, True)) == ([], [other])
    for (key, two, one), change in named.items():
        with pytest.raises(UserError) as caught:
            compared(*change)
        text = str(caught.value)
        assert world.broadcast_text(text) == text, "every rank finds the same"
        both = f"rank 2 on .*: {key} is {two}, of rank 0 on .* it is {one}; all ranks of a run need the same"
        assert re.match(both, text)
        assert ("--mixed" in text) == (key in ("cpu", "cpu_flags"))


def arrays(path: Path, seed: int = 0, shift: int = 0) -> Path:
    images = np.random.default_rng(seed).integers(0, 256, (96, 8, 8), dtype=np.uint8)
    labels = (np.arange(96) + shift) % 4
    np.savez(path, train_images=images, train_labels=labels, eval_images=images[:24], eval_labels=labels[:24])
    return path


def test_other_data_of_equal_count_and_other_initial_weights_are_refused(tmp_path: Path) -> None:
    recipe, out = tmp_path / "arrays.yaml", tmp_path / "out"
    recipe.write_text(RECIPE.replace("tests.run.slow:Slow", "numpy"))
    first = arrays(tmp_path / "a.npz")
    told = run_alone(out, recipe, data=first, max_steps=4)
    job = Job(resolve_auto(load_recipe(str(recipe), []).recipe, "cpu"), RuntimeOptions(), "cpu", out, first, None, 4)
    assert finished(job) == told
    for other in (arrays(tmp_path / "pixels.npz", seed=1), arrays(tmp_path / "labels.npz", shift=1)):
        with pytest.raises(UserError, match="data_sha256"):
            run_alone(out, recipe, data=other, max_steps=8)
        with pytest.raises(UserError, match="data_sha256"):
            finished(replace(job, data=other))
    with pytest.raises(UserError, match="init_sha256"):
        finished(replace(job, init=str(out / "model.safetensors")))


def test_names_sizes_labels_and_a_sample_of_pixels_make_the_data(tmp_path: Path) -> None:
    def made(*files: tuple[str, bytes]) -> PictureFiles:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, content in files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        classes = ("cat", "dog")
        found = list_pictures(folder, classes, "train")
        return PictureFiles(folder, Names.of(found, "train"), classes, found["train labels"], 3, classes)

    seconds = [("cat/2.png", b"two"), ("cat/2.png", b"two"), ("cat/4.png", b"two"), ("dog/2.png", b"two")]
    seconds.append(("cat/2.png", b"twos"))
    found = [made(("cat/1.png", b"one"), second, ("dog/3.png", b"three")) for second in seconds]
    hashes = [data_sha256(source, source) for source in (*found, found[0].first(2))]
    assert (hashes[0], len({*hashes})) == (hashes[1], 5)


def test_what_may_change_a_kernel_is_a_condition_and_on_a_gpu_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, cpu = load_recipe("digits", []).recipe, torch.device("cpu")
    before = conditions(recipe, cpu)
    assert {"cpu", "cpu_design", "cpu_flags", "cpu_caches", "isa", "torch", "torch_build", "numpy"} <= before.keys()
    for name in ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(name, "AVX2")
        assert f"{name}=AVX2" in str(conditions(recipe, cpu)["environment"])
        monkeypatch.delenv(name)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ONEDNN_VERBOSE", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    assert conditions(recipe, cpu) == before
    # Its kernels have norms of their own, which decide the bits of LARS.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        "torusgd.run.fingerprint.version_of", lambda package="torusgd": {"triton": "3.9.0"}.get(package)
    )
    found = conditions(load_recipe("digits").recipe, torch.device("cuda"))
    assert (found["gpu"], found["gpu_capability"], found["triton"]) == ("H200", "9.0", "3.9.0")


def names(words: tuple[str, ...]) -> list[str]:
    return [word.partition(".")[0] for word in words]


def test_the_order_in_which_gradients_of_three_uses_are_added_is_found() -> None:
    def added(*factors: float) -> tuple[str, ...]:
        def passes() -> None:
            x = torch.ones(3, requires_grad=True) * 1.5
            parts = [x * factor for factor in factors]
            (parts[0] + parts[1] + parts[2]).sum().backward()

        return operators_of(passes)

    first, other = added(2.0, 3.0, 4.0), added(3.0, 4.0, 2.0)
    assert first == added(2.0, 3.0, 4.0)
    assert names(first) == names(other)
    assert first[-1] != other[-1], "the last one works on the gradient of x"


def test_views_and_copies_are_no_operators_and_attention_is_recorded_by_its_parts() -> None:
    x = torch.ones(2, 3)

    def moved() -> Tensor:
        return (x.t().clone().t().detach() * 2).sum()

    assert operators_of(lambda: torch.sum(x * 2)) == operators_of(moved)
    x = torch.ones(1, 2, 3, 4)
    assert names(operators_of(lambda: F.scaled_dot_product_attention(x, x, x))).count("bmm") == 2


@pytest.mark.parametrize("name", ["digits-net", "fashion-net", "resnet18"])
def test_this_torch_computes_built_in_networks_by_the_stored_operators(name: str) -> None:
    check_stored(name)


def test_a_torch_with_other_operators_is_refused_and_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_parts(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return F.nll_loss((logits - logits.logsumexp(1, True)), targets)

    monkeypatch.setattr(F, "cross_entropy", by_parts)
    with pytest.raises(UserError, match=r"digits-net otherwise than .* from operator 21 of \d+ on, logsumexp:"):
        check_stored("digits-net")


def test_no_mode_of_portable_arithmetic_is_wrapped_by_what_imports_torch_dynamo() -> None:
    """It takes two seconds, which every rank of every portable run would pay."""
    assert not any(hasattr(vars(mode)["__torch_dispatch__"], "__wrapped__") for mode in (PortableMode, _Recorder))


class Thrice(nn.Module):
    """A tensor that is used three times, whose gradients are added in an order."""

    order = (0, 1, 2)

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        parts = [x.relu(), x * 0.5, x.abs()]
        a, b, c = (parts[place] for place in self.order)
        return self.last(a + b + c)


NETWORK = (
    "data={source: digits, train_images: 60, eval_images: 20, image_size: 8, channels: 1, mean: [0.3], std: [0.4]}",
    "model={name: 'tests.run.test_fingerprint:Thrice', options: {}}",
    *("precision=portable", "virtual_workers=2", "label_smoothing=0.0"),
)


def test_a_run_does_not_go_on_with_other_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(tmp_path, *NETWORK, max_steps=2)
    monkeypatch.setattr(Thrice, "order", (1, 2, 0))
    with pytest.raises(UserError, match=r"the checkpoint of step 2 was trained with other operators .*add\."):
        run_here(tmp_path, *NETWORK, max_steps=4)
    monkeypatch.undo()
    run_here(tmp_path, *NETWORK, max_steps=4)
