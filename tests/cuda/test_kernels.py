"""The tables that kernels read, above all while a CUDA graph is captured."""

import pytest
import torch

from torusgd.cuda.kernels import blocks_of, table_of, tables_of_capture, write_table

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.usefixtures("capturing")
def test_tables_of_a_capture_lie_in_memory_taken_before_and_are_filled_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated during a capture the graph uses for other things too, before and after the table is read."""
    with tables_of_capture(CPU) as tables, monkeypatch.context() as capture:
        capture.setattr(torch, "empty", lambda *size, **options: pytest.fail("allocated during the capture"))
        captured = [table_of(rows, GPU) for rows in ([(1, 2, 3)], [(5,), (7,)])]
    assert not any(table.data_ptr() % 16 for table in captured)
    tables.fill()
    assert [table.tolist() for table in captured] == [[[1, 2, 3]], [[5], [7]]]


@pytest.mark.usefixtures("capturing")
def test_a_table_too_many_ends_a_capture() -> None:
    with tables_of_capture(CPU), pytest.raises(RuntimeError):
        table_of([(0, 0)] * (1 << 16) + [(0, 0)], GPU)


def test_a_table_takes_other_values_where_it_lies_and_blocks_leave_out_tensors_of_nothing() -> None:
    table = torch.zeros(2, 2, dtype=torch.float64)
    write_table(table, [(0.1, 1.0), (2.0, 3.0)])
    assert table.tolist() == [[0.1, 1.0], [2.0, 3.0]]
    assert table_of([(2**62, 1)], CPU).tolist() == [[2**62, 1]]
    assert blocks_of((0, 5), 4, CPU).tolist() == [[1, 0, 4, 0], [1, 4, 1, 4]]
    assert blocks_of((0,), 4, CPU).shape == (0, 4)
