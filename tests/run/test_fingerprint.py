"""One value says whether ranks, or two parts of a run, belong together: recipe, data, initial weights, conditions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.comm.gloo_world import run_ranks
from tests.run.processes import RECIPE, run_alone
from torusgd.comm.groups import group_of
from torusgd.data.file_lists import Names
from torusgd.data.pictures import PictureFiles, list_pictures
from torusgd.data.registry import data_sha256
from torusgd.data.types import Source
from torusgd.errors import UserError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.fingerprint import Fingerprint, check_ranks_agree, conditions
from torusgd.run.job import Job
from torusgd.run.saving import finished
from torusgd.runtime import resolve_auto

MINE = Fingerprint("r", 96, "d", "", "w", {"cpu": "Xeon", "threads": 1, "cpu_flags": " ".join(["avx", *"abc" * 90])})


def compared(cases: list[tuple[dict[str, Any], dict[str, Any], bool]]) -> list[Any]:
    """What each case gives where the last rank's fingerprint and options are changed so."""
    world, found = group_of(), list[Any]()
    is_other = world.rank == world.size - 1
    for changes, options, mixed in cases:
        mine = replace(MINE, **changes) if is_other else MINE
        asked = {"update": "replicated", **(options if is_other else {})}
        try:
            found.append(check_ranks_agree(mine, asked, world, mixed))
        except UserError as error:
            found.append(str(error))
    return found


def test_ranks_that_differ_are_named_with_host_key_and_both_values() -> None:
    other = {"cpu": "EPYC", "threads": 1, "cpu_flags": f"{MINE.conditions['cpu_flags']} avx512f"}
    found = run_ranks(
        3,
        compared,
        [
            ({}, {}, False),
            ({"recipe_sha256": "x"}, {}, True),
            ({"drawn_sha256": "y"}, {}, False),
            ({"operators": "add.2 mul.3"}, {}, True),
            ({}, {"update": "sharded"}, True),
            ({"conditions": other}, {}, False),
            ({"conditions": {**MINE.conditions, "cpu_flags": other["cpu_flags"]}}, {}, False),
            ({"conditions": other}, {}, True),
        ],
    )
    assert found[0] == found[1] == found[2], "every rank finds the same"
    equal, recipe, drawn, operators, options, cpu, flags, mixed = found[0]
    assert (equal, mixed) == ([], [other])
    for text, key, two, one in (
        (recipe, "recipe_sha256", "'x'", "'r'"),
        (drawn, "drawn_sha256", "'y'", "'w'"),
        (operators, "operators", "'add.2 mul.3'", "''"),
        (options, "update", "'sharded'", "'replicated'"),
        (cpu, "cpu", "'EPYC'", "'Xeon'"),
        (flags, "cpu_flags", "'avx512f'", "''"),
    ):
        assert text.startswith("rank 2 on ")
        assert f": {key} is {two}, of rank 0 on " in text
        assert f" it is {one}; all ranks of a run need the same" in text
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
    others = (arrays(tmp_path / "pixels.npz", seed=1), arrays(tmp_path / "labels.npz", shift=1))
    for other in others:
        with pytest.raises(UserError, match="data_sha256"):
            run_alone(out, recipe, data=other, max_steps=8)

    job = Job(resolve_auto(load_recipe(str(recipe), []).recipe, "cpu"), RuntimeOptions(), "cpu", out, first, None, 4)
    assert finished(job) == told
    for other in others:
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

    def hash_of(source: Source) -> str:
        return data_sha256(source, source)

    plain = made(("cat/1.png", b"one"), ("cat/2.png", b"two"), ("dog/3.png", b"three"))
    same = made(("cat/1.png", b"one"), ("cat/2.png", b"two"), ("dog/3.png", b"three"))
    others = [
        made(("cat/1.png", b"one"), ("cat/4.png", b"two"), ("dog/3.png", b"three")),
        made(("cat/1.png", b"one"), ("dog/2.png", b"two"), ("dog/3.png", b"three")),
        made(("cat/1.png", b"one"), ("cat/2.png", b"twos"), ("dog/3.png", b"three")),
        plain.first(2),
    ]
    assert hash_of(plain) == hash_of(same)
    assert len({hash_of(plain), *map(hash_of, others)}) == 5


def test_what_may_change_a_kernel_is_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_on_a_gpu_triton_is_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels have norms of their own, which decide the bits of LARS."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torusgd.run.fingerprint._version", {"triton": "3.9.0"}.get)
    found = conditions(load_recipe("digits").recipe, torch.device("cuda"))
    assert (found["gpu"], found["gpu_capability"], found["triton"]) == ("H200", "9.0", "3.9.0")
