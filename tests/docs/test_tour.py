"""The tour's commands work as they stand, and the docs site knows every page."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def commands_of(page: Path) -> list[str]:
    return re.findall(r"^    (torusgd .*)$", page.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_tour_work_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("sklearn")
    commands = commands_of(DOCS / "tour.md")
    assert len(commands) > 8
    for command in commands:
        words = [sys.executable, "-m", "torusgd", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    hashes = {
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())["weights_sha256"]
        for name in ("digits", "on-3", "stopped")
    }
    assert len(hashes) == 1, "the tour says so"
    for name in ("report.html", "plan.html", "runs/digits/export/model.pt2", "runs/digits/export/hub/README.md"):
        assert (tmp_path / name).is_file()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_commands_in_the_docs_exist(page: Path) -> None:
    from torusgd.cli import COMMANDS

    known = set(COMMANDS)
    assert {command.split()[1].strip("[]") for command in commands_of(page)} <= known | {"--version"}


def test_the_site_has_every_page() -> None:
    tree = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed: set[str] = set()

    def walk(entry: object) -> None:
        if isinstance(entry, str):
            listed.add(entry)
        for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            walk(each)

    walk(tree["nav"])
    assert listed == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact_all_reduce" in (tmp_path / "api.html").read_text()


def test_the_figures_of_the_readme_stand_in_the_documents_that_it_names() -> None:
    row = r"^\| (.*) \| (.*) \| \[.*\]\((docs/[\w/-]+\.md)(?:#.*)?\) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 4
    for what, told, document in rows:
        text = (ROOT / document).read_text()
        for figure in re.findall(r"\d[\d,.]*\d", f"{what} {told}"):
            assert figure in text, (what, figure)
    assert (ROOT / "docs" / "pictures" / "report.png").is_file()
