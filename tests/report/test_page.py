"""Pages about runs: whole, escaped, honest about what is missing; and points, ticks and paths of their charts."""

import base64
import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.disks import blind
from tests.messages import refuses
from tests.run.processes import summary as summary_of

from torusgd.errors import UserError
from torusgd.report import page as pages
from torusgd.report.charts import BOTTOM, COLUMNS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Series, line_chart
from torusgd.report.mistakes import Mistakes, WorstClass, WrongImage, picture_of, png
from torusgd.report.page import command_of, run_page
from torusgd.report.read_run import read_log, read_run

EVIL = "<script>alert(1)</script>"


class Tags(HTMLParser):
    """Counts tags, and fails where they are not closed in order."""

    VOID = ("meta", "img", "br", "line", "circle", "rect")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.seen, self.addresses = list[str](), list[str](), list[str]()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_logs_of_other_trainers_are_drawn(tmp_path: Path) -> None:
    history = [{"step": 5, "loss": 0.5, "lr": 0.1}, {"step": 10, "loss": 0.25, "grad_norm": "x"}]
    history.append({"step": 10, "eval_loss": 2})
    texts = {
        "trainer_state.json": json.dumps({"log_history": history, "best": None}),
        "metrics.csv": f"epoch,step,loss,val_acc\n0,5,0.75,{'[' * 100_000}\n0,10,{'9' * 400},0.5\n",
        "log.jsonl": f'{{"step": 1, "{EVIL}": 2.0}}\n\n{{"step": 2, "loss": NaN}}\n',
    }
    logs = []
    for name, text in texts.items():
        path = tmp_path / name[:3] / name
        path.parent.mkdir()
        path.write_text(text)
        logs.append(read_log(path))
    assert logs[0].columns["loss"] == [(5.0, 0.5), (10.0, 0.25)]
    assert logs[1].columns == {"epoch": [(5.0, 0.0), (10.0, 0.0)], "loss": [(5.0, 0.75)], "val_acc": [(10.0, 0.5)]}
    page = pages.log_page(logs)
    assert Tags(page).seen.count("svg") == 6
    assert "loss over steps: tra ends at 0.25, met ends at 0.75" in page.replace("loss (log scale)", "loss")
    assert EVIL not in page
    assert [log.name for log in logs] == ["tra", "met", "log.jsonl"]
    (tmp_path / "no.json").write_text("[1, {}]")
    with pytest.raises(UserError, match="no log with a step"):
        read_log(tmp_path / "no.json")


def lines_of(run: Path) -> list[str]:
    return (run / "events.jsonl").read_text().splitlines()


def copied(run: Path, folder: Path, lines: list[str] | None = None, **changes: Any) -> Path:
    """A run's folder with other events and another summary, or without one."""
    folder.mkdir(parents=True)
    for name in ("recipe.yaml", "events.jsonl", "status.json", "model.safetensors"):
        (folder / name).write_bytes((run / name).read_bytes())
    if lines is not None:
        (folder / "events.jsonl").write_text("\n".join(lines))
    if changes:
        (folder / "summary.json").write_text(json.dumps(summary_of(run) | changes))
    return folder


def rows_of(table: Any) -> dict[str, str]:
    return {row.label: row.cells[0] for row in table.rows}


def test_a_page_has_all_of_a_run_needs_nothing_beside_it_and_its_command_does_the_same_again(run: Path, tmp_path: Path):
    record, summary = read_run(run), summary_of(run)
    page = run_page([record], [None])
    tags = Tags(page)
    assert (tags.seen.count("figure"), {"script", "link"} & set(tags.seen), tags.addresses) == (6, set(), [])
    for value in (summary["weights_sha256"], summary["recipe_sha256"], f"{summary['top1']:.2%}", "Ranks and mishaps"):
        assert value in page
    assert page == run_page([read_run(run)], [None]), "the same run gives the same bytes"
    assert sum(share for _, share in pages.time_shares(record).values()) == pytest.approx(1.0, abs=1e-6)
    words = command_of(read_run(run)).split()
    assert words[:3] == ["torusgd", "train", str(run / "recipe.yaml")]
    assert words[words.index("--workers") + 1] == "1"
    status = {"data": "/with a space/$(rm)", "runtime": {"allreduce": "torus", "buckets": [3, 4], "timeout": 5.0}}
    other = copied(run, tmp_path / "other", world_size=8)
    (other / "status.json").write_text(json.dumps(status))
    found = ("--data '/with a space/$(rm)'", "--allreduce torus --buckets '[3,4]'", "timeout")
    assert [part in command_of(read_run(other)) for part in found] == [True, True, False]


