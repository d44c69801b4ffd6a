"""Writes the tables of README, docs and notes from the files in benchmarks/results, and the planner's from its fit.

    python -m benchmarks.tables

A table stands between `<!-- benchmarks.tables: NAME -->` and `<!-- end of NAME -->`. NAME is that of WRITERS, or of a
file NAME.json, whose newest run is shown, or each-NAME for the newest run of each of its commands.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from torusgd.plan.cluster import load_calibrated
from torusgd.plan.published import error_sizes, read_rows

from .__main__ import docstrings
from .accuracy import proof
from .accuracy.claims import CLAIMS
from .allreduce.allreduce import DESCRIBED, EMULATIONS, show_size
from .record import RESULTS, markdown, runs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notes").glob("*.md")]
_NEEDS = re.compile(r"^Needs: (.*)\.$", re.MULTILINE)
_EXAMPLE = re.compile(r"^    ((?:sudo |torchrun |unshare |\.venv/|python ).*?)(?: {2}.*| \[.*)?$", re.MULTILINE)
_MARKED = re.compile(r"(<!-- benchmarks\.tables: (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def listed() -> str:
    """A line for each benchmark: what it shows, what it needs, how long it took, and how it is run."""
    found = []
    for (group, command), text in docstrings().items():
        shows = text.partition("\n")[0].removesuffix(" Needs root.")
        needs, example = _NEEDS.search(text), _EXAMPLE.search(text)
        assert needs is not None, (group, command)
        assert example is not None, (group, command)
        asked = f"python -m benchmarks {group} {command}{example[1].partition(f'{group} {command}')[2]}"
        done = [run for run in runs(RESULTS / f"{group}-{command}.json") if run["command"] == asked]
        took = f"{done[-1]['seconds'] / 60:.1f} min" if done and "seconds" in done[-1] else ""
        found.append((f"{group} {command}", shows, needs[1], took, f"`{example[1]}`"))
    return markdown(("command", "shows", "needs", "took", "run as"), found)


def table(run: dict[str, Any]) -> str:
    """Markdown: what ran where, and a line for each figure."""
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    low, high = sorted(run["load"])
    head = f"`{run['command']}`, {run['date'][:10]}, commit {run['commit']}, {run['processor']}, {versions},\n"
    lines = []
    for name, values in run["samples"].items():
        ends = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        lines.append((name, f"{median(values):.4g}", f"{ends[0]:.4g} to {ends[2]:.4g}", len(values)))
    return f"{head}load {low:.1f} to {high:.1f}:\n\n{markdown(('figure', 'median', 'quartiles', 'n'), lines)}"


def plans_for_workers() -> str:
    """Plans for 2 and 3 workers from a run with one, beside runs on as many: the newest run of the benchmark."""
    samples = runs(RESULTS / "plan-workers.json")[-1]["samples"]
    lines, middles = [], []
    for name in (each.removesuffix(": step, ms") for each in samples if each.endswith(": step, ms")):
        took, planned, errors = (
            samples[f"{name}: {what}"] for what in ("step, ms", "planned step, ms", "error of the plan, %")
        )
        middles.append(median(errors))
        spread = f"{median(errors):+.1f} ({min(errors):+.1f} to {max(errors):+.1f})"
        lines.append((name, f"{median(took):,.0f}", f"{median(planned):,.0f}", spread, len(errors)))
    found = markdown(("network, workers", "step, ms", "planned", "error, % (range)", "n"), lines)
    return f"{found}\n\nMedian size of the error over all: {median(map(abs, middles)):.1f} %."


def pooled(name: str) -> str:
    """Each figure of a file with the samples of all its runs, for a benchmark that is run in parts."""
    found, samples = runs(RESULTS / f"{name}.json"), defaultdict[str, list[float]](list)
    for run in found:
        for figure, values in run["samples"].items():
            samples[figure] += values
    dates, loads = sorted({run["date"][:10] for run in found}), [load for run in found for load in run["load"]]
    machines = ", ".join(sorted({run["processor"] for run in found}))
    head = f"{len(found)} runs, {' and '.join(dict.fromkeys((dates[0], dates[-1])))}, {machines}, "
    lines = [
        (figure, f"{median(values):.4g}", f"{min(values):.4g} to {max(values):.4g}", len(values))
        for figure, values in samples.items()
    ]
    ends = markdown(("figure", "median", "least to most", "n"), lines)
    return f"{head}load {min(loads):.1f} to {max(loads):.1f}:\n\n{ends}"


AIMS = {4 << 10: 8.0, 64 << 10: 6.0, 256 << 10: 4.0, 1 << 20: 3.0, 4 << 20: 1.4}
"""of `auto` over Gloo's own, on 16 hosts at 5 ms and 1 Gb/s, by bytes"""


