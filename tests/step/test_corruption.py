"""Ranks that compute wrongly, or hold other weights: they are named, in time, and nothing of theirs is saved."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.comm.gloo_world import on_ranks
from tests.messages import refused, refuses
from tests.run.faults import Fault, in_gradient, in_images, in_weights
from tests.run.runs import before_steps
from tests.step.trainers import Sent, end_of, job_of, recipe_of, run_of, take, take_all, trainer_of, weights_of
from torch import Tensor

from torusgd.comm.allreduce import create
from torusgd.comm.base import ConnectionLost, Done, Liveness
from torusgd.comm.groups import Group, alone, group_of
from torusgd.errors import CorruptionError
from torusgd.gradients.integer_hash import IntegerHash
from torusgd.gradients.integer_sum import IntegerGradientSum
from torusgd.gradients.layout import Slot, plan_buckets
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schedule import Schedule
from torusgd.recipe.section import Duration
from torusgd.run.job import Job
from torusgd.run.newest_state import Retained, nothing_yet
from torusgd.run.run import Run
from torusgd.run.saving import RunState
from torusgd.rundir.checkpoint import list_checkpoints, read_checkpoint
from torusgd.signals import StopFlag
from torusgd.step.control_vector import ControlVector, Counts
from torusgd.step.corruption import Audit, DriftWatch, steps_between
from torusgd.step.journal import synchronous
from torusgd.step.membership import Membership, even_shares
from torusgd.step.step import TrainStep
from torusgd.step.watch import Requests, StepView

CPU = torch.device("cpu")
LONG = ("stages=[{until: 50st, images_per_worker: 3}]", "rate={lr: 0.1}")
CULPRIT = 1
TAKE_OUT = "; take the machine out and give the same command again: the last checkpoint is good"
FAULTS = (in_gradient, in_weights, in_images)
Ranks = list[tuple[DriftWatch, torch.Tensor, torch.Tensor]]
STEPS, FLIPPED_AFTER = 5, 3
STAGES = f"stages=[{{until: {STEPS}st, images_per_worker: 3}}]"


def steps_until_found(world: Group, given: Job, fault: Fault, first: int, steps: int) -> tuple[str, int, bool]:
    """What the error says, the step it came in, and whether no weight had changed; the fault begins at step `first`."""
    trainer = trainer_of(given, world)
    for index in range(steps):
        if index == first and world.rank == CULPRIT:
            fault(trainer.step, Path())
        before = [p.detach().clone() for p in trainer.step.state.model.parameters()]
        try:
            take(trainer, index)
        except CorruptionError as error:
            return str(error), index, all(map(torch.equal, before, trainer.step.state.model.parameters()))
    return "", steps, True


@on_ranks(3)
def test_a_flipped_bit_is_found_in_its_step_and_its_rank_named() -> None:
    world, everything, hashes = group_of(), RuntimeOptions(audit=1.0), []
    for fault in FAULTS:
        text, step, unchanged = steps_until_found(world, job_of(options=everything), fault, 1, 2)
        assert text.startswith("step 1: rank 1 on ")
        assert " computes wrongly: it found other integers than rank " in text
        assert text.endswith(TAKE_OUT)
        assert (step, unchanged) == (1, True)
    for options in (RuntimeOptions(), everything, RuntimeOptions(audit=0.5, update="sharded", buckets=0.001)):
        trainer = trainer_of(job_of(options=options), world)
        hashes.append((sum(stats.audited for stats in take_all(trainer)), weights_of(trainer)))
    (none, plain), (all_four, audited), (some, sharded) = hashes
    assert plain == audited == sharded, "an audit changes no bit"
    assert (none, all_four) == (0, 16)
    assert 0 < some < 16


NOTHING_SENT = ControlVector(Counts(), 0.0, torch.zeros(0), True, {})


def view_of(step: int, membership: Membership, recompute: Callable[[int], IntegerHash]) -> StepView:
    return StepView(Schedule(recipe_of(*LONG), 96)[step], membership, recompute)


class Losing(Sent):
    """Messages by which hashes differ; then ranks are gone."""

    def __init__(self, messages: int) -> None:
        self.left = messages

    def start(self, tensor: Tensor) -> Done:
        if not self.left:
            raise ConnectionLost("rank 2 is gone")
        self.left -= 1
        tensor.copy_(torch.tensor([1, 3, 0]) if len(tensor) == 3 else torch.tensor([1, 1, 1, 2, 1, 1]))
        return Done()


@pytest.mark.parametrize("messages", [1, 2])
def test_where_a_rank_is_lost_while_another_is_being_named_nobody_goes_on(messages: int) -> None:
    membership = even_shares(range(3), me=0, virtual_workers=3)
    audit = Audit(1.0, seed=0, world=Lonely(0, 3), allreduce=Losing(messages))
    view = view_of(0, membership, lambda worker: IntegerHash(CPU))
    audit.before_worker(0, 0, membership)
    audit.after_passes(view)
    with refused(f"a rank lost after {messages} messages of an audit", "step 0", CorruptionError):
        audit.before_accept(view, NOTHING_SENT)


@on_ranks(2)
def test_two_ranks_are_both_named_and_no_checkpoint_is_made_of_their_weights(tmp_path: Path) -> None:
    """A whole run with a checkpoint every two steps, whose second rank computes wrongly from the fourth step on."""
    world = group_of()
    run = run_of(job_of(options=RuntimeOptions(audit=1.0, checkpoint_every=Duration(2, "st")), out=tmp_path), world)

    def strike(step: int) -> None:
        if step == 3 and world.rank == CULPRIT:
            in_gradient(run.trainer.step, Path())

    text = end_of(run, strike)
    assert text.startswith(("step 3: rank 0 on ", "step 3: rank 1 on "))
    assert text.endswith(f"one of them computes wrongly, and it takes a third rank to say which{TAKE_OUT}")
    world.barrier()
    (saved,) = list_checkpoints(tmp_path / "checkpoints")
    assert read_checkpoint(saved).step == 2


@on_ranks(2)
def test_a_step_that_is_abandoned_or_skipped_leaves_nothing_for_the_next() -> None:
    world = group_of()
    looks = iter([False, True])  # the second rank has begun one of its two virtual workers
    stop = (lambda: next(looks, True)) if world.rank == 1 else (lambda: False)
    trainer = trainer_of(job_of(options=RuntimeOptions(audit=1.0)), world, requests=Requests(stop, Liveness()))
    passes: list[str] = []
    liveness: Any = trainer.step.liveness
    liveness.progress = lambda phase, step, unit: passes.append(phase)
    trainer.step.reducer.sum.set_maxima(torch.ones(len(trainer.step.reducer.names)))
    assert trainer.step.run(trainer.membership, synchronous(0, 4)) is None
    assert passes.count("audit") == (2, 0)[world.rank]
    # Of 40 steps every second ends before a comparison, as one whose gradient is not finite does.
    membership = even_shares(range(2), world.rank, 8)
    audit, compared = Audit(0.3, 0, world, create("native", group=world)), list[int]()

    def hashed(worker: int, found: IntegerHash | None = None) -> IntegerHash:
        found = found or IntegerHash(CPU)
        found.add(0, 0, torch.tensor([worker]))
        return found

    for step in range(40):
        for worker in membership.mine:
            hashed(worker, audit.before_worker(step, worker, membership))
        view = view_of(step, membership, hashed)
        audit.after_passes(view)
        if step % 2:
            audit.before_accept(view, NOTHING_SENT)
            compared.append(audit.after(view, NOTHING_SENT)["audited"])
    assert world.broadcast_text(str(compared)) == str(compared)
    assert 0 in compared
    assert len(set(compared)) > 1


@pytest.mark.slow
@on_ranks(4, timeout=250)
def test_a_tenth_of_the_work_finds_a_lasting_fault_within_fifty_steps() -> None:
    options = RuntimeOptions(audit=0.1, drift_every=0)  # or the comparison of weights is often the first to find it
    jobs = [job_of(*LONG, f"seed={seed}", options=options) for seed in range(20)]
    found = [steps_until_found(group_of(), job, FAULTS[seed % 3], 0, 50)[0] for seed, job in enumerate(jobs)]
    assert sum("rank 1 on " in text and "computes wrongly" in text for text in found) >= 19


def test_any_one_integer_changes_the_hash_and_the_order_does_not() -> None:
    draw = torch.Generator().manual_seed(0)
    slots = [torch.randint(-(2**31), 2**31, (140_001,), generator=draw).to(torch.int32) for _ in range(2)]

    def hash_of(*added: tuple[int, Tensor]) -> int:
        found = IntegerHash(CPU)
        for slot, integers in added:
            for begin in range(0, len(integers), 1 << 17):  # as a sum gives them
                found.add(slot, begin, integers[begin : begin + (1 << 17)])
        return found.value()

    first, second = enumerate(slots)
    shifted = torch.cat([torch.zeros(1, dtype=torch.int32), slots[0]])[1:]
    whole = hash_of(first, second)
    assert whole == hash_of(second, first) == hash_of((0, shifted), second), "in any order, wherever it lies"
    assert whole != hash_of((0, slots[1]), (1, slots[0]))
    for index in (0, 1, 65_535, 65_536, 131_072, 140_000):
        changed = slots[0].clone()
        changed[index] ^= 1
        assert hash_of((0, changed), second) != whole
        wide = slots[0].to(torch.int64)
        wide[index] ^= 1
        assert hash_of((0, wide), second) != hash_of((0, slots[0].to(torch.int64)), second)


def test_a_gradient_that_is_only_hashed_has_the_hash_of_one_that_is_added() -> None:
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 140_001, 7)]
    buckets = plan_buckets([g.numel() for g in gradients], 1 << 20)
    for addends in (4, 8192):
        sums = IntegerGradientSum(buckets, addends, CPU)
        sums.set_maxima(torch.tensor([float(g.abs().max()) for g in gradients]))
        sums.clear()
        first, second, alone = (IntegerHash(CPU) for _ in range(3))
        for slot, gradient in enumerate(gradients):
            sums.only_hash(slot, gradient, alone)
            sums.add(0, slot, gradient, first)
            sums.add(0, slot, gradient, second)
        assert first.value() == second.value() == alone.value() != 0


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Flips one bit of one element, by default the lowest."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[len(bits) // 2] ^= 1 << bit


def flip_weight(step: TrainStep) -> None:
    flip(next(step.state.model.parameters()))


def flip_momentum(step: TrainStep) -> None:
    flip(step.update.optimizer.state[step.reducer.owned[0]]["momentum_buffer"], bit=30)


FLIPS: dict[str, tuple[dict[str, Any], Callable[[TrainStep], None]]] = {
    "a weight": ({"drift_every": 3}, flip_weight),
    "running statistics": ({"drift_every": 3}, lambda step: flip(step.state.batch_norm.running)),
    # Seen in the weights that it leads to, here before a checkpoint.
    "momentum": ({"drift_every": 100}, flip_momentum),
    # The gather overwrites a copy of the others' shards, so this is found in the step itself or not at all.
    "a copy of a shard": ({"drift_every": 1, "update": "sharded"}, flip_weight),
    "nothing": ({"drift_every": 1}, lambda step: None),
}


def train_and_flip(out: Path, flipped: str) -> str:
    """A run on these ranks, of which the last one's state changes between two steps; how it ended."""
    world = group_of()
    options, change = FLIPS[flipped]
    run = run_of(job_of(STAGES, options=RuntimeOptions(checkpoint_every=Duration(2, "st"), **options), out=out), world)

    def flip_once(step: int) -> None:
        if step == FLIPPED_AFTER and world.rank == world.size - 1:
            run.trainer.step.update.wait_weights()
            change(run.trainer.step)

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
        super().__init__(None, range(size), rank, CPU, None, 1.0)

    def broadcast_text(self, text: str, source: int = 0) -> str:
        return f"host{source}"


