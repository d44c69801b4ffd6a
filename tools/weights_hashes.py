"""Prints the weights' SHA-256 of five short runs: a change that claims to alter no result shows the same five.

    .venv/bin/python tools/weights_hashes.py [CASE ...]

The hashes hold for one machine and one torch build, so compare two checkouts on the same machine. `fashion` needs
Fashion-MNIST (`torusgd data fetch fashion-mnist`).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    "digits": ["digits", "--workers", "2"],
    "fashion": ["fashion", "--workers", "2", "--max-steps", "20", "--data", "data/fashion-mnist"],
    "sharded": ["digits", "--workers", "3", "--max-steps", "60", "--update", "sharded", "--allreduce", "ring"],
    "column-parallel": [
        "digits", "--workers", "2", "--max-steps", "60", "--set", "column_blocks=2", "--model-parallel", "2",
    ],
    "float16": ["digits", "--workers", "2", "--max-steps", "60", "--set", "precision=float16"],
}  # fmt: skip


def weights_hash(arguments: list[str], out: Path) -> str:
    """Trains into `out` and reads the hash from its summary."""
    command = [sys.executable, "-m", "torusgd", "train", *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return str(json.loads((out / "summary.json").read_text())["weights_sha256"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or CASES:
            print(f"{name:16} {weights_hash(CASES[name], Path(folder) / name)}", flush=True)


if __name__ == "__main__":
    main()
