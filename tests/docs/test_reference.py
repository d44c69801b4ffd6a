"""docs/recipes.md holds the keys as they are."""

from pathlib import Path

from torusgd.recipe.reference import reference


def test_the_table_of_keys_is_current() -> None:
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    assert text.endswith(reference()), "run: torusgd recipes --keys, and put its output at the end of docs/recipes.md"


def test_every_key_has_a_meaning() -> None:
    empty = [line for line in reference().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert not empty
