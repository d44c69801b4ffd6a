"""What a run of a benchmark leaves: command, commit, date, machine, versions, time, load, and every sample.

Each benchmark has a file in RESULTS, a list of its runs, the newest last.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_samples: dict[str, list[float]] = {}


def sample(name: str, values: Iterable[float]) -> None:
    """Adds samples of a figure to the record of this run; the name says which figure, of what, and its unit."""
    _samples.setdefault(name, []).extend(float(value) for value in values)


@contextmanager
def recorded(name: str, command: str) -> Iterator[None]:
    """Adds what the benchmark run inside of it measured to the file of its name, unless it failed or took no sample.

    Of ranks of a launcher the first one's counts.
    """
    _samples.clear()
    before, begin = os.getloadavg()[0], time.monotonic()
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
    folder = os.environ.get("TORUSGD_RESULTS", str(RESULTS))
    if _samples and folder and os.environ.get("RANK", "0") == "0":
        path = Path(folder) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        took = {"seconds": round(time.monotonic() - begin, 1), "load": [before, os.getloadavg()[0]]}
        run = {"command": command, **_conditions(), **took, "samples": dict(_samples)}
        path.write_text(json.dumps([*runs(path), run], indent=1) + "\n")


def runs(path: Path) -> list[dict[str, Any]]:
    """The runs in a file, the newest last."""
    return json.loads(path.read_text()) if path.exists() else []


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def commit() -> str:
    """The commit that runs, with + if files have changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True, check=False).stdout.strip()

    # Results are added while a campaign runs, and change nothing that is run.
    changed = git("status", "--porcelain", "-uno", "--", str(RESULTS.parents[1]), f":!{RESULTS}")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _conditions() -> dict[str, Any]:
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.processor()}",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "numpy")}},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
