"""The table of the store's keys: whoever uses a store takes its keys from there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torusgd
from torusgd.comm import store_keys
from torusgd.comm.store_keys import Key

SOURCE = Path(torusgd.__file__).parent
CALLS = {"set", "get", "check", "add", "wait", "compare_set", "multi_get", "delete_key"}
KEYS = [each for each in vars(store_keys).values() if isinstance(each, Key)]


def is_store(node: ast.expr) -> bool:
    """A variable or an attribute that holds a store of torch's, by its name."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") in ("store", "root", "own")


def keys_of(source: str) -> Iterator[ast.expr]:
    """The keys in a file's calls to a store."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if isinstance(call.func, ast.Name) and call.func.id == "PrefixStore":
            yield call.args[0]
        elif isinstance(call.func, ast.Attribute) and call.func.attr in CALLS and is_store(call.func.value):
            yield from call.args[0].elts if isinstance(call.args[0], ast.List) else [call.args[0]]


def test_no_file_but_the_table_spells_a_key() -> None:
    seen = 0
    for path in SOURCE.rglob("*.py"):
        source = path.read_text()
        if "distributed_c10d" not in source:
            continue
        for key in keys_of(source):
            seen += 1
            assert not isinstance(key, ast.Constant | ast.JoinedStr), f"{path}:{key.lineno}"
    assert seen > 40, "the names by which stores are known have changed"


def test_each_key_is_in_use_and_none_can_be_taken_for_another() -> None:
    paths = [key.path for key in KEYS]
    assert len(set(paths)) == len(paths)
    others = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "store_keys.py")
    names = [name for name, key in vars(store_keys).items() if isinstance(key, Key)]
    assert not [name for name in names if not re.search(rf"\bkeys\.{name}\b", others)]
