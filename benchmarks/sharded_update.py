"""Sharded updates on emulated hosts: DDP, ZeroRedundancyOptimizer, FSDP2's hybrid sharding, ShardedUpdate. Needs root.

    sudo .venv/bin/python benchmarks/sharded_update.py --rate 1e9 --runs 7
    sudo .venv/bin/python benchmarks/sharded_update.py --memory

A multi-layer perceptron trained by SGD with momentum (or AdamW). A run is three steps one after another, and the wait
for the weights to be whole; runs of all contestants take turns, and each counts with its slowest rank. `bytes` is what
the kernel counted as sent at a host's interface, per step, the most of all hosts. With --memory each contestant has
processes of its own: `state` is the optimizer's tensors, `peak` the growth of a rank's resident memory since its
network was made, both the most of all ranks.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from torusgd.rehearse.lab import Host, Lab, interface_bytes

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


def resident() -> int:
    """Bytes of this process in memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def be_a_rank(options: argparse.Namespace) -> None:
    """Trains on one of the lab's ranks; the first tells what was found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    makers = contestants(options.width, options.adam)

    def largest(*numbers: float) -> list[float]:
        together = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.tolist()

    told: dict[str, Any] = {}
    if options.only:
        # What is allocated once: by an import that DDP and torch.optim make at first use, by kernels and by autograd.
        import torch._dynamo

        warm = torch.ones(8, 8, requires_grad=True)
        (warm @ warm).sum().backward()
        one = list(makers)[int(options.only) - 1]
        before = resident()
        made = makers[one]()
        for _ in range(2 * STEPS):
            made.step()
        made.finish()
        told[one] = largest(made.state(), resident() - before)
    else:
        ready = {name: make() for name, make in makers.items()}
        for turn in range(options.runs + 1):
            for name, made in ready.items():
                dist.barrier()
                sent, begin = interface_bytes()["tun0"].sent, time.perf_counter()
                for _ in range(STEPS):
                    made.step()
                made.finish()
                taken = time.perf_counter() - begin
                dist.barrier()
                found = largest(1e3 * taken / STEPS, (interface_bytes()["tun0"].sent - sent) / STEPS, made.state())
                if turn:  # DDP lays out its buckets anew after the first step
                    told.setdefault(name, []).append(found)
    if dist.get_rank() == 0:
        parameters = 784 * options.width + 2 * options.width**2 + 10 * options.width + 3 * options.width + 10
        print("told:", json.dumps([parameters, told]))
    dist.barrier()


def told_by(lab: Lab, words: list[str]) -> tuple[list[str], int, dict[str, Any]]:
    """What ran, parameters of the network, and the findings."""
    lines = lab.run([__file__, "--rank", *words], timeout=900)[0].splitlines()
    told = json.loads(next(line for line in lines if line.startswith("told: ")).removeprefix("told: "))
    return [line.removeprefix("ran: ") for line in lines if line.startswith("ran: ")], told[0], told[1]


def main() -> None:
    """Builds the lab and shows what its ranks tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second of each host's link")
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--adam", action="store_true", help="AdamW in place of SGD with momentum")
    parser.add_argument("--memory", action="store_true", help="memory in place of times and bytes")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_a_rank(options)
        return
    words = ["--width", str(options.width), "--runs", str(options.runs), *(["--adam"] if options.adam else [])]
    kind = "AdamW" if options.adam else "SGD with momentum"
    with Lab([Host(latency=options.latency, rate=options.rate)] * HOSTS) as lab:
        if options.memory:
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
    print(f"\n{HOSTS} hosts x 1 rank, {options.latency * 1e3:g} ms, {options.rate / 1e6:g} Mb/s; {kind}, "
          f"{parameters / 1e6:.2f} million parameters; n = {options.runs} runs of {STEPS} steps; "
          f"2 (N - 1)/N x 4 bytes of them: {least / 2**20:.2f} MiB\n")  # fmt: skip
    print("| step of | median ms | least - most | DDP / it | MiB sent a step | of the formula |")
    print("|---|---|---|---|---|---|")
    plain = statistics.median(run[0] for run in told["DDP"])
    for name, runs in told.items():
        times, sent = [run[0] for run in runs], statistics.median(run[1] for run in runs)
        median = statistics.median(times)
        print(f"| {name} | {median:.0f} | {min(times):.0f} - {max(times):.0f} | {plain / median:.2f} "
              f"| {sent / 2**20:.2f} | {sent / least:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
