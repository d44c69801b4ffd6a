"""Machines that compute wrongly: a bit is flipped on one rank, and the audit finds and names it before the step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import on_ranks
from tests.messages import refused
from tests.run.faults import Fault, in_gradient, in_images, in_weights
from tests.step.trainers import end_of, job_of, recipe_of, run_of, take, take_all, trainer_of, weights_of
from torch import Tensor

from torusgd.comm.allreduce import create
from torusgd.comm.base import ConnectionLost, Done, Liveness
from torusgd.comm.groups import Group, group_of
from torusgd.errors import CorruptionError
from torusgd.gradients.integer_hash import IntegerHash
from torusgd.gradients.integer_sum import IntegerGradientSum
from torusgd.gradients.layout import plan_buckets
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schedule import Schedule
from torusgd.recipe.section import Duration
from torusgd.run.job import Job
from torusgd.rundir.checkpoint import list_checkpoints, read_checkpoint
from torusgd.step.control_vector import ControlVector, Counts
from torusgd.step.corruption import Audit
from torusgd.step.journal import synchronous
from torusgd.step.membership import Membership, even_shares
from torusgd.step.watch import Requests, StepView

CPU = torch.device("cpu")
LONG = ("stages=[{until: 50st, images_per_worker: 3}]", "rate={lr: 0.1}")
CULPRIT = 1
TAKE_OUT = "; take the machine out and give the same command again: the last checkpoint is good"


FAULTS = (in_gradient, in_weights, in_images)


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


class Losing:
    """Messages by which hashes differ; then ranks are gone."""

    name = "losing"

    def __init__(self, messages: int) -> None:
        self.left = messages

    def start(self, tensor: Tensor) -> Done:
        if not self.left:
            raise ConnectionLost("rank 2 is gone")
        self.left -= 1
        tensor.copy_(torch.tensor([1, 3, 0]) if len(tensor) == 3 else torch.tensor([1, 1, 1, 2, 1, 1]))
        return Done()

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("messages", [1, 2])
def test_where_a_rank_is_lost_while_another_is_being_named_nobody_goes_on(messages: int) -> None:
    membership = even_shares(range(3), me=0, virtual_workers=3)
    audit = Audit(1.0, seed=0, world=Group(None, range(3), 0, CPU, None, 1.0), allreduce=Losing(messages))
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
    assert "one of them computes wrongly, and it takes a third rank to say which" in text
    assert text.endswith(TAKE_OUT)
    world.barrier()
    (saved,) = list_checkpoints(tmp_path / "checkpoints")
    assert read_checkpoint(saved).step == 2


def stopped_in_a_step() -> tuple[bool, int]:
    """Whether a step that one rank has to stop in is abandoned, and what that rank computed a second time."""
    world = group_of()
    looks = iter([False, True])  # the second rank has begun one of its two virtual workers
    stop = (lambda: next(looks, True)) if world.rank == 1 else (lambda: False)
    trainer = trainer_of(job_of(options=RuntimeOptions(audit=1.0)), world, requests=Requests(stop, Liveness()))
    passes: list[str] = []
    liveness: Any = trainer.step.liveness
    liveness.progress = lambda phase, step, unit: passes.append(phase)
    trainer.step.reducer.sum.set_maxima(torch.ones(len(trainer.step.reducer.names)))
    return trainer.step.run(trainer.membership, synchronous(0, 4)) is None, passes.count("audit")


def steps_without_a_comparison() -> list[int]:
    """What is compared of 40 steps of which every second ends before that, as one whose gradient is not finite does."""
    world, membership = group_of(), even_shares(range(2), group_of().rank, 8)
    audit, compared = Audit(0.3, 0, world, create("native", group=world)), []

    def hashed(worker: int) -> IntegerHash:
        found = IntegerHash(CPU)
        found.add(0, 0, torch.tensor([worker]))
        return found

    for step in range(40):
        for worker in membership.mine:
            if (found := audit.before_worker(step, worker, membership)) is not None:
                found.add(0, 0, torch.tensor([worker]))
        view = view_of(step, membership, hashed)
        audit.after_passes(view)
        if step % 2:
            audit.before_accept(view, NOTHING_SENT)
            compared.append(audit.after(view, NOTHING_SENT)["audited"])
    return compared


@on_ranks(2)
def test_a_step_that_is_abandoned_or_skipped_leaves_nothing_for_the_next() -> None:
    world = group_of()
    assert stopped_in_a_step() == (True, (2, 0)[world.rank])
    compared = steps_without_a_comparison()
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

    def hash_of(*added: tuple[int, Tensor], device: torch.device = CPU) -> int:
        found = IntegerHash(device)
        for slot, integers in added:
            for begin in range(0, len(integers), 1 << 17):  # as a sum gives them
                found.add(slot, begin, integers[begin : begin + (1 << 17)])
        return found.value()

    first, second = enumerate(slots)
    whole = hash_of(first, second)
    assert whole == hash_of(second, first)
    assert whole != hash_of((0, slots[1]), (1, slots[0]))
    shifted = torch.cat([torch.zeros(1, dtype=torch.int32), slots[0]])[1:]
    assert whole == hash_of((0, shifted), second), "wherever it lies"
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
