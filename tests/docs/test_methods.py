"""The Python of the method cards runs as it stands there."""

import re
from pathlib import Path

import pytest

from torusgd.recipe.schema import Optimizer, Rate, Stage, Warmup
from torusgd.recipe.section import Section

CARDS = sorted((Path(__file__).parents[2] / "docs" / "methods").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{card.stem}-{number}")
    for card in CARDS
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", card.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block: str) -> None:
    exec(compile(block, "<card>", "exec"), {})


def test_cards_name_only_keys_that_a_recipe_has() -> None:
    sections: dict[str, type[Section]] = {
        "optimizer": Optimizer, "rate": Rate, "rate.warmup": Warmup, "stages[]": Stage,
    }  # fmt: skip
    keys = {
        (card.name, key)
        for card in CARDS
        for key in re.findall(r"`([a-z_.\[\]]+)`", card.read_text())
        if key.rpartition(".")[0] in sections
    }
    assert len(keys) > 10
    for card, key in keys:
        section, _, name = key.rpartition(".")
        assert name in sections[section].model_fields, f"{card}: {key}"