def test_what_a_stranger_wrote_stays_text(run: Path, tmp_path: Path) -> None:
    lines = lines_of(run)
    first = json.loads(lines[0]) | {"slowest": {"rank": 0, "behind": 1.0, "cause": EVIL}}
    evil = copied(run, tmp_path / EVIL, [json.dumps(first), *lines[1:]], conditions={EVIL: EVIL})
    found = Mistakes(
        (WorstClass(EVIL, 9, 0.5, EVIL),), (WrongImage(3, EVIL, EVIL, 0.01, "data:image/png;base64,AA"),), 1, 9
    )
    page = run_page([read_run(evil), read_run(run)], [found, None])
    assert "script" not in Tags(page).seen
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 8
    stage = {"batch": 8, "seconds": 1.0, "forward": 0.25, "backward": 0.75}
    plan = {"title": EVIL, "notes": [EVIL], "limit": EVIL, "stages": [stage], "devices": 2, "seconds": 9.0}
    page = pages.plan_page(plan, EVIL)
    assert "script" not in Tags(page).seen
    assert page.count("&lt;script&gt;") == 5


def test_a_run_that_was_cut_off_says_so(run: Path, tmp_path: Path) -> None:
    lines = lines_of(run)
    page = run_page([read_run(copied(run, tmp_path / "cut", [*lines[:2], '{"step": 3, "lo']))], [None])
    Tags(page)
    assert "This run is not finished" in page
    assert "left out 1 line of events.jsonl" in page
    nothing = copied(run, tmp_path / "nothing", [])
    assert "no step is recorded" in run_page([read_run(nothing)], [None])
    with blind(nothing / "events.jsonl"), pytest.raises(UserError, match="can't be read: Input/output error"):
        read_run(nothing)
    (nothing / "events.jsonl").unlink()
    Tags(run_page([read_run(nothing), read_run(run)], [None, None]))
    (nothing / "events.jsonl").symlink_to("/dev/zero")
    refuses("events that are a device", read_run, nothing, about=f"{nothing}/events.jsonl:", OTHER=nothing)
    diverged = [json.dumps(json.loads(line) | {"loss": None}) for line in lines]
    page = run_page([read_run(copied(run, tmp_path / "diverged", diverged, loss=None))], [None])
    assert Tags(page).seen.count("figure") == 5, "a loss that is none is a gap"


@pytest.mark.parametrize(
    "line", ["[]", "3", "{}", '{"step": "x"}', '{"step": NaN}', "[" * 5000, "\udcff", '{"event": [], "step": 1}']
)
def test_lines_that_are_no_events_are_left_out(run: Path, tmp_path: Path, line: str) -> None:
    other, whole = copied(run, tmp_path / "other", []), (run / "events.jsonl").read_bytes()
    (other / "events.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n" + whole)
    record = read_run(other)
    assert (record.unread <= 1, len(record.steps)) == (True, 4)
    Tags(run_page([record], [None]))


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, 1e999, 10**400])
@pytest.mark.parametrize("key", ["top1", "seconds", "predicted", "shares", "conditions", "lost_ranks", "world_size"])
def test_a_summary_of_other_types_makes_a_page_or_one_line(run: Path, tmp_path: Path, key: str, value: Any) -> None:
    Tags(run_page([read_run(copied(run, tmp_path / "other", None, **{key: value}))], [None]))


def test_the_command_writes_the_page_with_wrong_images(run: Path, tmp_path: Path, run_cli: Any, mistake: Any) -> None:
    page = tmp_path / "page.html"
    mistake("report", tmp_path, "--out", page, TMP=tmp_path)
    mistake("report", run, "--out", tmp_path / "none" / "page.html", TMP=tmp_path, RUN=run)
    code, output, errors = run_cli("report", run, run, "--mistakes", "--out", page)
    assert (code, errors) == (0, "")
    assert f"wrote {page}" in output
    tags = Tags(page.read_text())
    counts = re.findall(r"(\d+) of (\d+) held-out images are taken", page.read_text())
    assert counts == 2 * [(str(round((1 - summary_of(run)["top1"]) * 24)), "24")]
    assert tags.seen.count("img") == 2 * min(24, int(counts[0][0]))


