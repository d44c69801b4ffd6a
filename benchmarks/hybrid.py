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
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torusgd.rehearse.lab import Host, Lab, interface_bytes
from torusgd.tensor_parallel.volume import best_groups, hybrid_volume

if TYPE_CHECKING:
    from torch import Tensor

WIDTH, LAYERS = 1024, 2


def volume(ranks: int, images: int, parallel: int) -> float:
    """Bytes that a rank sends a step, after Das et al."""
    return LAYERS * sum(hybrid_volume(WIDTH, WIDTH * WIDTH, ranks, images * ranks, ranks // parallel))


def best(ranks: int, images: int) -> int:
    """The planner's number of model-parallel ranks."""
    return ranks // best_groups(WIDTH, WIDTH * WIDTH, ranks, images * ranks)


def be_a_rank(images: list[int], parallel: list[int], repetitions: int) -> None:
    """Takes the steps of every case, in turn; the first rank tells the records."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    cases = [(n, m, make_step(n, m)) for n in images for m in parallel]
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
            if repetition:  # the first one also measures the gradients' scales
                seconds, volume_sent = (numbers / dist.get_world_size()).tolist()
                records[n, m].append((seconds, volume_sent))
    if dist.get_rank() == 0:
        found = [
            {"images": n, "model_parallel": m, "seconds": [s for s, _ in taken], "bytes": median(b for _, b in taken)}
            for (n, m), taken in records.items()
        ]
        print("told:", json.dumps(found))


def make_step(images: int, parallel: int) -> Callable[[], None]:
    """A step with so many images a rank and model-parallel ranks, to be called again and again."""
    import torch
    from torch import nn

    from torusgd.comm.allreduce import create
    from torusgd.comm.groups import group_of
    from torusgd.gradients.reducer import Channel, Reducer
    from torusgd.gradients.update import Update
    from torusgd.optim import build_optimizer
    from torusgd.precision import Precision
    from torusgd.recipe.load import load_recipe
    from torusgd.tensor_parallel.column_pass import ColumnPass
    from torusgd.tensor_parallel.tail import ParallelTail, column_tail

    world = group_of()
    sgd = "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}"
    recipe = load_recipe("digits", [sgd, "precision=float32", "memory_format=contiguous"]).recipe
    layers = [[nn.Linear(WIDTH, WIDTH), nn.Sigmoid()] for _ in range(LAYERS)]
    model = nn.Sequential(*[module for layer in layers for module in layer][:-1])

    tail = ParallelTail(model, column_tail(model, blocks=world.size), [parallel] * LAYERS, world)
    reducer = Reducer(
        tail.slots,
        reduction="exact",
        addends=world.size,
        channels={m: Channel(create("ring", group=tail.groups.data_parallel(m))) for m in sorted({1, parallel})},
        maximum_over_ranks=lambda maxima: world.all_reduce(maxima, maximum=True),
        rule="auto",
    )
    optimizer = build_optimizer(recipe.optimizer, model, 1e-4, tail.held)
    update = Update(model, optimizer, reducer, sum_over_ranks=world.all_reduce, columns=tail)
    slots = tail.held_slots()

    def take_gradients(layer: int, block: int, weight: "Tensor", bias: "Tensor | None") -> None:
        assert bias is not None
        reducer.add(slots[layer, block, True], bias)
        reducer.add(slots[layer, block, False], weight)

    columns = ColumnPass(
        tail.tail, tail.parallel, world.rank, tail.groups, Precision(recipe, world.device), 0.1, 0, take_gradients
    )
    inputs, targets = torch.randn(images, WIDTH, requires_grad=True), torch.randint(WIDTH, (images,))

    def passes() -> None:
        reducer.begin_worker(last=True)
        columns.begin(targets)
        columns.forward(inputs, 0, lambda rank: rank)
        columns.backward()
        reducer.end_worker()

    def step() -> None:
        report = reducer.reduce(passes).report
        assert not report.nonfinite
        reducer.apply_mean(world.size)
        update.step()

    return step


def table(ranks: int, found: list[dict[str, Any]]) -> str:
    """Markdown: cases down; bytes against the formula, seconds with their spread, and both optima."""
    lines = [
        "| images a rank | M | sent MB | formula MB | sent / formula | step s, median | least - most | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in found:
        n, m = record["images"], record["model_parallel"]
        rivals = [r for r in found if r["images"] == n]
        notes = ["formula's best"] if best(ranks, n) == m else []
        notes += ["fewest bytes"] if record["bytes"] == min(r["bytes"] for r in rivals) else []
        typical = median(record["seconds"])
        notes += ["fastest"] if typical == min(median(r["seconds"]) for r in rivals) else []
        want, sent = volume(ranks, n, m), record["bytes"]
        lines.append(
            f"| {n} | {m} | {sent / 1e6:.3f} | {want / 1e6:.3f} | {sent / want if want else float('nan'):.4f} "
            f"| {typical:.3f} | {min(record['seconds']):.3f} - {max(record['seconds']):.3f} | {', '.join(notes)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Builds the lab and shows what its ranks tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--images", default="16,64,256", help="of each rank's virtual worker")
    parser.add_argument("--model-parallel", default="1,2,4,8", help="ranks that share the layers")
    parser.add_argument("--rate", type=float, default=1e8, help="bits a second of each link")
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds, one way")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        images, parallel = (
            [int(word) for word in text.split(",")] for text in (options.images, options.model_parallel)
        )
        be_a_rank(images, parallel, options.repetitions)
        return
    given = ["--images", options.images, "--model-parallel", options.model_parallel]
    given += ["--repetitions", str(options.repetitions)]
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
