"""Ranks that differ in one bit, compute wrongly or under other conditions are named, with the tensor."""

import os

import torch
from tests.comm.gloo_world import alike, error_of, on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torusgd.integrations.gradient_audit import GradientAudit
from torusgd.integrations.replicas import Replicas


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).to(torch.bfloat16))


def _flipped(flipped: str, odd: int, ddp: bool) -> None:
    """One bit of a tensor of one rank is flipped before the comparison after three steps."""
    network = _network()
    model: nn.Module = DistributedDataParallel(network) if ddp else network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replicas = Replicas(model, optimizer, every=3)
    for step in range(3):
        torch.manual_seed(step)
        network[2](network[1](network[0](torch.randn(6, 5))).bfloat16()).float().square().mean().backward()
        optimizer.step()
        if step == 2 and int(os.environ["RANK"]) == odd:
            parameters = dict(network.named_parameters())
            momenta = {f"momentum_buffer of {n}": optimizer.state[p]["momentum_buffer"] for n, p in parameters.items()}
            found = (parameters | dict(network.named_buffers()) | momenta)[flipped]
            with torch.no_grad():
                found.reshape(-1).view(torch.uint8)[-1 if found.dim() else 0] ^= 1
        replicas.step()


@on_ranks(3)
def test_one_bit_is_found_and_its_rank_and_tensor_named() -> None:
    for flipped, ddp in (
        ("0.weight", True), ("2.bias", False), ("1.running_var", False), ("1.num_batches_tracked", True),
        ("momentum_buffer of 2.weight", True),
    ):  # fmt: skip
        said = alike(error_of(_flipped, flipped, 1, ddp))
        assert said.startswith("after 3 steps rank 1 on ")
        assert f"differs from most ranks, in {flipped}" in said


def _of_own_data(ignore: tuple[str, ...]) -> None:
    model = DistributedDataParallel(_network()[:2])
    replicas = Replicas(model, every=1, ignore=ignore)
    torch.manual_seed(int(os.environ["RANK"]))
    model(torch.randn(6, 5)).sum().backward()
    replicas.step()


@on_ranks(2)
def test_equal_ranks_pass_of_two_no_one_is_to_blame_alone_and_batch_norm_in_ddp_is_explained() -> None:
    assert error_of(_flipped, "", -1, True) == ""
    said = error_of(_flipped, "0.bias", 0, False)
    assert all(words in said for words in ("rank 0 on ", "rank 1 on ", "no majority"))
    assert "ignore=" in error_of(_of_own_data, ())
    assert error_of(_of_own_data, ("*running_mean", "*running_var")) == ""


@on_ranks(2)
def test_sharded_weights_and_state_and_nothing_at_all_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, copy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), DistributedDataParallel(nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    state = ZeroRedundancyOptimizer(copy.parameters(), torch.optim.Adam)
    assert "this model's are sharded" in error_of(lambda: Replicas(model).check())
    assert "ZeroRedundancyOptimizer divides it among ranks" in error_of(lambda: Replicas(copy, state).check())
    assert "no parameter and no buffer" in error_of(lambda: Replicas(nn.ReLU()).check())
    for every in (0, 1.5, float("nan")):  # of which the last two compared every third step, and never
        assert "a whole number of at least 1 step" in error_of(Replicas, nn.ReLU(), every=every)


def _of_an_odd_kind(odd: str) -> None:
    """A model with sparse and complex buffers, in which one rank differs."""
    model, is_odd = nn.Linear(2, 2, bias=False), os.environ["RANK"] == "1"
    torch.nn.init.ones_(model.weight)
    model.register_buffer("sparse", (torch.eye(3) * (2 if is_odd and odd == "sparse" else 1)).to_sparse())
    view = torch.tensor([1 + 2j, 1 + (3j if is_odd and odd == "view" else 2j)]).conj()
    model.register_buffer("view", view)
    model.register_buffer("negative", view[1:].imag)
    optimizer = torch.optim.Adam(model.parameters())
    if odd != "state" or is_odd:
        model.weight.grad = torch.zeros(2, 2)
        optimizer.step()
    Replicas(model, optimizer).check()


ODD = {
    "": "", "sparse": "no majority says who is right, in sparse",
    "view": "no majority says who is right, in view, negative",
    "state": "exp_avg of weight, exp_avg_sq of weight, step of weight on rank 1 alone",
}  # fmt: skip


@on_ranks(2)
def test_tensors_of_any_kind_and_those_of_one_rank_alone_are_named() -> None:
    for odd, expected in ODD.items():
        said = error_of(_of_an_odd_kind, odd)
        assert said.endswith(expected) if odd else said == ""


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
def test_a_key_that_is_no_whole_number_blames_no_rank() -> None:
    """Others are sent 2 of 2.5, computed other gradients, and the ranks were told to have failed."""
    audit = GradientAudit(lambda key: [torch.ones(2) * key], fraction=1.0)
    assert "key: a whole number" in error_of(audit.step, 2.5)
    assert audit.step(3)


@on_ranks(2)
def test_other_conditions_are_refused_on_every_rank() -> None:
    if os.environ["RANK"] == "1":
        torch.set_num_threads(2)
    assert "threads" in error_of(GradientAudit, lambda key: [])
