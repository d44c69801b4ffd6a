"""The examples print one hash on any number of ranks."""

import re
from pathlib import Path

import pytest
from tests.comm.gloo_world import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, ranks: int, *options: object) -> str:
    """What rank 0 prints."""
    return run_script(ranks, EXAMPLES / name, *options)[0]


def weights(text: str) -> str:
    (found,) = re.findall(r"weights (\w{8})", text)
    return found


def test_a_loop_of_ones_own_on_one_and_three_ranks_and_stopped_between(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    alone = weights(printed("own_loop.py", 1, "--steps", 9))
    state = tmp_path / "state.pt"
    assert weights(printed("own_loop.py", 3, "--steps", 4, "--checkpoint", state)) != alone
    assert weights(printed("own_loop.py", 2, "--steps", 9, "--checkpoint", state)) == alone


@pytest.mark.parametrize("name", ["segmentation.py", pytest.param("causal_text.py", marks=pytest.mark.slow)])
def test_a_loss_over_tokens_or_pixels(name: str) -> None:
    one = printed(name, 1, "--steps", 3)
    assert weights(one) == weights(printed(name, 3, "--steps", 3))
    coarse, fine = (printed(name, 2, "--steps", 1, "--micro-batches", count) for count in (6, 12))
    assert weights(coarse) != weights(fine)
    for what in ("loss", "gradient"):
        first, second = (float(re.findall(rf"{what} ([\d.]+)", text)[0]) for text in (coarse, fine))
        assert first == pytest.approx(second, rel=1e-6)