def watches(size: int, parallel: int) -> Ranks:
    """Of each rank the watch, a tensor that all hold, and a column block; `parallel` ranks share the layer."""
    found = []
    for rank in range(size):
        whole = torch.linspace(0, 1, 100_000)
        blocks = [torch.full((5, 3), float(block)) for block in range(parallel)]
        slots = [Slot("conv", "conv", whole)]
        for n, block in enumerate(blocks):
            slots.append(Slot(f"block {n}", "fc", block, parallel, layer=0, held=n == rank % parallel))
        found.append((DriftWatch(slots, [], Lonely(rank, size), every=10), whole, blocks[rank % parallel]))
    return found


def test_a_corruption_is_reported_though_a_rank_is_lost_while_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lonely, "broadcast_text", Mock(side_effect=ConnectionLost("rank 0 is gone")))
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
        watch.check(view(10), replace(NOTHING_SENT, sections={watch.name: summed}))
    watch.compare(10, Sent(summed), members)


@pytest.mark.parametrize(("what", "about", "size", "parallel", "flipped", "members"), [
    ("one of two ranks", "rank 0 on host0, rank 3 on host3 hold", 4, 1, 3, {0, 3}),
    ("a column block", "rank N on hostN holds", 6, 2, 3, None),
    ("a column block", "rank N on hostN holds", 6, 2, 4, None),
    ("one of two column blocks", "rank 1 on host1, rank 3 on host3", 4, 2, 1, None),
])  # fmt: skip
def test_the_ranks_that_should_hold_the_same_are_compared(
    what: str, about: str, size: int, parallel: int, flipped: int, members: set[int] | None
) -> None:
    ranks = watches(size, parallel)
    check(ranks, 0)
    flip(ranks[flipped][1] if parallel == 1 else ranks[flipped][2])
    if members:
        check(ranks, 0, {0, 1, 2})
    with refused(f"drift of {what}", f"step 10: {about}", CorruptionError, N=flipped if "N" in about else "N"):
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
    refuses("drift of a rank", check, ranks, 0, about="step 10: rank 2 on host2 holds", kind=CorruptionError)


def test_a_rank_alone_and_a_watch_that_is_off_send_nothing() -> None:
    slot = Slot("w", "w", torch.ones(3))
    for watch in (DriftWatch([slot], [], alone(), every=1), DriftWatch([slot], [], Lonely(0, 3), every=0)):
        assert watch.before_send(view(0)).numel() == 0
        watch.compare(4, create("native"))
