"""Whatever is read works or is refused in one line: some inputs of every kind here, all of them as a slow test."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.commands import ran
from tools.fuzz import readers
from tools.fuzz.inputs import Fuzz
from tools.fuzz.tally import Tally, fed

import torusgd
from torusgd.data.decode import Undecodable

KINDS = list(Fuzz(0, Path()).kinds)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "commands"])
def test_some_inputs_work_or_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    tally = Fuzz(1, tmp_path).run(kind, share=0.05)
    assert not tally.problems
    assert tally.inputs >= 5


def test_each_reader_is_tried_or_has_a_reason() -> None:
    assert set(readers.found(Path(torusgd.__file__).parent)) == readers.READERS.keys()
    assert {kind for kind in readers.READERS.values() if not kind.startswith("- ")} <= {*KINDS, "Parquet"}
    missing = [reason.split(": tests/")[1] for reason in readers.READERS.values() if ": tests/" in reason]
    assert all((Path(__file__).parents[1] / path).is_file() for path in missing)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_inputs_work_or_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    assert not Fuzz(0, tmp_path).run(kind, share=1.0).problems


def test_the_campaign_sees_a_traceback_and_a_second_line() -> None:
    tally = Tally("own")
    fed(tally, "defect", Mock(side_effect=KeyError("x")))
    fed(tally, "refused", Mock(side_effect=Undecodable("one\nline")))
    fed(tally, "fine", lambda: None)
    assert (tally.inputs, tally.refused, tally.worked) == (3, 1, 1)
    assert [problem.split(": ")[1:3] for problem in tally.problems] == [["defect", "KeyError"], ["refused", "2 lines"]]


@pytest.mark.timeout(120)
def test_the_campaign_sees_memory() -> None:
    # In a process of its own: one that ran a thousand tests holds freed memory, from which half a GiB comes unseen.
    lines = ["from tools.fuzz import tally", "tally.MOST_BYTES = 1 << 27", "own = tally.Tally('own')"]
    lines += ["tally.fed(own, 'memory', lambda: b'x' * (1 << 29))", "print(own.problems)"]
    ended = ran([sys.executable, "-c", "\n".join(lines)], cwd=Path(__file__).parents[2], code=None)
    assert "own: memory: took" in ended.stdout, ended.stdout + ended.stderr
