"""A rank that computes wrongly is named, and one that computes under other conditions refused."""

import os

import pytest
import torch
from tests.comm.gloo_world import run_ranks

from torusgd.errors import CorruptionError, UserError
from torusgd.integrations.gradient_audit import GradientAudit


def _audited(wrong: int, fraction: float) -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)

    def compute(key: int) -> tuple[torch.Tensor | None, ...]:
        generator = torch.Generator().manual_seed(key)
        loss = layer(torch.randn(5, 4, generator=generator)).square().mean()
        found = torch.autograd.grad(loss, list(layer.parameters()))
        if rank == wrong and key > 10:
            found[0][0, 0] = torch.nextafter(found[0][0, 0], torch.tensor(9.0))
        return (*found, None, torch.eye(2).to_sparse())

    audit = GradientAudit(compute, fraction=fraction)
    checked = 0
    for step in range(20):
        try:
            checked += audit.step(step * size + rank)
        except CorruptionError as error:
            return str(error)
    return str(checked)


@pytest.mark.parametrize("size", [1, 3])
def test_right_ranks_pass_and_a_fraction_of_the_steps_is_checked(size: int) -> None:
    assert run_ranks(size, _audited, -1, 1.0) == ["20"] * size
    few = run_ranks(size, _audited, -1, 0.3)
    assert len(set(few)) == 1
    assert 0 < int(few[0]) < 20
    assert run_ranks(size, _audited, -1, 0.0) == ["0"] * size


def test_one_bit_of_one_gradient_names_its_rank() -> None:
    said = run_ranks(3, _audited, 1, 1.0)
    assert len(set(said)) == 1
    assert "rank 1 on " in said[0]
    assert "rank 0" not in said[0]
    assert "rank 2" not in said[0]


def test_of_two_ranks_both_are_named() -> None:
    assert "rank 0 on " in (said := run_ranks(2, _audited, 1, 1.0)[0])
    assert "rank 1 on " in said


def _under_other_conditions() -> str:
    if os.environ["RANK"] == "1":
        torch.set_num_threads(2)
    try:
        GradientAudit(lambda key: [])
    except UserError as error:
        return str(error)
    return ""


def test_other_conditions_are_refused_on_every_rank() -> None:
    assert all("threads" in said for said in run_ranks(2, _under_other_conditions))
