"""Links of the documents lead to files and headings that exist, and the first pages name no document without a link."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
FIRST = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "tour.md"]


def prose(document: Path) -> str:
    """The text without code, in which a bracket is no link; code within a line keeps its place."""
    text = re.sub(r"^```.*?^```$|^    [^\n]*$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def links(document: Path) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)) if "://" not in target]


def anchors(document: Path) -> set[str]:
    """The ids that the site and GitHub give to headings: lower case, words joined by hyphens."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_anchors_are_those_of_the_site(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `auto` beside the best\n\n## 16 hosts x 1 rank, 5 ms\n\n```\n# no heading\n```\n")
    assert anchors(page) == {"auto-beside-the-best", "16-hosts-x-1-rank-5-ms"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", FIRST, ids=lambda path: path.stem)
def test_the_first_pages_link_every_document_that_they_name(document: Path) -> None:
    assert len(links(document)) > 4
    text = re.sub(r"\]\([^)\s]+\)", "", document.read_text())
    assert not re.findall(r"\b(?:[\w-]+/)*[\w-]+\.md\b|\bdocs/[\w/]*", text)
