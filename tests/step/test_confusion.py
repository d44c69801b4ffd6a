"""The confusion matrix: it agrees with top-1, adds up over ranks, and comes out of `torusgd eval`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.comm.gloo_world import run_ranks
from tests.run.runs import run_here

from torusgd.cli.eval import confusion_table
from torusgd.comm.allreduce import NativeAllReduce
from torusgd.comm.groups import group_of
from torusgd.step.evaluate import Confusion, count_correct


def some(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (50, 5), generator=generator).float()  # many equal ones
    logits[3] = float("nan")
    return logits, torch.randint(0, 5, (50,), generator=generator)


def test_its_diagonal_is_top1() -> None:
    confusion = Confusion(5, torch.device("cpu"))
    logits, targets = some(0)
    confusion.add(logits, targets)
    assert int(confusion.counts.diagonal().sum()) == int(count_correct(logits, targets)[0])
    assert confusion.counts.sum(dim=1).tolist() == torch.bincount(targets, minlength=5).tolist()
    accuracies = confusion.accuracies()
    assert all(accuracy is not None and 0 <= accuracy <= 1 for accuracy in accuracies)


def counted() -> list[list[int]]:
    world = group_of()
    confusion = Confusion(5, world.device)
    for seed in range(world.rank, 4, world.size):
        confusion.add(*some(seed))
    confusion.sum_over_ranks(NativeAllReduce(world))
    return confusion.counts.tolist()


def test_ranks_count_together() -> None:
    whole = Confusion(5, torch.device("cpu"))
    for seed in range(4):
        whole.add(*some(seed))
    assert run_ranks(3, counted) == [whole.counts.tolist()] * 3


def test_a_class_named_as_markup_stays_text() -> None:
    table = confusion_table(["[red]x"], [None], [[0]])
    assert str(next(iter(table.columns[0].cells))) == "0 [red]x"


def test_eval_prints_few_classes_and_writes_all(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    summary, _ = run_here(tmp_path / "run")
    code, out, _ = run_cli("eval", tmp_path / "run", "--json", tmp_path / "e.json")
    assert code == 0
    told = json.loads((tmp_path / "e.json").read_text())
    assert told["top1"] == summary["top1"]
    assert [len(row) for row in told["confusion"]] == [4] * 4
    right = sum(row[number] for number, row in enumerate(told["confusion"]))
    assert right == round(told["top1"] * 24)
    assert [each["name"] for each in told["classes"]] == ["0", "1", "2", "3"]
    rows = [line.split() for line in out.splitlines()]
    assert sum(row[:1] == [str(n)] and row[1][-1] in "%-" for row in rows for n in range(4)) == 4, "no 0 0"
    assert "top-1" in out
    assert "top-5" not in out, "of four classes it is always 100 %"
