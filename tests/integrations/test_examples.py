"""The examples print one hash on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, ranks: int, *options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    return done.stdout


def weights(text: str) -> str:
    (found,) = re.findall(r"weights (\w{8})", text)
    return found


def test_a_loop_of_ones_own_on_one_and_three_ranks_and_stopped_between(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    alone = weights(printed("own_loop.py", 1, "--steps", "12"))
    state = tmp_path / "state.pt"
    assert weights(printed("own_loop.py", 3, "--steps", "5", "--checkpoint", str(state))) != alone
    assert weights(printed("own_loop.py", 2, "--steps", "12", "--checkpoint", str(state))) == alone


@pytest.mark.slow
def test_a_loss_over_tokens() -> None:
    one, other = printed("causal_text.py", 1, "--steps", "3"), printed("causal_text.py", 3, "--steps", "3")
    assert weights(one) == weights(other)
    finer = printed("causal_text.py", 2, "--steps", "3", "--micro-batches", "12")
    assert weights(finer) != weights(one)
    first, second = (float(re.findall(r"loss ([\d.]+)", text)[0]) for text in (one, finer))
    assert first == pytest.approx(second, rel=1e-6)
