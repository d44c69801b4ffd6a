"""Writes the pages of the site that are made from the program: docs/cli.md, docs/messages.md and
docs/recipe-keys.md.

python -m tools.reference_pages    # `make docs` does it first; git ignores the pages
"""

import os
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from torusgd.cli import COMMANDS, app
from torusgd.recipe.reference import reference

ROOT = Path(__file__).parents[1]
PAGES = ("cli.md", "messages.md", "recipe-keys.md")


def main() -> None:
    """Writes the pages."""
    os.environ["COLUMNS"] = "80"
    for name, text in zip(PAGES, (cli_page(), messages_page(), keys_page()), strict=True):
        (ROOT / "docs" / name).write_text(text)


def cli_page() -> str:
    """The help of every command."""
    parts = ["# Command line\n\nWhat `--help` prints, of every command.\n"]
    root: Any = get_command(app())
    groups: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while groups:
        words, command = groups.pop(0)
        parent: Any = None
        for depth in range(len(words) + 1):  # a command's context knows the words before it
            found = root if depth == 0 else parent.command.commands[words[depth - 1]]
            parent = found.context_class(found, info_name=("torusgd", *words)[depth], parent=parent)
        parts.append(f"## {' '.join(('torusgd', *words))}\n\n```text\n{command.get_help(parent)}\n```\n")
        inner = getattr(command, "commands", {})
        groups += [((*words, name), each) for name, each in inner.items() if not each.hidden]
    assert len(parts) > len(COMMANDS)
    return "\n".join(parts)


def messages_page() -> str:
    """Every sentence of a refusal, sorted, from the file that tests compare them with."""
    found = yaml.safe_load((ROOT / "tests" / "messages.yaml").read_text())
    lines = sorted({" ".join(str(text).split()) for text in found.values()}, key=str.lower)
    head = (
        "# Messages\n\nEvery line with which torusgd refuses something, as tests see it. What is wrong stands before "
        "the semicolon, the remedy behind it. Words in capitals stand for what differs from case to case.\n"
    )
    return "\n".join([head, "```text", *lines, "```", ""])


def keys_page() -> str:
    """Every key of a recipe, and what does not go together."""
    return f"# Keys of a recipe\n\nWhat `torusgd recipes --keys` prints.\n\n{reference()}"


if __name__ == "__main__":
    main()
