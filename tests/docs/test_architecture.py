"""The documents name files that exist."""

import re
from pathlib import Path

import pytest

import torusgd

ROOT = Path(__file__).parents[2]
SOURCE = Path(torusgd.__file__).parent
# The log is history: it names files as they were.
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "docs" / "log.md"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_a_document_names_exist(document: Path) -> None:
    named = set(re.findall(r"(?<![\w/.-])(?:[\w-]+/)+[\w-]+\.(?:py|md)\b", document.read_text()))
    places = (ROOT, SOURCE, document.parent)
    assert not [name for name in sorted(named) if not any((place / name).is_file() for place in places)]
