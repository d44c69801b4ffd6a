"""The journal as a file: what it says, how it goes on, and that damage of any kind is refused in one line."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import refused, refuses

from torusgd.errors import UserError
from torusgd.step.journal import Journal, JournalEntry, JournalHead, read_journal, synchronous

SHA = "ab" * 32
TAKEN = [[0, 1, 2, 3, 4, 5], [0, 5], [1, 2, 3], [0], [0, 1, 2, 3, 4, 5]]


def written(path: Path, taken: list[list[int]] = TAKEN, workers: int = 6) -> JournalHead:
    journal = Journal(SHA, workers)
    journal.open(path)
    for step, each in enumerate(taken):
        journal.add(JournalEntry(step, each))
    journal.close()
    return journal.head


def test_a_journal_reads_as_it_was_written_in_a_few_bytes_an_update(tmp_path: Path) -> None:
    head = written(tmp_path / "j")
    read = read_journal(tmp_path / "j", SHA, 6, head.as_summary(len(TAKEN)))
    assert [sorted(read.entry(step).workers) for step in range(len(TAKEN))] == TAKEN
    assert set(read.entry(0).workers) == set(synchronous(0, 6).workers)
    assert read.head == head
    assert (tmp_path / "j").read_text().splitlines()[2].startswith("1 1-4 ")
    assert head.size - (tmp_path / "j").read_text().index("\n") < 16 * len(TAKEN)


@given(st.lists(st.sets(st.integers(0, 40), min_size=1), max_size=5))
def test_any_choice_of_workers_survives(tmp_path_factory: pytest.TempPathFactory, taken: list[set[int]]) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    written(path, [sorted(each) for each in taken], workers=41)
    read = read_journal(path, SHA, 41)
    assert [read.entry(step).workers for step in range(len(taken))] == taken


def lines_of(text: str, *numbers: int) -> str:
    return "".join(text.splitlines(keepends=True)[number] for number in numbers)


DAMAGE: dict[str, Callable[[str], str]] = {
    "changed character": lambda text: text.replace("1 1-4 ", "1 1-3 "),
    "without a line": lambda text: lines_of(text, 0, 1, 3, 4, 5),
    "two lines swapped": lambda text: lines_of(text, 0, 1, 3, 2, 4, 5),
    "a line twice": lambda text: lines_of(text, 0, 1, 2, 2, 3, 4, 5),
    "other ends of lines": lambda text: text.replace("\n", "\r"), "cut in a line": lambda text: text[:-5],
    "cut between lines": lambda text: lines_of(text, 0, 1, 2, 3, 4),
    "all left out": lambda text: text.replace("1 1-4 ", "1 0-5 "),
    "another recipe": lambda text: text.replace("ab", "cd", 1), "garbage": lambda text: text[:90] + "\x00" * 20,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "j"
    head = written(path)
    path.write_text(DAMAGE[damage](path.read_text()))
    refuses(f"a journal: {damage}", read_journal, path, SHA, 6, head.as_summary(len(TAKEN)), about="PATH", PATH=path)
    if damage != "cut between lines":  # the last line's, which a rank that goes on completes
        with pytest.raises(UserError) as error:
            Journal(SHA, 6, head).open(path)
        assert "\n" not in str(error.value)


def test_a_cut_before_the_checkpoint_of_a_run_that_is_not_done_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    reached = asdict(written(path, TAKEN[:3]))  # as the checkpoint has it
    written(path)
    assert len(read_journal(path, SHA, 6, reached=reached).left_out) == len(TAKEN)
    path.write_text(lines_of(path.read_text(), 0, 1, 2))
    assert len(read_journal(path, SHA, 6).left_out) == 2
    refuses("a journal cut before its checkpoint", read_journal, path, SHA, 6, reached=reached, about="PATH", PATH=path)
    with refused("a replay without its journal", "FOLDER/none", FOLDER=tmp_path):
        read_journal(tmp_path / "none", SHA, 6)
    with refused("a run without its journal", "FOLDER/none", FOLDER=tmp_path):
        Journal(SHA, 6, JournalHead(200, SHA, "4 - 12345678\n")).open(tmp_path / "none")


def test_a_journal_goes_on_from_its_head_and_drops_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "j"
    head = written(path, TAKEN[:1])  # the checkpoint's
    written(path, [TAKEN[0], [4]])
    again = Journal(SHA, 6, head)
    again.open(path)
    again.add(JournalEntry(1, TAKEN[1]))
    again.close()
    assert read_journal(path, SHA, 6).entry(1).workers == set(TAKEN[1])
    assert again.head == written(tmp_path / "whole", TAKEN[:2])


def test_another_rank_completes_the_line_that_a_lost_one_had_not_written(tmp_path: Path) -> None:
    path = tmp_path / "j"
    head = written(path, TAKEN[:3])
    path.write_text(lines_of(path.read_text(), 0, 1, 2))
    Journal(SHA, 6, head).open(path)
    assert read_journal(path, SHA, 6, head.as_summary(3)).head == head
