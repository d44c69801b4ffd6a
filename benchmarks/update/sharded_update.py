"""Sharded updates on emulated hosts: DDP, ZeroRedundancyOptimizer, FSDP2's hybrid sharding, ShardedUpdate. Needs root.

    sudo .venv/bin/python -m benchmarks update sharded-update --rate 1e9 --runs 7
    sudo .venv/bin/python -m benchmarks update sharded-update --memory

A multi-layer perceptron trained by SGD with momentum (or AdamW). A run is three steps one after another, and the wait
for the weights to be whole; runs of all contestants take turns, and each counts with its slowest rank. `bytes` is what
the kernel counted as sent at a host's interface, per step, the most of all hosts. With --memory each contestant has
processes of its own: `state` is the optimizer's tensors, `peak` the growth of a rank's resident memory since its
network was made, both the most of all ranks.

Needs: root, for the network lab.
"""

import json
import resource
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option

from torusgd.comm.connection import Elapsed
from torusgd.rehearse.lab import Host, Lab

from ..hosts import interface_bytes
from ..record import sample

STEPS = 3
HOSTS = 4


class Contestant(NamedTuple):
    """One way to train the network."""

    step: Callable[[], object]
    finish: Callable[[], object]
    """returns when this rank's weights are whole"""
    state: Callable[[], int]
    """bytes of the optimizer's tensors on this rank"""


def state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's tensors; of a DTensor the local part."""
    tensors = [t for values in optimizer.state.values() for t in values.values() if hasattr(t, "numel")]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def contestants(width: int, adam: bool) -> dict[str, Callable[[], Contestant]]:
    """How to make each, by name."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from torusgd import ShardedUpdate, ddp_hook
    from torusgd.comm.algorithms import squarest

    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    images, labels = torch.rand(16, 784, generator=generator), torch.randint(10, (16,), generator=generator)
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    values: dict[str, Any] = {"lr": 0.01} if adam else {"lr": 0.01, "momentum": 0.9}

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        sizes = [784, width, width, width]
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def train(model: nn.Module, optimizer: Any) -> Contestant:
        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        held = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer: the local one
        return Contestant(step, lambda: None, lambda: state_bytes(held))

    def ddp(hook: bool = False) -> Contestant:
        model = DistributedDataParallel(network(), bucket_cap_mb=4, gradient_as_bucket_view=True)
        if hook:
            ddp_hook(model)
        return train(model, kind(model.parameters(), **values))

    def zero() -> Contestant:
        model = DistributedDataParallel(network(), bucket_cap_mb=4, gradient_as_bucket_view=True)
        return train(model, ZeroRedundancyOptimizer(model.parameters(), kind, parameters_as_bucket_view=True, **values))

    def hybrid() -> Contestant:
        mesh = init_device_mesh("cpu", squarest(dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
        model = network()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return train(model, kind(model.parameters(), **values))

    def ours(allreduce: str, wire: Any) -> Contestant:
        model = network()
        update = ShardedUpdate(model, kind(model.parameters(), **values), allreduce, wire)
        if dist.get_rank() == 0:
            print("ran:", update.explanation)

        def step() -> None:
            nn.functional.cross_entropy(model(images), labels).backward()
            update.step()

        return Contestant(step, update.wait, lambda: state_bytes(update.sharded))

    return {
        "DDP": ddp,
        "DDP, ddp_hook()": lambda: ddp(hook=True),
        "DDP, ZeroRedundancyOptimizer": zero,
        "FSDP2, hybrid sharding": hybrid,
        "ShardedUpdate(ring)": lambda: ours("ring", None),
        "ShardedUpdate(auto)": lambda: ours("auto", None),
        "ShardedUpdate(auto, exact)": lambda: ours("auto", "exact"),
    }


def whole_run(made: Contestant) -> None:
    """Some steps, and the wait for whole weights."""
    for _ in range(STEPS):
        made.step()
    made.finish()


def resident() -> int:
    """Bytes of this process in memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def be_a_rank(width: int, runs: int, adam: bool, only: str | None) -> None:
    """Trains on one of the lab's ranks; the first tells what was found."""
    import torch
    import torch.distributed as dist

    from torusgd.comm.connection import Clock
    from torusgd.comm.groups import group_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    makers = contestants(width, adam)

    def largest(*numbers: float) -> list[float]:
        together = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    told: dict[str, Any] = {}
    if only:
        # What is allocated once: by an import that DDP and torch.optim make at first use, by kernels and by autograd.
        import torch._dynamo

        warm = torch.ones(8, 8, requires_grad=True)
        (warm @ warm).sum().backward()
        one = list(makers)[int(only) - 1]
        before = resident()
        made = makers[one]()
        for _ in range(2 * STEPS):
            made.step()
        made.finish()
        told[one] = largest(made.state(), resident() - before)
    else:
        clock = Clock(group_of())
        ready = {name: make() for name, make in makers.items()}
        for turn in range(runs + 1):
            for name, made in ready.items():
                dist.barrier()
                sent, span = interface_bytes()["tun0"], clock.span(partial(whole_run, made))
                dist.barrier()
                taken = clock.elapsed([span])[0]
                sent_a_step, state = largest((interface_bytes()["tun0"] - sent) / STEPS, made.state())
                milliseconds = [1e3 * each / STEPS for each in (taken.seconds, taken.skew + taken.bound)]
                found = [milliseconds[0], sent_a_step, state, milliseconds[1]]
                if turn:  # DDP lays out its buckets anew after the first step
                    told.setdefault(name, []).append(found)
    if dist.get_rank() == 0:
        parameters = 784 * width + 2 * width**2 + 10 * width + 3 * width + 10
        print("told:", json.dumps([parameters, told]))
    dist.barrier()


