"""The examples of docs/data.md run."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torusgd.data import Pipeline, open_sources
from torusgd.recipe.data_schema import Data

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "data.md").read_text(), re.DOTALL)


def test_the_loop_of_ones_own() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    assert names["consumed"] == 256
    assert len(names["indices"]) == 64


def test_the_source_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rings_of_mine.py").write_text(BLOCKS[1])
    monkeypatch.syspath_prepend(tmp_path)
    data = Data(source="rings_of_mine:rings", options={"count": 50}, image_size=16, channels=1, mean=(0.5,), std=(0.5,))
    train, held_out = open_sources(data, None, 0)
    assert (len(train), len(held_out)) == (50, 10)
    assert Pipeline(held_out, data, 0).validation_batch(np.arange(10)).images.shape == (10, 1, 16, 16)
