"""exact_all_reduce beside torch.distributed.all_reduce of float32 and of float64, in turn, in one run.

    torchrun --standalone --nproc-per-node 2 -m benchmarks allreduce exact-all-reduce
    torchrun --nproc-per-node 2 -m benchmarks allreduce exact-all-reduce --elements 1000,1000000 --repetitions 21

Each rank has one float32 addend; the time is from the last rank's begin to the last one's end, the ratio that of the
medians, exact_all_reduce over the other. Gloo, one thread a rank.

Needs: torchrun.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import typer

from torusgd import exact_all_reduce
from torusgd.comm.connection import Clock, typical
from torusgd.comm.groups import group_of

from ..record import sample


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name, on tensors of so many elements."""
    values = torch.randn(numel)
    single, double = values.clone(), values.double()
    return {
        "all_reduce float32": lambda: dist.all_reduce(single.copy_(values)),
        "all_reduce float64": lambda: dist.all_reduce(double.copy_(values)),
        "exact_all_reduce float32": lambda: exact_all_reduce(values),
    }


def main(
    elements: str = "1000,100000,10000000",
    repetitions: int = 11,
) -> None:
    """Prints a table in Markdown."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    clock = Clock(group_of())
    lines = ["| elements | | median ms | least - most | exact / it | skew ms |", "|---|---|---|---|---|---|"]
    for numel in map(int, elements.split(",")):
        runs = contestants(numel)
        turns = [clock.elapsed([clock.span(run) for run in runs.values()]) for _ in range(repetitions + 1)]
        columns = dict(zip(runs, zip(*turns[1:], strict=True), strict=True))  # the first turn warms up
        exact = typical(columns["exact_all_reduce float32"]).seconds
        for name, times in columns.items():
            middle, milliseconds = typical(times), [1e3 * each.seconds for each in times]
            sample(f"{numel} elements, {name}, ms", milliseconds)
            spread = f"{min(milliseconds):.3g} - {max(milliseconds):.3g}"
            skew = f"{1e3 * (middle.skew + middle.bound):.2g}" + " *" * middle.is_doubtful
            figures = f"{1e3 * middle.seconds:.3g} | {spread} | {exact / middle.seconds:.2f} | {skew}"
            lines.append(f"| {numel:,} | {name} | {figures} |")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, n = {repetitions}", "", *lines, sep="\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
