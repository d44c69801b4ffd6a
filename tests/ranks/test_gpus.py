"""Each rank takes a GPU of its own, whoever has started it, and ranks that share one find out."""

import os
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.messages import refuses
from torch._C._distributed_c10d import HashStore

from torusgd.comm import groups
from torusgd.comm import store_keys as keys
from torusgd.errors import UserError
from torusgd.launch import torchrun
from torusgd.ranks import gpus
from torusgd.ranks.generations import meet_within
from torusgd.ranks.liveness import Limits
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.runtime import resolve_workers

FOUR_GPUS: dict[str, Any] = {
    "device_count": lambda: 4,
    "set_device": lambda device: None,
    "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
}


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*gpus.LOCAL_RANK, *gpus.WATCHDOG):
        monkeypatch.setenv(name, "")  # so that it is put back, be it set by what is tested
        monkeypatch.delenv(name)
    for name, fake in FOUR_GPUS.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return monkeypatch


@pytest.mark.parametrize("name", gpus.LOCAL_RANK)
def test_every_launchers_variable_is_known(name: str, four_gpus: pytest.MonkeyPatch) -> None:
    assert gpus.own_gpu(ranks_per_gpu=1).index == 0
    four_gpus.setenv(name, "3")
    assert gpus.own_gpu(ranks_per_gpu=1) == torch.device("cuda", 3)
    assert gpus.own_gpu(ranks_per_gpu=2) == torch.device("cuda", 1)


def test_torchruns_variable_goes_first_and_more_ranks_than_gpus_are_refused(four_gpus: pytest.MonkeyPatch) -> None:
    assert gpus.local_rank({"SLURM_LOCALID": "0", "LOCAL_RANK": "2"}) == 2
    refuses("a number on the machine that is none", gpus.local_rank, {"SLURM_LOCALID": "x"}, about="SLURM_LOCALID = x")
    four_gpus.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "4")
    refuses("more ranks than GPUs", gpus.own_gpu, ranks_per_gpu=1, about="rank 4 of this machine")
    four_gpus.setenv("SLURM_LOCALID", "3")
    four_gpus.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus.own_gpu(ranks_per_gpu=1).index == 0


def rank_0_comes(store: HashStore) -> None:
    """What rank 0 has left in the store, with GPU 0."""
    store.set(keys.GPU.format(rank=0), "GPU-0")
    store.add(keys.GPU_RANKS.format(gpu="GPU-0"), 1)
    store.add(keys.HERE, 1)


@pytest.mark.parametrize("ranks_per_gpu", [1, 2])
def test_ranks_meet_over_nccl_or_gloo(ranks_per_gpu: int, four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("LOCAL_RANK", "1")
    asked: dict[str, object] = {}
    four_gpus.setattr(groups, "build", lambda *_, **options: asked.update(options))
    store = HashStore()
    rank_0_comes(store)
    meet_within(store, 1, 2, "cuda", ranks_per_gpu, seconds=5)
    assert asked["device"] == torch.device("cuda", 1 // ranks_per_gpu)
    assert asked["nccl"] == (ranks_per_gpu == 1)
    assert [os.environ[name] for name in gpus.WATCHDOG] == ["0", "0"]


def test_ranks_on_one_gpu_are_named_also_where_two_without_a_number_meet(four_gpus: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    rank_0_comes(store)
    refuses("two ranks without a number on the machine", meet_within, store, 1, 2, "cuda", 1, 5, about="ranks 0, 1")
    for rank, gpu in {0: "a", 1: "b", 4: "c", 5: "b"}.items():
        store.set(keys.GPU.format(rank=rank), gpu)
    gpus.check_shared_gpus(store, (0, 1, 4, 5), ranks_per_gpu=2)
    refuses("two ranks on one GPU", gpus.check_shared_gpus, store, (0, 1, 4, 5), ranks_per_gpu=1, about="ranks 1, 5")


def test_as_many_ranks_as_the_gpus_take(four_gpus: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("digits", ["virtual_workers=64"]).recipe
    assert resolve_workers(RuntimeOptions(), "cuda", recipe) == 4
    assert resolve_workers(RuntimeOptions(ranks_per_gpu=2), "cuda", recipe) == 8
    assert resolve_workers(RuntimeOptions(ranks_per_gpu=2, workers=7), "cuda", recipe) == 7
    refuses("more workers than GPUs", resolve_workers, RuntimeOptions(workers=5), "cuda", recipe, about="workers = 5")


class Ended(BaseException):
    """In place of the end of the process."""


def join_on_the_same_gpu() -> tuple[int, list[str]]:
    """The exit code of a rank to which a launcher has said no number, and what it prints."""
    said: list[str] = []

    def end(code: int) -> NoReturn:
        raise Ended(code)

    os.environ.pop("LOCAL_RANK", None)
    with patch.multiple(torch.cuda, **FOUR_GPUS), patch.object(torchrun, "_print", said.append), patch("os._exit", end):
        with pytest.raises(Ended) as ended:
            torchrun.run_joined(lambda *_: None, "cuda", Limits(beat=30, start=30))
        return ended.value.args[0], said


@pytest.mark.slow
def test_of_ranks_that_somebody_elses_launcher_put_on_one_gpu_one_says_so() -> None:
    ends = run_ranks(2, join_on_the_same_gpu)
    assert [code for code, _ in ends] == [2, 2]
    (line,) = [line for _, said in ends for line in said]
    assert line.startswith("ranks 0, 1 have the same GPU (GPU-0): let the launcher set LOCAL_RANK")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks_per_gpu", [1, 2])
def test_two_ranks_on_the_gpu_that_is_here(ranks_per_gpu: int) -> None:
    store, device = HashStore(), gpus.device_of("cuda", ranks_per_gpu)
    for rank in range(2):
        gpus.claim_gpu(store, rank, device, ranks_per_gpu)
    with nullcontext() if ranks_per_gpu == 2 else pytest.raises(UserError):
        gpus.check_shared_gpus(store, range(2), ranks_per_gpu)
