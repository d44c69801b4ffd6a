"""The shape of the source: imports run one way (import-linter), and rooms, files and functions are not too large."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

import torusgd

SOURCE = Path(torusgd.__file__).parent

LARGEST_FILE = 600
LARGEST_ROOM = 0.15  # of the package's lines
LONGEST_BODY = 60
MOST_IMPORTS = 25  # modules of this package that one file imports

ONE_NAME_FOR_A_REASON = {
    "bench.py": "comm/tuning/ measures, cli/ prints",
    "groups.py": "process groups in comm/, parameter groups in optim/: both are torch's word",
    "registry.py": "of sources in data/, of networks in models/",
}


@cache
def sources() -> dict[str, str]:
    """The text of each file, by its path in the package."""
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def test_imports_run_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])  # for the contract in pyproject.toml
    # import-linter would silence the loggers of all other tests of this process.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert lint_imports(no_cache=True, is_debug_mode=False, show_timings=False) == 0


def test_no_file_imports_a_private_name_of_another() -> None:
    private = [
        (file, name.name)
        for file, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level
        for name in node.names
        if name.name.startswith("_") and not name.name.startswith("__")
    ]
    assert not private


def test_no_two_rooms_have_a_file_of_one_name() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for file in sources():
        rooms[file.rpartition("/")[2]].add(file.rpartition("/")[0])
    assert {name for name, found in rooms.items() if len(found) > 1} - {"__init__.py"} == set(ONE_NAME_FOR_A_REASON)


def test_rooms_files_and_functions_are_of_a_readable_size() -> None:
    rooms: dict[str, int] = defaultdict(int)
    for file, source in sources().items():
        lines, imported = source.splitlines(), set()
        assert len(lines) <= LARGEST_FILE, file
        rooms[file.partition("/")[0]] += sum(not line.lstrip().startswith("#") for line in lines)  # no comments
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.body[0].lineno < LONGEST_BODY, (file, node.name)
            elif isinstance(node, ast.ImportFrom) and node.level:
                names = [node.module] if node.module else [each.name for each in node.names]
                imported |= {(node.level, name) for name in names}
        assert len(imported) <= MOST_IMPORTS, file
    assert not {room: lines for room, lines in rooms.items() if lines > LARGEST_ROOM * sum(rooms.values())}
