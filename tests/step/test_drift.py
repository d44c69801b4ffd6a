"""A rank whose weights are no longer those of the others is named within a few steps, and nothing of it is saved."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import on_ranks
from tests.messages import refused
from tests.run.runs import before_steps
from tests.step.trainers import Sent, end_of, job_of, run_of, trainer_of

from torusgd.comm.allreduce import create
from torusgd.comm.base import ConnectionLost, Liveness
from torusgd.comm.groups import Group, alone, group_of
from torusgd.errors import CorruptionError
from torusgd.gradients.layout import Slot
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.section import Duration
from torusgd.run.build import Trainer
from torusgd.run.newest_state import Retained, nothing_yet
from torusgd.run.run import Run
from torusgd.run.saving import RunState
from torusgd.signals import StopFlag
from torusgd.step.control_vector import ControlVector, Counts
from torusgd.step.corruption import DriftWatch, steps_between

STEPS, FLIPPED_AFTER = 5, 3
STAGES = f"stages=[{{until: {STEPS}st, images_per_worker: 3}}]"


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Flips one bit of one element, by default the lowest."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[len(bits) // 2] ^= 1 << bit


def momentum(trainer: Trainer) -> torch.Tensor:
    optimizer, (first, *_) = trainer.step.update.optimizer, trainer.step.reducer.owned
    return optimizer.state[first]["momentum_buffer"]


FLIPS: dict[str, tuple[dict[str, Any], Callable[[Trainer], None]]] = {
    "a weight": ({"drift_every": 3}, lambda trainer: flip(next(trainer.step.state.model.parameters()))),
    "running statistics": ({"drift_every": 3}, lambda trainer: flip(trainer.step.state.batch_norm.running)),
    # Seen in the weights that it leads to, here before a checkpoint.
    "momentum": ({"drift_every": 100}, lambda trainer: flip(momentum(trainer), bit=30)),
    # The gather overwrites a copy of the others' shards, so this is found in the step itself or not at all.
    "a copy of a shard": (
        {"drift_every": 1, "update": "sharded"},
        lambda trainer: flip(next(trainer.step.state.model.parameters())),
    ),
    "nothing": ({"drift_every": 1}, lambda trainer: None),
}


def train_and_flip(out: Path, flipped: str) -> str:
    """A run on these ranks, of which the last one's state changes between two steps; how it ended."""
    world = group_of()
    options, change = FLIPS[flipped]
    runtime = RuntimeOptions(checkpoint_every=Duration(2, "st"), **options)
    run = run_of(job_of(STAGES, options=runtime, out=out), world)

    def flip_once(step: int) -> None:
        if step == FLIPPED_AFTER and world.rank == world.size - 1:
            run.trainer.step.update.wait_weights()
            change(run.trainer)

    return end_of(run, flip_once)


@on_ranks(3)
def test_a_flipped_bit_is_found_and_its_rank_named_before_anything_is_saved(tmp_path: Path) -> None:
    trainer, every = trainer_of(job_of()), steps_between(4)  # 12 images, 4 a rank
    assert [step for step in range(500) if trainer.drift.due(step)] == [0, every, 2 * every, 3 * every]
    trainer.close()
    for flipped in FLIPS:
        line = train_and_flip(tmp_path / flipped, flipped)
        if flipped == "nothing":
            assert not line
            continue
        found = 4 if flipped == "momentum" else FLIPPED_AFTER
        assert line.startswith(f"step {found}: rank 2 on {socket.gethostname()} holds other weights"), flipped
        assert "\n" not in line
        assert group_of().broadcast_text(line) == line
        steps = sorted(path.name for path in (tmp_path / flipped / "checkpoints").glob("step-*"))
        assert steps == ["step-00000002"], flipped


def copied(retained: Retained) -> Retained:
    """What a rank has at this moment, whatever it does then."""
    assert retained.state is not None
    tensors = {name: tensor.clone() for name, tensor in retained.tensors.items()}
    return replace(retained, state=RunState.from_dict(retained.state.as_dict()), tensors=tensors)


def go_on(out: Path, case: str) -> str:
    """Three ranks lose each other's connections after four steps and go on; how that ended, or the weights' hash.

    `flipped`: a bit of rank 2's weights flips meanwhile. `ahead`: only rank 0 has received the fourth step's last
    message, and a bit of its weights has flipped. `joined`: rank 2 is a new one.
    """
    world = group_of()
    job = job_of(STAGES, out=out)
    first = run_of(job, world.duplicate())
    before = list[Retained]()

    def lose(step: int) -> None:
        if step == 3:
            first.trainer.step.state.write_to_model(3)
            tensors = first.trainer.step.state.state_dict(3, keep=True)
            before.append(copied(replace(first.retained, generation=0, state=first.state, tensors=tensors)))
        if step == 4 and case != "nothing":
            raise ConnectionLost("rank 3 is gone")

    before_steps(first, lose)
    try:
        return first.run().summary["weights_sha256"]
    except ConnectionLost:
        retained = first.keep()
    if case == "joined" and world.rank == 2:
        retained = nothing_yet(job, world, Liveness(), range(3))
    if case == "ahead" and world.rank > 0:
        retained = replace(retained, state=before[0].state, tensors=before[0].tensors)
    if (case, world.rank) in (("ahead", 0), ("flipped", 2)):
        flip(next(tensor for name, tensor in retained.tensors.items() if name.startswith("model/")))
    again = Run(job, world.duplicate(), StopFlag(), restarts=0, retained=retained)
    try:
        return again.run().summary["weights_sha256"]
    except CorruptionError as error:
        again.trainer.close()
        return str(error)


