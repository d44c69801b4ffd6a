"""Which form of an operator a GPU runs, and the tables that its kernels read."""

import sys
from types import ModuleType

import pytest
import torch

from torusgd.kernels import blocks_of, form_on, table_of

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


def test_blocks_leave_out_tensors_of_nothing() -> None:
    assert blocks_of((0, 5), 4, CPU).tolist() == [[1, 0, 4, 0], [1, 4, 1, 4]]
    assert blocks_of((0,), 4, CPU).shape == (0, 4)
