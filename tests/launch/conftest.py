"""What runs that something happens to have in common: their recipe, and the results they must end with."""

from pathlib import Path
from typing import Any

import pytest

from ..train.processes import RECIPE, results, run_alone


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "faults.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a run that nothing happens to: one rank, no launcher, no pauses."""
    return results(run_alone(tmp_path_factory.mktemp("undisturbed") / "out", recipe))
