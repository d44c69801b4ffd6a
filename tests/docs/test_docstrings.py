"""Examples in docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import torusgd

ROOT = Path(torusgd.__file__).parents[1]
WITH_EXAMPLES = [path.relative_to(ROOT) for path in ROOT.rglob("*.py") if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", sorted(WITH_EXAMPLES), ids=str)
def test_the_examples_of_a_module(path: Path) -> None:
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
