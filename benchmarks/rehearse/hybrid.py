"""Hybrid parallelism on emulated hosts: bytes and seconds of a step for each number of model-parallel ranks.

    sudo .venv/bin/python -m benchmarks rehearse hybrid --images 16,64,256
    sudo .venv/bin/python -m benchmarks rehearse hybrid --images 64 --rate 1e8 --json hybrid.json

Each host is one rank with a link of set latency and bandwidth (`torusgd.rehearse.lab`). A step is the trainer's own:
forward, backward, exact sums, SGD, of two linear layers of 1,024 inputs and outputs; what is before them is left out.
The bytes are what the kernel counted at the hosts' interfaces, headers included. Beside them stands the exact volume
of Das et al. (arXiv 1602.06709; `torusgd.tensor_parallel.tail`), and what the planner's formula takes to be the
best.

Needs: root, for the network lab.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from torusgd.comm.connection import Elapsed
from torusgd.rehearse.lab import Host, Lab
from torusgd.tensor_parallel.tail import best_groups, hybrid_volume

from ..hosts import interface_bytes
from ..record import sample

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

    from torusgd.comm.connection import Clock
    from torusgd.comm.groups import group_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    cases = [(n, m, make_step(n, m)) for n in images for m in parallel]
    clock = Clock(group_of())
    records: dict[tuple[int, int], list[tuple[Elapsed, float]]] = {(n, m): [] for n, m, _ in cases}
    for repetition in range(repetitions + 1):
        for n, m, take in cases:
            dist.barrier()
            sent, span = interface_bytes()["tun0"], clock.span(take)
            dist.barrier()
            sent_by_all = torch.tensor([interface_bytes()["tun0"] - sent])
            dist.all_reduce(sent_by_all)
            taken = clock.elapsed([span])[0]
            if repetition:  # the first one also measures the gradients' scales
                records[n, m].append((taken, float(sent_by_all) / dist.get_world_size()))
    if dist.get_rank() == 0:
        found = [
            {
                "images": n,
                "model_parallel": m,
                "seconds": [each.seconds for each, _ in taken],
                "skew": median(each.skew + each.bound for each, _ in taken),
                "bytes": median(sent for _, sent in taken),
            }
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
    slots = tail.held_slots

    def take_gradients(layer: int, block: int, weight: "Tensor", bias: "Tensor | None") -> None:
        assert bias is not None
        reducer.add(slots[layer, block, True], bias)
        reducer.add(slots[layer, block, False], weight)

    columns = ColumnPass(tail, Precision(recipe, world.device), 0.1, 0, take_gradients)
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
        "| images a rank | M | sent MB | formula MB | sent / formula | step s, median | least - most | skew s | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in found:
        n, m = record["images"], record["model_parallel"]
        rivals = [r for r in found if r["images"] == n]
        notes = ["formula's best"] if best(ranks, n) == m else []
        notes += ["fewest bytes"] if record["bytes"] == min(r["bytes"] for r in rivals) else []
        typical = median(record["seconds"])
        notes += ["fastest"] if typical == min(median(r["seconds"]) for r in rivals) else []
        skew = f"{record['skew']:.2g}" + " *" * Elapsed(typical, record["skew"]).is_doubtful
        sample(f"{n} images, M = {m}, s", record["seconds"])
        want, sent = volume(ranks, n, m), record["bytes"]
        lines.append(
            f"| {n} | {m} | {sent / 1e6:.3f} | {want / 1e6:.3f} | {sent / want if want else float('nan'):.4f} "
            f"| {typical:.3f} | {min(record['seconds']):.3f} - {max(record['seconds']):.3f} | {skew} "
            f"| {', '.join(notes)} |"
        )
    return "\n".join(lines)


def main(
    hosts: int = 8,
    images: Annotated[str, Option(help="of each rank's virtual worker")] = "16,64,256",
    model_parallel: Annotated[str, Option(help="ranks that share the layers")] = "1,2,4,8",
    rate: Annotated[float, Option(help="bits a second of each link")] = 1e8,
    latency: Annotated[float, Option(help="seconds, one way")] = 1e-3,
    repetitions: int = 5,
    json_file: Annotated[str | None, Option("--json", help="file for the records")] = None,
    rank: Annotated[bool, Option("--rank", hidden=True)] = False,
) -> None:
    """Builds the lab and shows what its ranks tell."""
    if rank:
        cases, parallel = ([int(word) for word in text.split(",")] for text in (images, model_parallel))
        be_a_rank(cases, parallel, repetitions)
        return
    given = ["--images", images, "--model-parallel", model_parallel]
    given += ["--repetitions", str(repetitions)]
    with Lab([Host(latency=latency, rate=rate)] * hosts) as lab:
        output = lab.run(["-m", __name__, "--rank", *given], timeout=900)[0]
    found = json.loads(next(line for line in output.splitlines() if line.startswith("told: ")).removeprefix("told: "))
    if json_file:
        Path(json_file).write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{hosts} hosts x 1 rank, {latency * 1e3:g} ms, {rate / 1e6:g} Mb/s, "
        f"{LAYERS} layers of {WIDTH} x {WIDTH}, float32, n = {repetitions}\n"
    )
    print(table(hosts, found))


if __name__ == "__main__":
    typer.run(main)