def test_pictures_are_what_the_network_saw() -> None:
    cv2 = pytest.importorskip("cv2")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (cv2.imdecode(np.frombuffer(png(pixels), np.uint8), cv2.IMREAD_COLOR_RGB) == pixels).all()
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    normalised = (torch.from_numpy(pixels) / 255 - torch.tensor(mean)) / torch.tensor(std)
    assert base64.b64decode(picture_of(normalised.permute(2, 0, 1), mean, std).partition(",")[2]) == png(pixels)
    assert picture_of(torch.zeros(2, 4, 4), (0.5,), (0.5,)) == ""


def test_noise_scale_slow_ranks_times_and_the_plan_are_shown_as_they_were_recorded(run: Path, tmp_path: Path) -> None:
    label = "batch up to which more images would pay"
    events = [json.loads(line) for line in lines_of(run)]
    assert rows_of(pages.training_table([read_run(run)]))[label] == "-", "four steps hold no measurement"
    steps = [event for event in events if "event" not in event]
    for step, value in zip(steps, (900.0, 1234.0, "x", None), strict=True):
        step["noise_scale"] = value
    measured = read_run(copied(run, tmp_path / "measured", [json.dumps(event) for event in events]))
    assert rows_of(pages.training_table([measured]))[label] == "1,234 > -"
    assert all(words in run_page([measured], [None]) for words in (label, "gradient noise scale"))
    step = {"samples": 8, "epoch": 0.5, "loss": 1.0, "lr": 0.1, "batch": 8, "stage": 0, "momentum": 0.9}
    late = ((1, 0.2, "data"), (1, 0.4, "compute"), (0, 0.1, "network"), (1, 0.3, "compute"))
    events = [
        step | {"step": place, "seconds": 2.0 * place, "step_seconds": 1.0, "data_seconds": 0.25, "sync_seconds": 0.125,
                "update_seconds": 0.125, "redone": 1, "slowest": {"rank": rank, "behind": behind, "cause": cause}}
        for place, (rank, behind, cause) in enumerate(late, 1)
    ]  # fmt: skip
    predicted = {"step_seconds": 0.5, "measured_step_seconds": 1.0, "step_seconds_error": -0.5}
    folder = copied(run, tmp_path / "other", [json.dumps(event) for event in events], seconds=8.0, predicted=predicted)
    record = read_run(folder)
    assert rows_of(pages.time_table([record])).items() >= {
        "compute": "2.0 s (25.0%)", "waiting for images": "1.0 s (12.5%)", "exposed communication": "0.5 s (6.2%)",
        "evaluation, checkpoints, start": "4.0 s (50.0%)", "images a second": "8",
    }.items()  # fmt: skip
    ranks = rows_of(pages.ranks_table([record]))
    assert ranks["steps redone after an overflow"] == "4"
    behind = "rank 1 in 3 of 4 comparisons, by 300.0 ms (median), mostly comp"
    assert ranks["ranks most often behind"].startswith(behind)
    assert rows_of(pages.plan_table([record]))["a step"] == "500.0 ms / 1000.0 ms (plan -50.0%)"
    assert pages.plan_table([read_run(run)]) is None


def test_a_page_shows_the_records_and_what_was_verified(run: Path, tmp_path: Path, run_cli: Any) -> None:
    last = summary_of(run)["records"]["sha256"]
    found = [{"name": "steps 0:4", "state": "equal"}, {"name": "result", "state": "differs"}]
    for file, of in (("mine", last), ("others", "0" * 64)):
        (tmp_path / file).write_text(json.dumps({"records_sha256": of, "found": found}))
    page = run_page([read_run(run, [json.loads((tmp_path / "mine").read_text())])], [None])
    assert all(words in page for words in (last, "equal: steps 0:4; differs: result"))
    assert re.search(r"a whole chain, \d+ states of the steps 0 to \d+", page)
    folder = copied(run, tmp_path / "broken", [], restarts=0)
    lines = (run / "records.jsonl").read_text().splitlines(keepends=True)
    wrongs = {"line 3 does not hold": [*lines[:2], *lines[3:]], "the last line is not that of": lines[:-1]}
    for why, wrong in wrongs.items():
        (folder / "records.jsonl").write_text("".join(wrong))
        assert read_run(folder).records.startswith(f"broken: {why}")
    words = ("report", run, "--out", tmp_path / "page.html", "--verified", tmp_path / "others")
    assert run_cli(*words)[0] == 0
    assert "equal: steps 0:4" not in (tmp_path / "page.html").read_text()
    (tmp_path / "others").write_text("{}")
    assert run_cli(*words)[0] == 2


