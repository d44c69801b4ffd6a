"""exact_all_reduce beside torch.distributed.all_reduce of float32 and of float64, in turn, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/exact_all_reduce.py
    torchrun --standalone --nproc-per-node 2 benchmarks/exact_all_reduce.py --elements 1000,1000000 --repetitions 21

Each rank has one float32 addend; the time is the slowest rank's, from a barrier to its end, the ratio that of the
medians, exact_all_reduce over the other. Gloo, one thread a rank.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torusgd import exact_all_reduce


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name, on tensors of so many elements."""
    values = torch.randn(numel)
    single, double = values.clone(), values.double()
    return {
        "all_reduce float32": lambda: dist.all_reduce(single.copy_(values)),
        "all_reduce float64": lambda: dist.all_reduce(double.copy_(values)),
        "exact_all_reduce float32": lambda: exact_all_reduce(values),
    }


def seconds(run: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", default="1000,100000,10000000")
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    lines = ["| elements | | median ms | least - most | exact / it |", "|---|---|---|---|---|"]
    for numel in map(int, options.elements.split(",")):
        runs = contestants(numel)
        turns = [[1e3 * seconds(run) for run in runs.values()] for _ in range(options.repetitions + 1)]
        columns = dict(zip(runs, zip(*turns[1:], strict=True), strict=True))  # the first turn warms up
        exact = statistics.median(columns["exact_all_reduce float32"])
        for name, times in columns.items():
            median = statistics.median(times)
            spread = f"{min(times):.3g} - {max(times):.3g}"
            lines.append(f"| {numel:,} | {name} | {median:.3g} | {spread} | {exact / median:.2f} |")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, n = {options.repetitions}", "", *lines, sep="\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
