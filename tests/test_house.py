"""The shape of the source: imports run one way (import-linter), and rooms, files and functions are not too large."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

import torusgd

SOURCE = Path(torusgd.__file__).parent
ROOT = Path(__file__).parents[1]

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


def lines_of(source: str) -> int:
    """Lines that are no comments: a comment never makes a room too large."""
    return sum(not line.lstrip().startswith("#") for line in source.splitlines())


def functions_of(source: str) -> Iterator[tuple[str, int]]:
    """Each function's name and the lines of its body, its docstring included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.body[0].lineno + 1


def own_imports(source: str) -> set[tuple[int, str]]:
    """The modules of this package that a file imports, wherever in the file."""
    found: set[tuple[int, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {(node.level, node.module)} if node.module else {(node.level, each.name) for each in node.names}
    return found


def test_imports_run_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # for the contract in pyproject.toml
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
        rooms[file.partition("/")[0]] += lines_of(source)
    total = sum(rooms.values())
    assert not {room: lines for room, lines in rooms.items() if lines > LARGEST_ROOM * total}
    assert not {file: lines for file, source in sources().items() if (lines := len(source.splitlines())) > LARGEST_FILE}
    long = [(file, *found) for file, source in sources().items() for found in functions_of(source)]
    assert not [each for each in long if each[2] > LONGEST_BODY]
    wide = {file: len(found) for file, source in sources().items() if len(found := own_imports(source)) > MOST_IMPORTS}
    assert not wide