@pytest.mark.parametrize(("asked", "shown"), [
    (("digits",), ('"row">forward<', "images a second", "efficiency", "Bold: the knee")),
    (("digits", "--cost", "2.50", "--best"), ("cost", "Better settings")),
    pytest.param(("resnet50", "--to", "75.9%"), ("top-1 to reach", "75.90%", "epochs"), marks=pytest.mark.slow),
], ids=["plan", "best", "to"])  # fmt: skip
def test_a_page_has_the_sweep(asked: tuple[str, ...], shown: tuple[str, ...], tmp_path: Path, run_cli: Any) -> None:
    page = tmp_path / "page.html"
    code, output, errors = run_cli("plan", *asked, "--cluster", "hgx-h100", "--devices", "12", "--report", page)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1].endswith(f"wrote {page}")
    text = page.read_text()
    tags = Tags(text)
    assert tags.seen.count("figure") >= 2
    assert tags.addresses == []
    assert all(words in text for words in (*shown, f"torusgd plan {asked[0]}"))


def test_a_line_fills_the_box_without_values_that_are_not_finite_and_a_long_one_is_thinned_to_means() -> None:
    chart = line_chart("loss", "epochs", [Series("run", [(0, 0), (5, 1), (10, 4)], 0)])
    assert chart is not None
    assert chart.lines[0].points == [
        (LEFT, HEIGHT - BOTTOM),
        ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) / 4),
        (WIDTH - RIGHT, TOP),
    ]
    assert [tick.label for tick in chart.y_ticks] == ["0", "1", "2", "3", "4"]
    assert chart.y_ticks[0].at == HEIGHT - BOTTOM
    assert chart.lines[0].path.startswith(f"M{LEFT},{HEIGHT - BOTTOM}L")
    assert len(points_of((0, 1), (1, math.nan), (2, math.inf), (3, 2))) == 2
    assert line_chart("y", "x", [Series("a", [(0, math.nan)], 0)]) is None
    assert line_chart("y", "x", []) is None
    placed = points_of(*((step, step % 2) for step in range(100 * COLUMNS)))
    assert len(placed) == COLUMNS
    assert len({y for _, y in placed}) == 1, "each is the mean of as many zeros as ones"
    axis = Axis(1.0, 1000.0, 0, 300, log=True)
    assert [axis.at(value) for value in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert [tick.label for tick in axis.ticks(5)] == ["1", "2", "5", "10", "20", "50", "100", "200", "500", "1000"]


@pytest.mark.parametrize("low", [0.0, -3.0, 1e-323, 1e-9, 7.0, 12345.0])
@pytest.mark.parametrize("width", [0.0, 1e-323, 1e-6, 1.0, 1e7])
@pytest.mark.parametrize("log", [False, True])
def test_axes_have_a_few_ticks_within_their_bounds_whatever_the_values(low: float, width: float, log: bool) -> None:
    chart = line_chart("y", "x", [Series("a", [(low, low), (low + width, low + width)], 0)], log_x=log, log_y=log)
    if chart is None:
        assert log
        assert low + width <= 1e-300
        return
    assert all(LEFT - 0.1 <= tick.at <= WIDTH - RIGHT + 0.1 for tick in chart.x_ticks)
    assert all(TOP - 0.1 <= tick.at <= HEIGHT - BOTTOM + 0.1 for tick in chart.y_ticks)
    assert 1 <= len(chart.y_ticks) <= 12


def points_of(*points: tuple[float, float]) -> Sequence[tuple[float, float]]:
    chart = line_chart("y", "x", [Series("a", points, 0)])
    assert chart is not None
    return chart.lines[0].points
