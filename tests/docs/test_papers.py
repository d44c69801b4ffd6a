"""docs/papers.md: each command, recipe, flag, file and test that it names exists, and each line has a state."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from torusgd.cli import app
from torusgd.plan.cluster import cluster_names
from torusgd.recipe.load import load_recipe, recipe_names

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "papers.md").read_text().splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")]
ROWS = [row for row in ROWS if row[0] != "mechanism or figure"]
COMMANDS = sorted({code for row in ROWS for code in re.findall(r"`((?:torusgd|python) [^`]+)`", row[1])})
TESTS = sorted({code for row in ROWS for code in re.findall(r"`(tests/[^`]+)`", row[2])})


def test_every_line_has_four_cells_and_a_state() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        assert len(row) == 4, row
        assert re.match(r"whole|part|absent|left to others", row[3]), row
        if row[3].startswith("whole"):  # by a command or by a test
            assert row[1] or row[2], row


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists(command: str) -> None:
    words = shlex.split(command)
    flags = {word for word in words if word.startswith("--")}
    if words[0] == "python":
        script = ROOT.joinpath("benchmarks", *(word.replace("-", "_") for word in words[3:5])).with_suffix(".py")
        text = script.read_text()  # a function's arguments, or argparse's, are its flags
        assert all(f'"{flag}"' in text or f"{flag[2:].replace('-', '_')}:" in text for flag in flags)
        assert all(f'"{word}"' in text for word in words[5:] if word.isalpha())
        return
    group: Any = typer.main.get_command(app())
    found = group.commands[words[1]]
    rest = words[2:]
    while hasattr(found, "commands"):
        found, rest = found.commands[rest[0]], rest[1:]
    assert flags <= {name for parameter in found.params for name in parameter.opts}
    if rest and not rest[0].startswith("--"):
        assert rest[0] in recipe_names()
        # Overrides too: they are part of a command.
        load_recipe(rest[0], [value for flag, value in pairwise(rest) if flag == "--set"])
    if "--cluster" in rest:
        assert rest[rest.index("--cluster") + 1] in cluster_names()


@pytest.mark.parametrize("name", TESTS)
def test_a_test_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text() if function else (ROOT / file).is_file()
