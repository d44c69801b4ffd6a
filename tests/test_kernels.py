"""Which form of an operator a GPU runs, and the tables that its kernels read."""

import sys
from types import ModuleType

import pytest
import torch

from torusgd.kernels import blocks_of, form_on, kept_table, table_of, tables_aside, write_table

CPU = torch.device("cpu")


def plain() -> str:
    return "torch's operators"


def kernels() -> str:
    return "kernels"


@pytest.fixture(autouse=True)
def forget() -> None:
    form_on.cache_clear()


@pytest.mark.parametrize(("capability", "runs"), [((9, 0), kernels), ((8, 0), kernels), ((7, 5), plain)])
def test_kernels_run_where_triton_knows_the_gpu(
    capability: tuple[int, int], runs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("its_kernels")
    module.plain = kernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "its_kernels", module)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert form_on(capability, plain, "its_kernels", "plain") is runs


def test_without_triton_torchs_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert form_on((9, 0), plain, "its_kernels", "plain") is plain


def test_tables_hold_integers_or_float64() -> None:
    addresses, values = table_of([(2**62, 1)], CPU), table_of([(0.1, 2.0)], CPU)
    assert (addresses.dtype, addresses.tolist()) == (torch.int64, [[2**62, 1]])
    assert (values.dtype, values.tolist()) == (torch.float64, [[0.1, 2.0]])


def test_tables_of_a_capture_lie_in_memory_taken_before_it_and_are_filled_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is allocated during a capture the graph uses for other things too, before and after the table is read."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rows, values = [(1, 2, 3)], [(0.5,), (0.25,)]
    with tables_aside(CPU) as tables, monkeypatch.context() as capture:
        capture.setattr(torch, "empty", lambda *size, **options: pytest.fail("allocated during the capture"))
        captured = [table_of(each, torch.device("cuda")) for each in (rows, values)]
    assert not captured[0].data_ptr() % 16
    assert not captured[1].data_ptr() % 16
    tables.fill()
    assert [(table.dtype, table.tolist()) for table in captured] == [
        (torch.int64, [[1, 2, 3]]),
        (torch.float64, [[0.5], [0.25]]),
    ]


def test_a_graph_has_a_kept_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is kept for others may be forgotten while the graph still reads it, and theirs need no capture."""
    captured = list[torch.Tensor]()
    for _ in range(2):
        with tables_aside(CPU) as tables, monkeypatch.context() as capture:
            capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            captured.append(kept_table(((1, 2),), torch.device("cuda")))
        tables.fill()
    assert captured[0].data_ptr() != captured[1].data_ptr()
    assert [table.tolist() for table in captured] == [[[1, 2]]] * 2
    assert kept_table(((1, 2),), CPU) is kept_table(((1, 2),), CPU)


def test_a_table_takes_other_values_where_it_lies() -> None:
    table = torch.zeros(2, 2, dtype=torch.float64)
    write_table(table, [(0.1, 1.0), (2.0, 3.0)])
    assert table.tolist() == [[0.1, 1.0], [2.0, 3.0]]


def test_tables_beyond_what_was_taken_end_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with tables_aside(CPU), pytest.raises(RuntimeError, match="at most 131072 entries"):
        table_of([(0, 0)] * (1 << 16) + [(0, 0)], torch.device("cuda"))


def test_blocks_leave_out_tensors_of_nothing() -> None:
    assert blocks_of((0, 5), 4, CPU).tolist() == [[1, 0, 4, 0], [1, 4, 1, 4]]
    assert blocks_of((0,), 4, CPU).shape == (0, 4)