@on_ranks(3)
def test_ranks_that_go_on_compare_what_they_hold_before_any_takes_the_weights_of_another(tmp_path: Path) -> None:
    ends = {case: go_on(tmp_path / case, case) for case in ("nothing", "flipped", "ahead", "joined")}
    assert group_of().broadcast_text(str(ends)) == str(ends)
    assert ends["flipped"].startswith(f"step 4: rank 2 on {socket.gethostname()} holds other weights than most ranks")
    assert ends["joined"] == ends["ahead"] == ends["nothing"]


class Lonely(Group):
    """One of several ranks, of which the others are not there, each on a host of its own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, range(size), rank, torch.device("cpu"), None, 1.0)

    def broadcast_text(self, text: str, source: int = 0) -> str:
        return f"host{source}"


Ranks = list[tuple[DriftWatch, torch.Tensor, torch.Tensor]]


def watches(size: int, parallel: int) -> Ranks:
    """Of each rank the watch, a tensor that all hold, and a column block; `parallel` ranks share the layer."""
    found = []
    for rank in range(size):
        whole = torch.linspace(0, 1, 100_000)
        blocks = [torch.full((5, 3), float(block)) for block in range(parallel)]
        slots = [
            Slot(f"block {n}", "fc", block, parallel, layer=0, held=n == rank % parallel)
            for n, block in enumerate(blocks)
        ]
        slots.append(Slot("conv", "conv", whole))
        found.append((DriftWatch(slots, [], Lonely(rank, size), every=10), whole, blocks[rank % parallel]))
    return found


def test_a_corruption_is_reported_though_a_rank_is_lost_while_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Lonely, text: str, source: int = 0) -> str:
        raise ConnectionLost("rank 0 is gone")

    monkeypatch.setattr(Lonely, "broadcast_text", lost)
    ranks = watches(3, parallel=1)
    flip(ranks[2][1])
    with refused("drift of a rank while another is lost", "step 10: rank 2 holds", CorruptionError):
        check(ranks, 1)


def view(step: int) -> Any:
    return SimpleNamespace(step=SimpleNamespace(index=step))


def check(ranks: Ranks, rank: int, members: set[int] | None = None) -> None:
    """The same comparison in a step, and before a checkpoint."""
    watch = ranks[rank][0]
    summed = torch.stack([each.before_send(view(10)) for each, _, _ in ranks]).sum(dim=0)
    if members is None:
        watch.check(view(10), ControlVector(Counts(), 0.0, torch.zeros(0), True, {watch.name: summed}))
    watch.compare(10, Sent(summed), members)


@pytest.mark.parametrize(
    ("what", "about", "size", "parallel", "flipped", "members"),
    [
        ("one of two ranks", "rank 0 on host0, rank 3 on host3 hold", 4, 1, 3, {0, 3}),
        ("a column block", "rank N on hostN holds", 6, 2, 3, None),
        ("a column block", "rank N on hostN holds", 6, 2, 4, None),
        ("one of two column blocks", "rank 1 on host1, rank 3 on host3", 4, 2, 1, None),
    ],
)
def test_the_ranks_that_should_hold_the_same_are_compared(
    what: str, about: str, size: int, parallel: int, flipped: int, members: set[int] | None
) -> None:
    ranks = watches(size, parallel)
    check(ranks, 0)
    flip(ranks[flipped][1] if parallel == 1 else ranks[flipped][2])
    if members:
        check(ranks, 0, {0, 1, 2})
    hidden = {"N": flipped} if what == "a column block" else {}
    with refused(f"drift of {what}", f"step 10: {about}", CorruptionError, **hidden):
        check(ranks, 0, members)


def test_every_bit_of_every_element_counts_and_so_does_the_order_of_elements() -> None:
    ranks = watches(3, parallel=1)
    whole = ranks[2][1]
    for element in (0, 32_767, 32_768, 99_999):
        for bit in range(32):
            before = whole.clone()
            whole.view(torch.int32)[element] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            with pytest.raises(CorruptionError):
                check(ranks, 0)
            whole.copy_(before)
    whole[[7, 40_000]] = whole[[40_000, 7]]
    with refused("drift of a rank", "step 10: rank 2 on host2 holds", CorruptionError):
        check(ranks, 0)


def test_a_rank_alone_and_a_watch_that_is_off_send_nothing() -> None:
    slot = Slot("w", "w", torch.ones(3))
    for watch in (DriftWatch([slot], [], alone(), every=1), DriftWatch([slot], [], Lonely(0, 3), every=0)):
        assert watch.before_send(view(0)).numel() == 0
        watch.compare(4, create("native"))
