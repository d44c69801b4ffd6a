"""Benchmarks: `python -m benchmarks GROUP COMMAND [OPTIONS]` runs one, and adds it to benchmarks/results.

Without a command all are listed. `--help` after a command shows its options; TORUSGD_RESULTS is another folder for the
results, or empty for none.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path

import typer

from .record import recorded

HERE = Path(__file__).parent


def commands() -> dict[tuple[str, str], str]:
    """The first line of each benchmark's docstring, by group and command."""
    return {name: text.partition("\n")[0] for name, text in docstrings().items()}


def docstrings() -> dict[tuple[str, str], str]:
    """Of each benchmark, by group and command; nothing is imported."""
    found = {}
    for path in sorted(HERE.glob("*/*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            name = path.parent.name.replace("_", "-"), path.stem.replace("_", "-")
            found[name] = ast.get_docstring(tree) or ""
    return found


def main(words: list[str]) -> None:
    """Runs the command that the first two words name, with the others as its own."""
    known = commands()
    group, command = (*(word.replace("_", "-") for word in words[:2]), "", "")[:2]
    if (group, command) not in known:
        wanted = [word for word in (group, command) if word not in ("", "-h", "--help")]
        listed = {name: line for name, line in known.items() if not wanted or wanted[0] == name[0]}
        print(*[f"{' '.join(name):35} {line}" for name, line in (listed or known).items()], sep="\n")
        if wanted and (len(wanted) > 1 or not listed):
            print(f"python -m benchmarks {' '.join(wanted)}: none of that name", file=sys.stderr)
            sys.exit(2)
        return
    module = import_module(f"benchmarks.{group.replace('-', '_')}.{command.replace('-', '_')}")
    sys.argv = [f"python -m benchmarks {group} {command}", *words[2:]]
    with recorded(f"{group}-{command}", " ".join(sys.argv)):
        if "argparse" in vars(module):
            module.main()  # reads sys.argv itself
            return
        app = typer.Typer(add_completion=False)
        app.command(help=f"\b\n{module.__doc__}")(module.main)
        app(words[2:], prog_name=sys.argv[0])


if __name__ == "__main__":
    main(sys.argv[1:])
