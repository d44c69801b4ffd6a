"""The page of families of image classifiers says what comes out when each trains for one step."""

from pathlib import Path

import pytest
from tools.model_families import FAMILIES, PAGE, read_table, run, write_table

PIECE = 17
PIECES = [list(FAMILIES)[start : start + PIECE] for start in range(0, len(FAMILIES), PIECE)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("names", PIECES, ids=lambda names: names[0])
def test_a_step_has_one_hash_on_one_and_three_ranks_or_one_line_refuses_it(names: list[str]) -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    table = read_table(PAGE.read_text())
    assert run(names) == {name: table[name] for name in names}


def test_the_page_has_every_family_and_none_that_differs_and_takes_new_rows(tmp_path: Path) -> None:
    text = PAGE.read_text()
    table = read_table(text)
    assert list(table) == list(FAMILIES)
    assert len(table) > 40
    assert {row.split(" | ")[1] for row in table.values()} == {"trains", "refused"}
    page, row = tmp_path / "models.md", "| `timm:levit_128s` | differs | on 1 rank a, on 3 b |"
    page.write_text(text)
    write_table(page, {"timm:levit_128s": row})
    old, new = text.splitlines(), page.read_text().splitlines()
    assert [line for line in new if line not in old] == [row]
    assert len(old) == len(new)
