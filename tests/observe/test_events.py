"""A run that goes on drops the events of the steps that it takes again, and nothing else."""

import json

import pytest

from torusgd.observe import events

LINES = [
    *({"step": step} for step in range(1, 8)),
    {"step": 7, "event": "evaluation"},
    {"step": 7, "event": "polished"},
    *({"step": step} for step in range(8, 10)),
]


@pytest.mark.parametrize("block", [1, 7, 4096])
@pytest.mark.parametrize(("step", "count"), [(0, 0), (3, 3), (7, 8), (9, 11), (99, 11)])
@pytest.mark.parametrize("cut", ["", '{"step": 10, "lo', "\n"])
def test_later_events_are_dropped_from_the_end(tmp_path, monkeypatch, step: int, count: int, cut: str, block: int):
    monkeypatch.setattr(events, "_BLOCK", block)
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + cut)
    events._drop_later_events(path, step, evaluated=step)
    assert path.read_text() == "".join(json.dumps(line) + "\n" for line in LINES[:count])
    events._drop_later_events(tmp_path / "none", step, evaluated=step)
