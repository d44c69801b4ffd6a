"""Steps of one network under DDP, DDP's fp16 hook, FSDP2's hybrid sharding, and DDP with our hook, in turn. Needs root.

    sudo .venv/bin/python -m benchmarks allreduce ddp-hook --setup far --steps 10 --width 512

A step is forward, backward and SGD of a multi-layer perceptron (width 512: 2.6 MiB of gradients; 1,024: 7.1 MiB) on
emulated hosts; the time is from the last begin to the last end, the ratio that of the medians, plain DDP over it.

Needs: root, for the network lab.
"""

import json
from collections.abc import Callable
from typing import Annotated

import typer
from typer import Option

from torusgd.comm.connection import Clock, Elapsed, typical
from torusgd.rehearse.lab import Lab

from ..record import sample
from .allreduce import DESCRIBED, SETUPS


def variants(width: int) -> dict[str, Callable[[], object]]:
    """A step of each variant, by name."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from torusgd import ddp_hook
    from torusgd.comm.algorithms import squarest

    torch.manual_seed(1 + dist.get_rank())
    images, labels = torch.rand(16, 784), torch.randint(10, (16,))

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        return nn.Sequential(*layers)

    def ddp() -> DistributedDataParallel:
        return DistributedDataParallel(network(), bucket_cap_mb=4)

    models: dict[str, nn.Module] = {"DDP": ddp()}
    fp16 = ddp()
    fp16.register_comm_hook(None, fp16_compress_hook)
    models["DDP, fp16_compress_hook"] = fp16
    mesh = init_device_mesh("cpu", squarest(dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    hybrid = network()
    for layer in hybrid:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(hybrid, mesh=mesh, reshard_after_forward=False)
    models["FSDP2, hybrid sharding"] = hybrid
    for wire in (None, "float16", "exact"):
        models[f"DDP, ddp_hook(wire={wire})"] = ours = ddp()
        hook = ddp_hook(ours, wire=wire)
        if dist.get_rank() == 0:
            print(hook.explanation)

    def make_step(model: nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    return {name: make_step(model) for name, model in models.items()}


def be_a_rank(steps: int, width: int) -> None:
    """Times on one of the lab's ranks; the first tells the milliseconds."""
    import torch
    import torch.distributed as dist

    from torusgd.comm.groups import group_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock = Clock(group_of())
    found: dict[str, list[Elapsed]] = {}
    contestants = variants(width)
    for turn in range(steps + 2):
        for name, step in contestants.items():
            taken = clock.elapsed([clock.span(step)])
            if turn >= 2:  # DDP lays out its buckets anew after the first step
                found.setdefault(name, []).extend(taken)
    if dist.get_rank() == 0:
        print("told:", json.dumps(found))
    dist.barrier()


def main(
    setup: Annotated[str, Option(help=", ".join(SETUPS))] = "far",
    steps: int = 7,
    width: int = 512,
    rank: Annotated[bool, Option("--rank", hidden=True)] = False,
) -> None:
    """Builds the lab and shows what its ranks tell."""
    if rank:
        be_a_rank(steps, width)
        return
    given = ["--steps", str(steps), "--width", str(width)]
    with Lab(SETUPS[setup]) as lab:
        lines = lab.run(["-m", __name__, "--rank", *given], timeout=900)[0].splitlines()
    print(*[line for line in lines if line.startswith("allreduce")], sep="\n")
    found = json.loads(next(line for line in lines if line.startswith("told: ")).removeprefix("told: "))
    print(f"\n{DESCRIBED[setup]}, width {width}, n = {steps}\n")
    print("| step of | median ms | least - most | DDP / it | skew ms |", "|---|---|---|---|---|", sep="\n")
    taken = {name: [Elapsed(*each) for each in times] for name, times in found.items()}
    plain = typical(taken["DDP"]).seconds
    for name, each in taken.items():
        middle, times = typical(each), sorted(1e3 * one.seconds for one in each)
        sample(f"{setup}, width {width}, {name}, ms", times)
        skew = f"{1e3 * (middle.skew + middle.bound):.2g}" + " *" * middle.is_doubtful
        spread = f"{times[0]:.0f} - {times[-1]:.0f}"
        print(f"| {name} | {1e3 * middle.seconds:.0f} | {spread} | {plain / middle.seconds:.2f} | {skew} |")


if __name__ == "__main__":
    typer.run(main)
