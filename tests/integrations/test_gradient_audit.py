"""A rank that computes wrongly is named, and one that computes under other conditions refused."""

import os

import torch
from tests.comm.gloo_world import error_of, on_ranks, run_ranks

from torusgd.integrations.gradient_audit import GradientAudit


def _audited(wrong: int, *fractions: float) -> list[tuple[int, str]]:
    """For each fraction the steps that were checked, and the error."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)

    def compute(key: int) -> tuple[torch.Tensor | None, ...]:
        loss = layer(torch.randn(5, 4, generator=torch.Generator().manual_seed(key))).square().mean()
        found = torch.autograd.grad(loss, list(layer.parameters()))
        if rank == wrong and key > 10:
            found[0][0, 0] = torch.nextafter(found[0][0, 0], torch.tensor(9.0))
        return (*found, None, torch.eye(2).to_sparse())

    def steps(audit: GradientAudit, checked: list[bool]) -> None:
        for step in range(20):
            checked.append(audit.step(step * size + rank))

    found = []
    for fraction in fractions:
        checked: list[bool] = []
        error = error_of(steps, GradientAudit(compute, fraction=fraction), checked)
        found.append((sum(checked), error))
    return found


def test_right_ranks_pass_and_a_fraction_of_the_steps_is_checked() -> None:
    for size in (1, 3):
        (first, *others) = run_ranks(size, _audited, -1, 1.0, 0.3, 0.0)
        assert others == [first] * (size - 1)
        (every, _), (few, _), (none, _) = first
        assert every == 20 > few > none == 0
        assert {error for _, error in first} == {""}


def test_one_bit_of_one_gradient_names_its_rank_and_of_two_ranks_both() -> None:
    for size, named in ((3, {1}), (2, {0, 1})):
        ((_, said),), *others = run_ranks(size, _audited, 1, 1.0)
        assert {error for [(_, error)] in others} == {said}
        assert {rank for rank in range(size) if f"rank {rank} on " in said} == named


@on_ranks(2)
def test_other_conditions_are_refused_on_every_rank() -> None:
    if os.environ["RANK"] == "1":
        torch.set_num_threads(2)
    assert "threads" in error_of(GradientAudit, lambda key: [])
