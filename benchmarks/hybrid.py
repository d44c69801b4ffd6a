"""Hybrid parallelism on emulated hosts: bytes and seconds of a step for each number of model-parallel ranks.

Needs root.

    sudo .venv/bin/python benchmarks/hybrid.py --images 16,64,256
    sudo .venv/bin/python benchmarks/hybrid.py --images 64 --rate 1e8 --json hybrid.json

Each host is one rank with a link of set latency and bandwidth (`torusgd.rehearse.lab`). A step is the trainer's own:
forward, backward, exact sums, SGD, of two linear layers of 1,024 inputs and outputs; what is before them is left out.
The bytes are what the kernel counted at the hosts' interfaces, headers included. Beside them stands the exact volume
of Das et al. (arXiv 1602.06709; `torusgd.tensor_parallel.volume`), and what the planner's formula takes to be the
best.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from torusgd.rehearse.lab import Host, Lab, interface_bytes
from torusgd.tensor_parallel.volume import Linear, best_groups, hybrid_volume

WIDTH, LAYERS = 1024, 2


def volume(ranks: int, images: int, parts: int) -> float:
    """Bytes that a rank sends a step, after Das et al."""
    shape = Linear(WIDTH, WIDTH)
    return LAYERS * sum(hybrid_volume(shape, ranks, images * ranks, ranks // parts))


def best(ranks: int, images: int) -> int:
    """The planner's number of model-parallel ranks."""
    return ranks // best_groups(Linear(WIDTH, WIDTH), ranks, images * ranks)


def be_a_rank(images: list[int], parts: list[int], repetitions: int) -> None:
    """Takes the steps of every case, in turn; the first rank tells the records."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    cases = [(n, m, _stepper(n, m)) for n in images for m in parts]
    records: dict[tuple[int, int], list[tuple[float, float]]] = {(n, m): [] for n, m, _ in cases}
    for repetition in range(repetitions + 1):
        for n, m, take in cases:
            dist.barrier()
            sent, started = interface_bytes()["tun0"].sent, time.perf_counter()
            take()
            numbers = torch.tensor([time.perf_counter() - started, 0.0], dtype=torch.float64)
            dist.barrier()
            numbers[1] = interface_bytes()["tun0"].sent - sent
            dist.all_reduce(numbers)
            if repetition:
                seconds, volume_sent = (numbers / dist.get_world_size()).tolist()
                records[n, m].append((seconds, volume_sent))
    if dist.get_rank() == 0:
        found = [
            {"images": n, "parts": m, "seconds": [s for s, _ in told], "bytes": statistics.median(b for _, b in told)}
            for (n, m), told in records.items()
        ]
        print("told:", json.dumps(found))


def _stepper(images: int, parts: int):
    """One step of the case, to be called again and again."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from torusgd.comm.allreduce import create
    from torusgd.comm.groups import group_of
    from torusgd.comm.monitor import Monitor
    from torusgd.optim import build_optimizer
    from torusgd.precision import Precision
    from torusgd.recipe.load import load_recipe
    from torusgd.recipe.runtime_options import RuntimeOptions
    from torusgd.tensor_parallel.column_pass import ColumnPass
    from torusgd.tensor_parallel.parallel_tail import hybrid_tail

    size = dist.get_world_size()
    ranks = group_of()
    sgd = "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}"
    given = [f"virtual_workers={size}", f"column_blocks={size}", sgd, "memory_format=contiguous"]
    recipe = load_recipe("digits", given).recipe
    layers = [[nn.Linear(WIDTH, WIDTH), nn.Sigmoid()] for _ in range(LAYERS)]
    model = nn.Sequential(*[module for layer in layers for module in layer][:-1])
    options = RuntimeOptions(model_parallel=parts, allreduce="ring")
    hybrid = hybrid_tail(model, recipe, options, ranks, create("ring"))
    assert hybrid is not None
    optimizer = build_optimizer(recipe.optimizer, model, 1e-4, hybrid.held, hybrid.norms())
    reducer = hybrid.reducer(recipe.virtual_workers, 4.0, Monitor())
    precision = Precision(recipe, ranks.device)
    passing = ColumnPass(hybrid.tail, hybrid.parts, ranks.rank, hybrid.groups, precision, 0.1, 0, reducer.add)
    inputs, targets = torch.randn(images, WIDTH), torch.randint(WIDTH, (images,))

    def run(measuring: bool) -> None:
        reducer.begin(measuring)
        reducer.begin_round(last=True)
        passing.begin(targets)
        passing.forward(inputs.requires_grad_(), 0, lambda rank: rank)
        passing.backward()

    def take() -> None:
        if reducer.needs_measure:
            run(measuring=True)
            reducer.finish_measuring()
        run(measuring=False)
        assert reducer.finish().accepted
        reducer.apply_mean()
        optimizer.step()

    return take


def table(ranks: int, found: list[dict]) -> str:
    """Markdown: cases down; bytes against the formula, seconds with their spread, and both optima."""
    lines = [
        "| images a rank | M | sent MB | formula MB | sent / formula | step s, median | least - most | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in found:
        n, m = record["images"], record["parts"]
        rivals = [r for r in found if r["images"] == n]
        notes = ["formula's best"] if best(ranks, n) == m else []
        notes += ["fewest bytes"] if record["bytes"] == min(r["bytes"] for r in rivals) else []
        medians = [statistics.median(r["seconds"]) for r in rivals]
        median = statistics.median(record["seconds"])
        notes += ["fastest"] if median == min(medians) else []
        want, sent = volume(ranks, n, m), record["bytes"]
        lines.append(
            f"| {n} | {m} | {sent / 1e6:.3f} | {want / 1e6:.3f} | {sent / want if want else float('nan'):.4f} "
            f"| {median:.3f} | {min(record['seconds']):.3f} - {max(record['seconds']):.3f} | {', '.join(notes)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Builds the lab and shows what its ranks tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--images", default="16,64,256", help="of each rank's virtual worker")
    parser.add_argument("--parts", default="1,2,4,8", help="model-parallel ranks")
    parser.add_argument("--rate", type=float, default=1e8, help="bits a second of each link")
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds, one way")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        images, parts = ([int(word) for word in text.split(",")] for text in (options.images, options.parts))
        be_a_rank(images, parts, options.repetitions)
        return
    given = ["--images", options.images, "--parts", options.parts, "--repetitions", str(options.repetitions)]
    with Lab([Host(latency=options.latency, rate=options.rate)] * options.hosts) as lab:
        output = lab.run([__file__, "--rank", *given], timeout=900)[0]
    found = json.loads(next(line for line in output.splitlines() if line.startswith("told: ")).removeprefix("told: "))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{options.hosts} hosts x 1 rank, {options.latency * 1e3:g} ms, {options.rate / 1e6:g} Mb/s, "
        f"{LAYERS} layers of {WIDTH} x {WIDTH}, float32, n = {options.repetitions}\n"
    )
    print(table(options.hosts, found))


if __name__ == "__main__":
    main()