def told_by(lab: Lab, words: list[str]) -> tuple[list[str], int, dict[str, Any]]:
    """What ran, parameters of the network, and the findings."""
    lines = lab.run(["-m", __name__, "--rank", *words], timeout=900)[0].splitlines()
    told = json.loads(next(line for line in lines if line.startswith("told: ")).removeprefix("told: "))
    return [line.removeprefix("ran: ") for line in lines if line.startswith("ran: ")], told[0], told[1]


def main(
    rate: Annotated[float, Option(help="bits a second of each host's link")] = 1e9,
    latency: Annotated[float, Option(help="seconds")] = 1e-3,
    width: int = 1024,
    runs: int = 7,
    adam: Annotated[bool, Option("--adam", help="AdamW in place of SGD with momentum")] = False,
    memory: Annotated[bool, Option("--memory", help="memory in place of times and bytes")] = False,
    rank: Annotated[bool, Option("--rank", hidden=True)] = False,
    only: Annotated[str | None, Option(hidden=True)] = None,
) -> None:
    """Builds the lab and shows what its ranks tell."""
    if rank:
        be_a_rank(width, runs, adam, only)
        return
    words = ["--width", str(width), "--runs", str(runs), *(["--adam"] if adam else [])]
    kind = "AdamW" if adam else "SGD with momentum"
    with Lab([Host(latency=latency, rate=rate)] * HOSTS) as lab:
        if memory:
            rows, parameters = dict[str, Any](), 0
            for number in range(1, 8):
                _, parameters, found = told_by(lab, [*words, "--only", str(number)])
                rows |= found
            print(f"\n{HOSTS} ranks, {parameters / 1e6:.2f} million parameters, {kind}\n")
            print("| of | state MiB | peak growth MiB |", "|---|---|---|", sep="\n")
            for name, (state, peak) in rows.items():
                print(f"| {name} | {state / 2**20:.2f} | {peak / 2**20:.1f} |")
            return
        ran, parameters, told = told_by(lab, words)
    print(*ran, sep="\n")
    least = 2 * (HOSTS - 1) / HOSTS * 4 * parameters
    print(f"\n{HOSTS} hosts x 1 rank, {latency * 1e3:g} ms, {rate / 1e6:g} Mb/s; {kind}, "
          f"{parameters / 1e6:.2f} million parameters; n = {runs} runs of {STEPS} steps; "
          f"2 (N - 1)/N x 4 bytes of them: {least / 2**20:.2f} MiB\n")  # fmt: skip
    print("| step of | median ms | least - most | DDP / it | MiB sent a step | of the formula | skew ms |")
    print("|---|---|---|---|---|---|---|")
    plain = statistics.median(run[0] for run in told["DDP"])
    for name, taken in told.items():
        times, sent = [run[0] for run in taken], statistics.median(run[1] for run in taken)
        median, skew = statistics.median(times), statistics.median(run[3] for run in taken)
        mark = " *" * Elapsed(median, skew).is_doubtful
        sample(f"{kind}, {rate / 1e6:g} Mb/s, {name}, ms a step", times)
        print(f"| {name} | {median:.0f} | {min(times):.0f} - {max(times):.0f} | {plain / median:.2f} "
              f"| {sent / 2**20:.2f} | {sent / least:.2f} | {skew:.2g}{mark} |")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
