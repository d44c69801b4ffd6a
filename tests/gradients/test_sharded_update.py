"""The sharded update in plain training loops: it trains as DistributedDataParallel does, and shards its state."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import on_ranks, run_ranks, write_profile
from tests.messages import refuses
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torusgd import Lars, ShardedUpdate
from torusgd.errors import UserError
from torusgd.optim import Sgd

STEPS = 3
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Lars": lambda m: Lars(
        [{"params": [p for p in m.parameters() if p.dim() > 1]},
         {"params": [p for p in m.parameters() if p.dim() < 2], "trust": None}], lr=0.5, weight_decay=1e-3,
    ),
    "Lars tensorflow": lambda m: Lars(m.parameters(), lr=0.5, weight_decay=1e-3, variant="tensorflow"),
    "Sgd": lambda m: Sgd(m.parameters(), lr=0.1, momentum=0.9),
    "SGD": lambda m: torch.optim.SGD([{"params": p, "momentum": 0.9 * (p.dim() > 1)} for p in m.parameters()], lr=0.1),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-2),
}  # fmt: skip


class Attentive(nn.Module):
    """Reads the weights of a module that is never called (attention's projection), and ties two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(7, 96)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.wide, self.back = nn.Linear(96, 200), nn.Linear(200, 96)
        self.tied = nn.Linear(200, 96)
        self.tied.weight = self.back.weight
        self.out, self.unused = nn.Linear(96, 3), nn.Linear(50, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.relu(self.wide(x))
        return self.out(torch.relu(self.back(x)) + self.tied(x)).mean(dim=1)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Attentive()


def loss(network: nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return network(images).square().mean()


def plain(name: str) -> tuple[list[torch.Tensor], Optimizer]:
    """The same training by DistributedDataParallel."""
    network = model()
    ddp = DistributedDataParallel(network, find_unused_parameters=True)
    optimizer = OPTIMIZERS[name](network)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, step).backward()
        optimizer.step()
    return [p.detach() for p in network.parameters()], optimizer


def sharded(name: str, **how: object) -> tuple[list[torch.Tensor], dict, int]:
    """Weights, whole state, and elements of state on this rank."""
    network = model(seed=dist.get_rank())  # rank 0's weights are taken
    update = ShardedUpdate(network, OPTIMIZERS[name](network), **how)
    for step in range(STEPS):
        loss(network, step).backward()
        assert update.step() == []
    update.wait()
    state = update.state_dict()
    own = sum(t.numel() for s in update.sharded.state.values() for t in s.values() if torch.is_tensor(t))
    update.close()
    return [p.detach() for p in network.parameters()], state, own


@pytest.mark.parametrize(
    "how", [{"allreduce": "native"}, {"allreduce": "ring", "bucket_mib": 0.05}, {"allreduce": "torus", "wire": "exact"}]
)
@on_ranks(3)
def test_it_trains_as_ddp_does_and_shards_the_state(how: dict[str, object]) -> None:
    for name, make in OPTIMIZERS.items():
        expected, optimizer = plain(name)
        found, state, own = sharded(name, **how)
        for ours, theirs in list(zip(found, expected, strict=True))[:-2]:  # without those of the unused layer
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=2e-5)
        elements = sum(t.numel() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
        assert own <= elements / dist.get_world_size() + 20_000
        if dist.get_rank() == 0:
            fresh = make(model())
            fresh.load_state_dict(state)  # the plain optimizer takes it
            mine = fresh.state_dict()["state"]
            for index, values in optimizer.state_dict()["state"].items():
                for key, value in values.items():
                    assert not torch.is_tensor(value) or torch.allclose(mine[index][key], value, rtol=1e-2, atol=1e-4)


def bits_and_states(profile: Path) -> None:
    """The same bits by any algorithm, after accumulation, resumption and overflow; nan changes nothing."""
    how: tuple[dict[str, object], ...] = ({"allreduce": "native"}, {"allreduce": "ring"}, {"profile": profile})
    weights, *others = [sharded("Lars", **each, wire="exact")[0] for each in how]
    assert all(all(map(torch.equal, weights, other)) for other in others)
    network = model()
    update = ShardedUpdate(network, OPTIMIZERS["AdamW"](network), "torus", "exact")
    for step in range(2):
        with update.no_sync():
            loss(network, step).mul(0.5).backward()
        loss(network, step).mul(0.5).backward()
        assert update.step() == []
    states = [update.state_dict()]
    dist.broadcast_object_list(states, 0)
    update.wait()
    again = model()
    again.load_state_dict(network.state_dict())
    resumed = ShardedUpdate(again, OPTIMIZERS["AdamW"](again), "ring", "exact")
    resumed.load_state_dict(states[0])
    # A gradient a million times larger leaves the range: measured, and repeated.
    for step, factor in ((2, 1.0), (3, 1e6), (4, 1.0)):
        for one, net in ((update, network), (resumed, again)):
            (loss(net, step) * factor).backward()
            assert one.step() == []
    update.wait(), resumed.wait()
    for a, b in zip(network.parameters(), again.parameters(), strict=True):
        assert a.isfinite().all()
        assert float((a - b).abs().max()) < 1e-5
    before = [p.clone() for p in network.parameters()]
    (loss(network, 5) * (math.nan if dist.get_rank() == 1 else 1.0)).backward()
    assert "out.weight" in update.step()
    update.wait()
    assert all(map(torch.equal, before, network.parameters()))
    loss(network, 6).backward()
    with pytest.raises(UserError, match="no_sync"):
        loss(network, 6).backward()
    with pytest.raises(UserError, match="DistributedDataParallel"):
        ShardedUpdate(DistributedDataParallel(model()), OPTIMIZERS["SGD"](network))


def test_bits_and_states_are_those_of_any_algorithm(tmp_path):
    run_ranks(3, bits_and_states, write_profile(tmp_path, 3))


def test_a_parameter_without_dimensions_goes_on():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.scale = nn.Parameter(torch.tensor(1.0))

    states: list[dict[str, Any]] = [{}]
    for _ in range(2):
        update = ShardedUpdate(net := Scaled(), torch.optim.NAdam(net.parameters()))
        if states[-1]:
            update.load_state_dict(states[-1])
        (net(torch.ones(1, 4)).sum() * net.scale).backward()
        assert update.step() == []
        states.append(update.state_dict())


def test_mistakes_are_refused_before_anything_runs():
    layer = nn.Linear(4, 2)
    used = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 4)).sum().backward()
    used.step()
    other, half, both = nn.Linear(4, 2), nn.Linear(4, 2).half(), nn.Sequential(layer, nn.Linear(2, 2))
    wrong: list[tuple[nn.Module, torch.optim.Optimizer, Any, str]] = [
        (layer, torch.optim.SGD(layer.parameters(), lr=0.1), "int8", "wire int8"),
        (layer, torch.optim.LBFGS(layer.parameters()), None, "LBFGS"),
        (layer, used, None, "optimizer: has a state"),
        (both, torch.optim.SGD(layer.parameters(), lr=0.1), None, "1.weight: requires a gradient"),
        (layer, torch.optim.SGD([*layer.parameters(), *other.parameters()], lr=0.1), None, "optimizer: holds"),
        (half, torch.optim.SGD(half.parameters(), lr=0.1), None, "weight: must be float32"),
    ]
    for network, optimizer, wire, about in wrong:
        refuses(f"a sharded update, {about}", ShardedUpdate, network, optimizer, wire=wire, about=about)
    ShardedUpdate(other, optimizer := torch.optim.SGD(other.parameters(), lr=0.1))
    refuses("a sharded update, optimizer.step()", optimizer.step, about="optimizer.step()")
