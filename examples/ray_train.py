"""A run on Ray's workers, each of which is a rank.

    python examples/ray_train.py --workers 2 --out /shared/runs/digits digits --max-steps 50

Ray's TorchTrainer chooses the machines, starts the workers, and starts all of them again if one is lost; then the run
goes on from its last checkpoint. The ranks are processes of their own, since Ray calls a worker's function in a thread,
where no signal can be handled, and with a process group of its own under way.
"""

import argparse
import os
import subprocess
import sys
from typing import Any


def rank(settings: dict[str, Any]) -> None:
    """Runs `torusgd train` as the rank that Ray's worker is."""
    port = int(os.environ["MASTER_PORT"]) + 1  # Ray's own process group has the first
    environment = {**os.environ, "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-m", "torusgd", "train", *settings["arguments"]], env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"torusgd train ended with exit code {done.returncode}; its last line says why")


def main() -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    given, train = arguments.parse_known_args()
    trainer = TorchTrainer(
        rank,
        train_loop_config={"arguments": train},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
