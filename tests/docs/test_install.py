"""How to get torusgd: by ways that work, of packages that the extras have."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*")})
SOURCES = sorted(ROOT.glob("src/**/*.py"))


def extras() -> dict[str, list[str]]:
    """By extra the names of its packages, without versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        name: [re.split(r"[\[<>=]", requirement)[0] for requirement in requirements]
        for name, requirements in project["optional-dependencies"].items()
    }


def test_nobody_is_sent_to_an_index_that_lacks_torusgd() -> None:
    command = re.compile(r"pip install (?:[^\n`]* )?['\"]?torusgd\b")
    assert not [path for path in (*DOCUMENTS, *SOURCES) if path.is_file() and command.search(path.read_text())]
    assert command.search("pip install -U 'torusgd[images]'")


def test_a_message_names_packages_of_its_extra() -> None:
    known = extras()
    named = [
        (packages.split(), extra)
        for path in SOURCES
        for packages, extra in re.findall(
            r"(?:pip install |\")((?!pip )[a-z][\w -]*) \(the extra (\w+)\)", path.read_text()
        )
    ]
    assert len(named) >= 9
    for packages, extra in named:
        assert set(packages) <= set(known[extra]), extra


def test_the_table_of_extras_has_those_that_users_take() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    rows = re.findall(r"^\| (`.*) \| .* \|$", text, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(extras()) - {"dev", "docs", "dist"}
