"""The sharded update in plain training loops: it trains as DistributedDataParallel does, and shards its state."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks, write_profile
from tests.messages import refused
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
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-2),
}  # fmt: skip


class Attentive(nn.Module):
    """Reads the weights of a module that is never called (attention's projection), and ties two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(7, 96)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.wide = nn.Linear(96, 200)
        self.back = nn.Linear(200, 96)
        self.tied = nn.Linear(200, 96)
        self.tied.weight = self.back.weight
        self.out = nn.Linear(96, 3)
        self.unused = nn.Linear(50, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.relu(self.wide(x))
        return self.out(torch.relu(self.back(x)) + self.tied(x)).mean(dim=1)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Attentive()


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(network: nn.Module, step: int) -> torch.Tensor:
    return network(batch(step)).square().mean()


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
    optimizer = OPTIMIZERS[name](network)
    update = ShardedUpdate(network, optimizer, **how)
    for step in range(STEPS):
        loss(network, step).backward()
        assert update.step() == []
    update.wait()
    state = update.state_dict()
    own = sum(t.numel() for s in update.sharded.state.values() for t in s.values() if torch.is_tensor(t))
    update.close()
    return [p.detach() for p in network.parameters()], state, own


def every_optimizer() -> list[str]:
    wrong = []
    for name, make in OPTIMIZERS.items():
        expected, optimizer = plain(name)
        for how in (
            {"allreduce": "native"},
            {"allreduce": "ring", "bucket_mib": 0.05},
            {"allreduce": "torus", "wire": "exact"},
        ):
            found, state, own = sharded(name, **how)
            pairs = list(zip(found, expected, strict=True))[:-2]  # without those of the unused layer
            if not all(torch.allclose(a, b, rtol=1e-3, atol=2e-5) for a, b in pairs):
                wrong.append(f"{name} {how}: weights")
            elements = sum(t.numel() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
            if own > elements / dist.get_world_size() + 20_000:
                wrong.append(f"{name} {how}: {own} of {elements} elements of state")
            if dist.get_rank() == 0:
                fresh = make(model())
                fresh.load_state_dict(state)  # the plain optimizer takes it
                theirs, mine = optimizer.state_dict()["state"], fresh.state_dict()["state"]
                for index, values in theirs.items():
                    for key, value in values.items():
                        if torch.is_tensor(value) and not torch.allclose(mine[index][key], value, rtol=1e-2, atol=1e-4):
                            wrong.append(f"{name} {how}: state {index} {key}")
    return wrong


def bits_and_states(profile: Path) -> list[object]:
    """What each rank ends with: one hash for any algorithm, accumulation, resumption, overflow and nan."""
    seen: list[object] = []
    weights = [sharded("Lars", allreduce=a, wire="exact")[0] for a in ("native", "ring", "halving-doubling")]
    weights.append(sharded("Lars", allreduce="auto", profile=profile, wire="exact")[0])
    seen.append(all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True)))
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
    pairs = list(zip(network.parameters(), again.parameters(), strict=True))
    seen.append(max(float((a - b).abs().max()) for a, b in pairs) < 1e-5)
    seen.append(all(bool(p.isfinite().all()) for p in network.parameters()))
    before = [p.clone() for p in network.parameters()]
    (loss(network, 5) * (math.nan if dist.get_rank() == 1 else 1.0)).backward()
    seen.append("out.weight" in update.step())
    update.wait()
    seen.append(all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)))
    loss(network, 6).backward()
    try:
        loss(network, 6).backward()
    except UserError as error:
        seen.append("no_sync" in str(error))
    try:
        ShardedUpdate(DistributedDataParallel(model()), OPTIMIZERS["SGD"](network))
    except UserError as error:
        seen.append("DistributedDataParallel" in str(error))
    return seen


def everything(profile: Path) -> tuple[list[str], list[object]]:
    return every_optimizer(), bits_and_states(profile)


def test_it_trains_as_ddp_does_and_shards_the_state(tmp_path):
    for wrong, seen in run_ranks(3, everything, write_profile(tmp_path, 3)):
        assert wrong == []
        assert seen == [True] * 7


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
        with refused(f"a sharded update, {about}", about):
            ShardedUpdate(network, optimizer, wire=wire)
