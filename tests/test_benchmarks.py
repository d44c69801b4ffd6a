"""The scripts beside the package: each compiles, and whatever it imports from torusgd, wherever in the file, exists.

Two of them put a step together out of the package's own classes; these steps are taken once, on one rank.
"""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch

from torusgd.data.pipeline import Batch

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "examples", "tools")
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported(script: str) -> Iterator[tuple[str, str | None]]:
    """Each import from torusgd as (module, name); None: the module alone."""
    for node in ast.walk(ast.parse((ROOT / script).read_text(), script)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        else:
            continue
        yield from (each for each in found if each[0].split(".")[0] == "torusgd")


def exists(module: str, name: str | None = None) -> bool:
    """Whether a module can be imported, and has the name or is a folder with a module of that name."""
    try:
        home = import_module(module)
    except ModuleNotFoundError:
        return False
    return name is None or hasattr(home, name) or exists(f"{module}.{name}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_whatever_a_script_imports_from_the_package_exists(script: str) -> None:
    compile((ROOT / script).read_text(), script, "exec")
    assert not [each for each in imported(script) if not exists(*each)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_reads_no_private_attribute_of_an_object(script: str) -> None:
    """A rename inside the package would break it, and no import would tell."""
    reads = [node for node in ast.walk(ast.parse((ROOT / script).read_text())) if isinstance(node, ast.Attribute)]
    private = [node for node in reads if node.attr.startswith("_") and not node.attr.endswith("__")]
    assert not [ast.unparse(node) for node in private if ast.unparse(node.value) != "self"]


def test_a_name_that_is_gone_is_found_out() -> None:
    assert exists("torusgd")
    assert exists("torusgd.train", "build")
    assert not exists("torusgd.train.build", "no_such_name")
    assert not exists("torusgd.no_such_module", "build")


def test_the_steps_of_step_overhead() -> None:
    script = run_path(str(ROOT / "benchmarks" / "step_overhead.py"))
    case = dict(model="digits-net", size=8, channels=1, classes=10, images=4, precision="float32")
    batch = Batch(torch.randn(4, 1, 8, 8), torch.arange(4), np.arange(4), replaced=0)
    threads = torch.get_num_threads()
    try:
        script["bare_step"](case, batch, workers=2)(0)
        for reduction in ("float32", "exact"):
            stats = script["our_step"](case, reduction, batch, workers=2)(0)
            assert stats.step.index == 0
            assert 1.0 < stats.loss < 5.0, "of ten classes, untrained"
    finally:
        torch.set_num_threads(threads)


def test_the_step_of_hybrid() -> None:
    step = run_path(str(ROOT / "benchmarks" / "hybrid.py"))["make_step"](images=2, parallel=1)
    step()
    step()