class AllReduce(NamedTuple):
    """One size of one set-up, in a run."""

    setup: str
    size: int
    run: dict[str, Any]
    samples: dict[str, list[float]]

    def times(self) -> dict[str, list[float]]:
        """Milliseconds by algorithm."""
        return {name.removesuffix(", ms"): v for name, v in self.samples.items() if re.fullmatch("[^,]*, ms", name)}

    def gain(self) -> float:
        """Gloo's time over that of `auto`."""
        times = self.times()
        return median(times["native"]) / median(times["auto"])


def _all_reduces() -> list[AllReduce]:
    # Of each set-up, size and number of streams the newest run that has `auto` and Gloo's own.
    found: dict[tuple[str, int], AllReduce] = {}
    for run in runs(RESULTS / "allreduce-allreduce.json"):
        cases = defaultdict[tuple[str, int], dict[str, list[float]]](dict)
        for name, values in run["samples"].items():
            setup, emulation, size, streams, rest = name.split(", ", 4)
            told = f"{setup}, {emulation}" + (f", {streams}" if streams != "1 streams" else "")
            cases[told, int(size.removesuffix(" bytes"))][rest] = values
        for case, samples in cases.items():
            each = AllReduce(*case, run, samples)
            if {"auto", "native"} <= each.times().keys():
                found[case] = each

    def place(case: tuple[str, int]) -> tuple[int, int, str, int]:
        setup, emulation, *_ = case[0].split(", ")
        return list(DESCRIBED).index(setup), list(EMULATIONS).index(emulation), *case

    return [found[case] for case in sorted(found, key=place)]


def all_reduces() -> str:
    """`auto` beside the best single algorithm and Gloo's own: a line a size."""
    found = []
    for each in _all_reduces():
        times = each.times()
        auto = times.pop("auto")
        best = min(times, key=lambda name: median(times[name]))
        low, _, high = quantiles(auto, n=4, method="inclusive")
        ran = next((name.partition("ran as ")[2] for name in each.samples if "ran as" in name), "")
        skew = median(each.samples["auto, skew and error of clocks, ms"])
        cells = [each.setup, f"{each.size:,}", ran, f"{median(auto):.1f} ({low:.1f} to {high:.1f})"]
        cells += [f"{best}, {median(times[best]):.1f}", f"{median(times[best]) / median(auto):.2f}"]
        aim = f"{AIMS[each.size]:g}" if each.setup.startswith("far, ") and each.size in AIMS else ""
        cells += [f"{each.gain():.2f}", aim]
        cells += [f"{skew:.1f}" + " *" * (skew > 0.05 * median(auto)), str(len(auto))]
        found.append([*cells, f"{min(each.run['load']):.0f} to {max(each.run['load']):.0f}"])
    names = ("set-up", "bytes", "`auto` ran", "ms (quartiles)", "best single, ms", "best / `auto`", "Gloo / `auto`")
    return markdown((*names, "aim", "skew", "n", "load"), found)


def setups() -> str:
    """By how much `auto` is quicker than Gloo's own: a line a set-up."""
    gains = defaultdict[str, dict[int, float]](dict)
    dates, counts = dict[str, str](), dict[str, int]()
    for each in _all_reduces():
        gains[each.setup][each.size] = each.gain()
        dates[each.setup], counts[each.setup] = each.run["date"][:10], len(each.times()["auto"])
    sizes = sorted({size for found in gains.values() for size in found})
    lines = []
    for setup, found in gains.items():
        kind, emulation, *streams = setup.split(", ")
        told = "; ".join([DESCRIBED[kind], *([EMULATIONS[emulation].told] if emulation != "plain" else []), *streams])
        cells = [f"{found[size]:.2f}" if size in found else "" for size in sizes]
        lines.append((told, *cells, counts[setup], dates[setup]))
    return markdown(("hosts", *map(show_size, sizes), "n", "date"), lines)


