"""What it costs to keep a copy of the state in the node's memory, as workers under torchrun do.

    python -m benchmarks input node-memory --megabytes 205

A state of so many megabytes in 160 tensors, as large as ResNet-50's weights and momentum by default, is kept a few
times. Printed: the seconds that copying holds up the steps, those of hashing and writing beside them, the seconds from
one copy to the next that follow from both, and those in which a worker that begins reads it again.

Needs: nothing.
"""

import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import typer

from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.fingerprint import Fingerprint
from torusgd.run.job import Job
from torusgd.run.node_memory import BESIDE_FRACTION, LEAST_SECONDS, STEP_FRACTION, node_memory
from torusgd.run.saving import RunState
from torusgd.runtime import prepare_process

from ..record import sample

TENSORS = 160


def main(
    megabytes: float = 205.0,
    times: int = 5,
) -> None:
    recipe = load_recipe("digits").recipe
    prepare_process(recipe, torch.device("cpu"))  # as a run does: it computes with one thread, and keeps freed memory
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", LOCAL_RANK="0")
    memory = node_memory(Job(recipe, RuntimeOptions(), "cpu", Path("nowhere")))
    assert memory is not None
    elements = int(megabytes * 1e6 / 4 / TENSORS)
    names = [f"{part}/{number}" for part in ("model", "optimizer/momentum_buffer") for number in range(TENSORS // 2)]
    tensors = {name: torch.rand(elements) for name in names}
    step_state = cast(Any, SimpleNamespace(state_dict=lambda steps, keep: tensors))
    state = RunState(Fingerprint("recipe", 96, "data", "", "drawn", {}))
    found: dict[str, list[float]] = {"copying": [], "writing": [], "reading": []}
    try:
        for step in range(1, times + 1):
            state.step = step
            begin = time.perf_counter()
            memory.keep(state, step_state)
            found["copying"].append(time.perf_counter() - begin)
            assert memory.writer is not None
            memory.writer.wait()
            found["writing"].append(memory.writer.seconds)
            begin = time.perf_counter()
            assert memory.read() is not None
            found["reading"].append(time.perf_counter() - begin)
    finally:
        memory.forget()
    middles = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in found.items():
        sample(f"{megabytes} MB, {name}, s", seconds)
        print(f"{name}: {middles[name]:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, n = {len(seconds)})")
    apart = max(LEAST_SECONDS, middles["copying"] / STEP_FRACTION, middles["writing"] / BESIDE_FRACTION)
    print(f"from one copy to the next: {apart:.1f} s")


if __name__ == "__main__":
    typer.run(main)
