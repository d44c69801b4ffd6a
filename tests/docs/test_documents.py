"""The documents: what they name exists, links lead somewhere, examples run, and torusgd is got by ways that work."""

import doctest
import importlib
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.commands import ran
from tests.data.pictures import write_folder
from tests.messages import sentences
from typer.main import get_command

import torusgd
from tools import reference_pages
from torusgd.cli import COMMANDS, app
from torusgd.cli.help import EXAMPLES as EXAMPLES_OF_COMMANDS
from torusgd.data import Pipeline, open_sources
from torusgd.plan.cluster import names_in
from torusgd.recipe.data_schema import Data
from torusgd.recipe.load import load_recipe, recipe_names
from torusgd.recipe.reference import reference
from torusgd.recipe.schema import Optimizer, Rate, Stage, Warmup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = Path(torusgd.__file__).parent
MADE = {DOCS / name for name in reference_pages.PAGES}
DOCUMENTS = sorted({*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("notes/*.md")} - MADE)
FIRST = [ROOT / "README.md", DOCS / "index.md", DOCS / "tour.md"]
SOURCES = sorted(SOURCE.rglob("*.py"))
CARDS = sorted((DOCS / "methods").glob("*.md"))
WITH_EXAMPLES = [path.relative_to(SOURCE.parent) for path in SOURCES if ">>> " in path.read_text()]