def torus() -> str:
    """A torus beside the ring and the hierarchical all-reduce, where a run had all three."""
    lines = []
    for each in _all_reduces():
        times = each.times()
        if len(found := [times[name] for name in ("torus", "ring", "hierarchical") if name in times]) < 3:
            continue
        ours, ring, other = (f"{median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in found)
        ratios = [f"{median(found[0]) / median(off):.2f}" for off in found[1:]]
        lines.append((each.setup, f"{each.size:,}", ours, ring, ratios[0], other, ratios[1], len(found[0])))
    names = ("torus, ms (range)", "ring", "torus / ring", "hierarchical", "torus / it")
    return markdown(("set-up", "bytes", *names, "n"), lines)


def portable() -> str:
    """What a step costs by portable arithmetic, from the newest runs of its two files."""
    times, sizes = (runs(RESULTS / f"portable-{name}.json")[-1]["samples"] for name in ("speed", "memory"))
    found = []
    for name in (each.removesuffix(", float32, ms") for each in times if each.endswith(", float32, ms")):
        base, *others = (times[f"{name}, {kind}, ms"] for kind in ("float32", "bfloat16", "portable"))
        cells = [name, f"{median(base):.1f} ({min(base):.1f} to {max(base):.1f})"]
        cells += [f"{median(each) / median(base):.2f}" for each in others]
        float32, ours = (sizes.get(f"{name}, {kind}, MiB") for kind in ("float32", "portable"))
        cells += [str(len(base)), f"{median(ours) / median(float32):.2f}" if ours and float32 else ""]
        if inside := times.get(f"{name}, operators within rules"):
            floor = median(times[f"{name}, portable, 2 images alone, ms"]) / times[f"{name}, floor, ms"][0]
            cells += [f"{inside[0]:,.0f}, a step on two images {floor:.2f} times these alone"]
        else:
            cells += [""]
        found.append(cells)
    names = ("network", "float32, ms", "bfloat16, of it", "portable, of it", "n", "memory, of float32's")
    return markdown((*names, "operators a step"), found)


def _of_first_claim() -> str:
    claim, known = CLAIMS[0], proof.Known()
    pairs = known.pairs(known.chosen(claim.on), known.chosen(claim.off))
    on, off = (f"{mean(each):.2f}" for each in zip(*pairs.values(), strict=True))
    told = f"{on} % top-1, {off} % by {claim.off.name}"
    chosen = "SGD's rate chosen on validation images, the recipe's form earlier on the held-out ones"
    return f"{told} (Fashion-MNIST, means of {len(pairs)} seeds; {chosen})"


def readme() -> str:
    """The few figures of the README, each from the newest run of its file or from the planner's fit."""

    def newest(name: str) -> dict[str, list[float]]:
        return runs(RESULTS / f"{name}.json")[-1]["samples"]

    fashion = newest("accuracy-fashion")
    names = ("fashion-large", "fashion-plain-end")
    top1 = [", ".join(f"{each:.2f}" for each in fashion[f"{name}, % top-1"]) for name in names]
    steps = [f"{fashion[f'{name}, steps'][0]:,}" for name in names]
    trained = "; ".join(f"{each} % in {count} steps" for each, count in zip(top1, steps, strict=True))
    portable = newest("portable-speed")
    slower = {
        name.partition(", ")[0]: median(each) / median(portable[name.replace("portable", "float32")])
        for name, each in portable.items()
        if name.endswith(", portable, ms")
    }
    gains = [each.gain() for each in _all_reduces() if each.setup.startswith("far, ")]
    published = read_rows()
    off = f"{error_sizes(published, load_calibrated().system_left_out)} ({len(published)} rows)"
    hosts = "(4 KiB to 4 MiB, 16 emulated hosts, 5 ms, 1 Gb/s, four emulations of it)"
    rows = [
        ("top-1 at a batch of 1,024 to 4,096; of 256", f"{trained} (Fashion-MNIST; chosen on these held-out images)",
         "docs/benchmarks.md#fashion-mnist-large-batches-without-losing-accuracy"),
        (CLAIMS[0].technique, _of_first_claim(), "docs/proof-results.md"),
        ("`--allreduce auto` against Gloo's own", f"{min(gains):.1f} to {max(gains):.1f} times as quick {hosts}",
         "docs/benchmarks.md#all-reduce-over-emulated-hosts"),
        ("portable arithmetic",
         f"{min(slower.values()):.1f} to {max(slower.values()):.1f} times float32's step ({', '.join(slower)})",
         "docs/methods/portable-arithmetic.md"),
        ("the planner, on published systems of which the fit had seen no row", off, "docs/published.md"),
    ]  # fmt: skip
    return markdown(("what", "figure", ""), [(what, figure, f"[more]({page})") for what, figure, page in rows])


WRITERS: dict[str, Callable[[], str]] = {
    "all-reduces": all_reduces,
    "set-ups": setups,
    "commands": listed,
    "plan-workers": plans_for_workers,
    "portable": portable,
    "proof": proof.table,
    "proof-choices": proof.choices,
    "proof-noise": proof.noise,
    "readme": readme,
    "torus": torus,
    "step-records": partial(pooled, "step-records"),
}
"""tables that are not the newest run of a file"""


def made(name: str) -> str:
    """A table by its name."""
    if name in WRITERS:
        return WRITERS[name]()
    found = runs(RESULTS / f"{name.removeprefix('each-')}.json")
    newest = {run["command"]: run for run in found} if name.startswith("each-") else {"": found[-1]}
    return "\n\n".join(map(table, newest.values()))


def written(text: str) -> str:
    """A page with each of its tables as the results have it."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{made(found[2])}\n\n{found[3]}", text)


def main() -> None:
    """Rewrites the pages that differ."""
    for page in PAGES:
        if (text := written(page.read_text())) != page.read_text():
            page.write_text(text)


if __name__ == "__main__":
    main()
