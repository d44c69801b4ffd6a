"""The shape of the source: imports run one way, as each folder's docstring says, and files are of a readable size."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import torusgd

SOURCE = Path(torusgd.__file__).parent

ORDER = [
    "errors",
    "rng",
    "signals",
    "importing",
    "untrusted",
    "locks",
    "weights",
    "storage",
    "hub",
    "kernels",
    "arithmetic",
    "recipe",
    "runtime",
    "precision",
    "data",
    "models",
    "optim",
    "comm",
    "gradients",
    "tensor_parallel",
    "synchrony",
    "simulate",
    "train",
    "launch",
    "plan",
    "rehearse",
    "report",
    "export",
    "cli",
]
"""Folders and single files, lowest first: each imports lower ones only, and of those a folder only what it names."""

AGAINST_THE_ORDER: dict[str, str] = {}
"""Imports that are still to go, by file."""

LONG = 400
SHORT = 40
SHORT_FOR_A_REASON = {
    "__main__.py": "what `python -m` runs",
    "cli/recipes.py": "a file a command",
    "launch/forkserver.py": "must start before torch is imported, and import nothing that does",
    "launch/forkserver_preload.py": "imported by name in a fresh process, and nothing else may be in it",
}
ONE_NAME_FOR_A_REASON = {
    "bench.py": "comm/ measures, cli/ prints",
    "groups.py": "process groups in comm/, parameter groups in optim/: both are torch's word",
    "local.py": "ranks on this machine in launch/, a plan for it in plan/",
    "relaxed.py": "what relaxed synchrony adds to a run in train/, a plan of it in plan/",
    "tune.py": "comm/ measures, cli/ prints",
}


def files() -> list[str]:
    return sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def room_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


FOLDERS = sorted({room_of(file) for file in files() if "/" in file})


def imported_names(file: str) -> Iterator[tuple[str, ...]]:
    """Every import of a file from this package, as (room, ..., name), wherever in the file it stands."""
    package = ("torusgd", *file.split("/")[:-1])
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            found = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        yield from (name[1:] for name in found if name[0] == "torusgd")


def docstring(folder: str) -> tuple[list[str], set[str]]:
    """Of a folder's `__init__`: the lines that say what lives there, and the rooms that it may import."""
    text = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text())) or ""
    what, _, rest = text.partition("May import: ")
    return [line for line in what.splitlines() if line], set(re.findall(r"\w+", rest.partition(".")[0]))


def test_every_folder_and_file_has_its_place_in_the_order() -> None:
    assert {room_of(file) for file in files()} - {"__init__", "__main__"} == set(ORDER)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_lives_there_and_what_it_may_import(folder: str) -> None:
    what, rooms = docstring(folder)
    assert 1 <= len(what) <= 3
    assert rooms
    assert rooms <= set(ORDER[: ORDER.index(folder)]), "a lower room never imports a higher one"


def test_imports_run_one_way() -> None:
    wrong: dict[str, set[str]] = defaultdict(set)
    for file in files():
        room = room_of(file)
        if room in ("__init__", "__main__"):  # names of all rooms, looked up on first use, and the console script
            continue
        allowed = docstring(room)[1] if room in FOLDERS else set(ORDER[: ORDER.index(room)])
        wrong[file] |= {name[0] for name in imported_names(file)} - allowed - {room}
    found = {file: " ".join(sorted(rooms)) for file, rooms in wrong.items() if rooms}
    assert found == AGAINST_THE_ORDER


def test_no_file_imports_a_private_name_of_another() -> None:
    private = re.compile("_[^_]")
    assert not [(file, name) for file in files() for name in imported_names(file) if private.match(name[-1])]


def test_no_two_rooms_have_a_file_of_one_name() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for file in files():
        rooms[file.rpartition("/")[2]].add(room_of(file))
    assert {name for name, found in rooms.items() if len(found) > 1} - {"__init__.py"} == set(ONE_NAME_FOR_A_REASON)


def test_files_are_readable_in_one_sitting_and_no_crumbs() -> None:
    lines = {file: len((SOURCE / file).read_text().splitlines()) for file in files()}
    assert not {file: count for file, count in lines.items() if count > LONG}
    short = {file for file, count in lines.items() if count < SHORT and not file.endswith("__init__.py")}
    assert short == set(SHORT_FOR_A_REASON)