def blocks(document: Path) -> list[str]:
    """Its examples in Python."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def links(document: Path) -> list[str]:
    """Those of the text without code, in which a bracket is none."""
    text = re.sub(r"^```.*?^```$|^    [^\n]*$|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(text: str) -> set[str]:
    """The ids that the site and GitHub give to headings: lower case, words joined by hyphens."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def commands_of(page: Path) -> list[str]:
    return re.findall(r"^    (torusgd .*)$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_a_document_names_exist_and_links_lead_somewhere(document: Path) -> None:
    named = set(re.findall(r"(?<![\w/.-])(?:[\w-]+/)+[\w-]+\.(?:py|md)\b", document.read_text()))
    places = (ROOT, SOURCE, document.parent)
    missing = [name for name in sorted(named) if not any((place / name).is_file() for place in places)]
    assert document.name == "log.md" or not missing  # the log is history: it names files as they were
    for link in links(document):
        name, _, anchor = link.partition("#")
        target = Path(os.path.normpath(document.parent / name)) if name else document
        assert target.exists() or target in MADE, link
        assert not anchor or anchor in anchors(target.read_text()), link
    page = "# `auto` beside the best\n\n## 16 hosts x 1 rank, 5 ms\n\n```\n# no heading\n```\n"
    assert anchors(page) == {"auto-beside-the-best", "16-hosts-x-1-rank-5-ms"}
    if document in FIRST:  # which link every document that they name
        assert len(links(document)) > 4
        text = re.sub(r"\]\([^)\s]+\)", "", document.read_text())
        assert not re.findall(r"\b(?:[\w-]+/)*[\w-]+\.md\b|\bdocs/[\w/]*", text)


def test_commands_in_the_docs_exist_and_the_site_has_every_page() -> None:
    used = {(page.name, command.split()[1].strip("[]")) for page in DOCS.glob("*.md") for command in commands_of(page)}
    assert not [each for each in used if each[1] not in {*COMMANDS, "--version"}]
    listed = re.findall(r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert set(listed) == {path.relative_to(DOCS).as_posix() for path in {*DOCS.rglob("*.md"), *MADE}}


def test_the_readme_is_short_and_has_figures_only_where_records_write_them() -> None:
    """In its table, which `benchmarks.tables` writes, and in the output of commands, which a slow test runs."""
    text = (ROOT / "README.md").read_text()
    assert "<!-- benchmarks.tables: readme -->" in text
    rest = re.sub(r"<!-- benchmarks.*<!-- end of readme -->|^    [^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"\d[\d.,]*\s*(?:%|times\b|x\b|ms\b|s\b|images)[^\n]*", rest)
    assert (DOCS / "pictures" / "report.png").is_file()
    # It fits a screen, and its sentences a breath.
    lines = text.splitlines()
    assert len(lines) <= 100
    prose = "\n".join(line for line in lines if not line.startswith(("    ", "|", "#", "!", ">")))
    parts = re.split(r"(?<=[.:;?])\s+|\n\n|\n- ", re.sub(r"\]\([^)]*\)|[*`\[\]]", "", prose))
    assert not [part for part in parts if len(part.split()) > 25]


def test_times_that_the_proof_repeats_are_those_of_the_benchmarks() -> None:
    text, there = (ROOT / "notes" / "proof.md").read_text(), (ROOT / "notes" / "benchmarks.md").read_text()
    rows = re.findall(r"^\| (?!technique|---)(.*) \|$", text[text.index("## Time") :], re.MULTILINE)
    assert len(rows) >= 7
    for row in rows:
        for figure in re.findall(r"(?<![\dx])\d[\d,.]*\d", " ".join(row.split(" | ")[1:3])):
            assert figure in there, (row, figure)


@pytest.mark.parametrize(
    "block", [pytest.param(text, id=f"{card.stem}-{at}") for card in CARDS for at, text in enumerate(blocks(card))]
)
def test_the_python_of_a_method_card_runs(block: str) -> None:
    exec(compile(block, "<card>", "exec"), {})


def test_the_examples_for_own_loops_and_of_the_data_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [block for block in blocks(DOCS / "own-loop.md") if block.startswith("import torch\n")]
    assert len(found) == 2
    for block in found:
        assert block.count("\n") < 30
        exec(compile(block, "<own-loop>", "exec"), {})
    loop, own_source = blocks(DOCS / "data.md")[:2]
    names: dict[str, Any] = {}
    exec(loop, names)
    assert (names["consumed"], len(names["indices"])) == (256, 64)
    (tmp_path / "rings_of_mine.py").write_text(own_source)
    monkeypatch.syspath_prepend(tmp_path)
    data = Data(source="rings_of_mine:rings", options={"count": 50}, image_size=16, channels=1, mean=(0.5,), std=(0.5,))
    train, held_out = open_sources(data, None, 0)
    assert (len(train), len(held_out)) == (50, 10)
    assert Pipeline(held_out, data, 0).validation_batch(np.arange(10)).images.shape == (10, 1, 16, 16)


@pytest.mark.parametrize("path", sorted(WITH_EXAMPLES), ids=str)
def test_the_examples_of_a_docstring_give_what_they_say(path: Path) -> None:
    if path.parent.name == "integrations" and path.stem in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(path.stem, exc_type=ImportError)
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0


def test_nobody_is_sent_to_an_index_that_lacks_torusgd_or_to_an_extra_that_there_is_not() -> None:
    command = re.compile(r"pip install (?:[^\n`]* )?['\"]?torusgd\b")
    files = [path for path in (*DOCUMENTS, *ROOT.glob("examples/*"), *SOURCES) if path.is_file()]
    assert not [path for path in files if command.search(path.read_text())]
    assert command.search("pip install -U 'torusgd[images]'")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = re.compile(r"(?:pip install |\")((?!pip )[a-z][\w -]*) \(the extra (\w+)\)")
    named = [(packages.split(), extra) for path in SOURCES for packages, extra in words.findall(path.read_text())]
    assert len(named) >= 9
    for packages, extra in named:
        assert set(packages) <= {re.split(r"[\[<>=]", requirement)[0] for requirement in known[extra]}, extra
    rows = re.findall(r"^\| (`.*) \| .* \|$", (DOCS / "install.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == known.keys() - {"dev", "docs", "dist"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_tour_work_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    commands = commands_of(DOCS / "tour.md")
    assert len(commands) > 8
    for command in commands:
        ran([sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, timeout=600)
    summaries = (tmp_path / "runs" / name / "summary.json" for name in ("digits", "on-3", "stopped"))
    assert len({json.loads(each.read_text())["weights_sha256"] for each in summaries}) == 1, "the tour says so"
    for name in ("report.html", "plan.html", "runs/digits/export/model.pt2", "runs/digits/export/hub/README.md"):
        assert (tmp_path / name).is_file()


def test_the_plan_of_the_tour_is_what_its_command_prints(run_cli: Any, tmp_path: Path) -> None:
    text = (DOCS / "tour.md").read_text()
    (words,) = re.findall(r"^    torusgd (plan .* --report) plan.html$", text, re.MULTILINE)
    code, printed = run_cli(*words.split(), tmp_path / "plan.html")[:2]
    lines = [line.rstrip() for line in printed.splitlines() if line.strip() and not line.startswith("wrote ")]
    assert code == 0
    assert not [line for line in lines if f"    {line}" not in text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_commands_of_the_readme_work_as_they_stand(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = [block.split("\n") for block in re.findall(r"(?:^    [^\n]+\n)+", text, re.MULTILINE)]
    lines = [line[4:] for block in blocks for line in block if line and "# not run here" not in line]
    shown = [line for block in blocks if block[0].startswith("    $ ") for line in block if line]
    printed = [line[4:] for line in shown if not line.startswith("    $ ")]
    commands = [line.removeprefix("$ ") for line in lines if line not in printed]
    assert len(commands) >= 9
    clone = commands.index("git clone URL-OF-THIS-REPOSITORY torusgd && cd torusgd")
    commands[clone] = f"git clone {ROOT} torusgd && cd torusgd && cp -r {tmp_path}/pictures ."
    write_folder(tmp_path / "pictures", train=12, val=12, classes=("cats", "dogs"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = ran(["bash", "-c", "\n".join(["set -e", *commands])], cwd=tmp_path, timeout=1400, env=environment)
    output = (done.stdout + done.stderr).splitlines()
    first, second, portable = re.findall(r"weights_sha256 (\w{64})", done.stdout)[1:4]
    assert first == second, "on 3 workers with a kill, as on 2"
    assert f"weights_sha256 {portable}" in printed, "on any processor"
    for line in printed:
        if not line.startswith("weights_sha256"):
            pattern = re.sub(r"\d+", r"\\d+", re.escape(line).replace(r"\.\.\.", ".*"))  # of another processor
            assert any(re.fullmatch(pattern, each) for each in output), line


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings")
    root = tmp_path / "root"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "data", "build"))
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    for words in (["tools.reference_pages"], ["zensical", "build", "--strict"]):
        ran([sys.executable, "-m", *words], cwd=root, timeout=280, env=environment)
    assert "exact_all_reduce" in (root / "build" / "site" / "api.html").read_text()


def test_the_made_pages_have_every_key_command_and_sentence_and_cards_name_only_keys_that_there_are() -> None:
    text = reference_pages.cli_page()
    assert set(re.findall(r"^## torusgd (.+)$", text, re.MULTILINE)) == set(EXAMPLES_OF_COMMANDS)
    assert all(f"Example: torusgd {example}" in text for example in EXAMPLES_OF_COMMANDS.values())
    assert max(map(len, text.splitlines())) <= 80
    text = reference_pages.messages_page()
    assert all(" ".join(str(each).split()) in text for each in sentences().values())
    assert text.isascii() or not [line for line in text.splitlines() if not line.isprintable()]
    text = reference_pages.keys_page()
    assert text.endswith(reference())
    assert not [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    sections: Any = {"optimizer": Optimizer, "rate": Rate, "rate.warmup": Warmup, "stages[]": Stage}
    named = {(card.name, key) for card in CARDS for key in re.findall(r"`([a-z_.\[\]]+)`", card.read_text())}
    keys = [(card, *key.rpartition(".")) for card, key in named if key.rpartition(".")[0] in sections]
    assert len(keys) > 10
    assert not [each for each in keys if each[3] not in sections[each[1]].model_fields]


LINES = re.findall(r"^\| (?!mechanism or figure).*$", (DOCS / "papers.md").read_text(), re.MULTILINE)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]
PAPERS_COMMANDS = sorted({code for row in ROWS for code in re.findall(r"`((?:torusgd|python) [^`]+)`", row[1])})


def test_every_line_of_the_papers_has_four_cells_a_state_and_tests_that_exist() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        assert len(row) == 4, row
        assert re.match(r"whole|part|absent|left to others", row[3]), row
        assert row[1] or row[2] or not row[3].startswith("whole"), row  # by a command or by a test
    for name in {code for row in ROWS for code in re.findall(r"`(tests/[^`]+)`", row[2])}:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text() if function else (ROOT / file).is_file()


@pytest.mark.parametrize("command", PAPERS_COMMANDS)
def test_a_command_of_the_papers_exists(command: str) -> None:
    words = shlex.split(command)
    flags = {word for word in words if word.startswith("--")}
    if words[0] == "python":
        script = ROOT.joinpath("benchmarks", *(word.replace("-", "_") for word in words[3:5])).with_suffix(".py")
        text = script.read_text()  # a function's arguments, or argparse's, are its flags
        assert all(f'"{flag}"' in text or f"{flag[2:].replace('-', '_')}:" in text for flag in flags)
        assert all(f'"{word}"' in text for word in words[5:] if word.isalpha())
        return
    found, rest = get_command(app()), words[1:]
    while hasattr(found, "commands"):
        found, rest = found.commands[rest[0]], rest[1:]
    assert flags <= {name for parameter in found.params for name in parameter.opts}
    if rest and not rest[0].startswith("--"):
        assert rest[0] in recipe_names()
        # Overrides too: they are part of a command.
        load_recipe(rest[0], [value for flag, value in pairwise(rest) if flag == "--set"])
    if "--cluster" in rest:
        assert rest[rest.index("--cluster") + 1] in names_in("clusters")
