"""The tool that counts the files of a way: on a package of a few functions, which forks, starts a thread and fails."""

import os
import subprocess
import sys
from pathlib import Path
from types import CodeType

import pytest
from tools.ways import ways
from tools.ways.__main__ import HOOK
from tools.ways.calls import Call, read_calls

import torusgd

# Modules of a package of the same name; work runs in a process that is forked.
PACKAGE = {
    "__init__": "",
    "run": """import os
from . import step, survive
def work():
    own = step.TrainStep()
    own.run()
    own.run()
    try:
        own.run(fails=True)
    except OSError:
        survive.agree()
        survive.agree()
    own.run()
if not os.fork():
    work()
    os._exit(0)
os.wait()
""",
    "step": """import threading
from . import control, sums
class WholeNetwork:
    def backward(self):
        sums.add()
class Update:
    def step(self):
        return
class TrainStep:
    def run(self, fails=False):
        thread = threading.Thread(target=sums.send)
        WholeNetwork().backward()
        thread.start()
        control.ControlMessage().send()
        thread.join()
        if fails:
            sums.wait()
        Update().step()
        return "done"
""",
    "sums": """from . import wire
def add():
    return
def send():
    wire.send()
def wait():
    raise OSError
""",
    "wire": "def send(): ...",
    "control": """from . import exact
class ControlMessage:
    def send(self):
        exact.send()
""",
    "exact": "def send(): ...",
    "survive": "def agree(): ...",
}


@pytest.fixture
def rank(tmp_path: Path) -> dict[int, list[Call]]:
    """The calls of the forked process, by thread."""
    package, traces = tmp_path / "torusgd", tmp_path / "traces"
    package.mkdir()
    traces.mkdir()
    for name, text in PACKAGE.items():
        (package / f"{name}.py").write_text(text)
    paths = os.pathsep.join([str(HOOK), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": paths, "WAYS": str(traces), "WAYS_PACKAGE": str(package)}
    subprocess.run([sys.executable, "-c", "import torusgd.run"], env=environment, check=True, timeout=60)
    (rank,) = [threads for threads in map(read_calls, traces.iterdir()) if ways.is_rank(threads)]
    return rank


def test_a_gradient_and_a_loss_pass_what_runs_and_a_mark_that_does_not_come_by_is_named(rank: dict[int, list[Call]]):
    found = ways.gradient(rank, ways.steps_of(rank, 3))
    assert list(found.files)[:2] == ["step.py", "sums.py"]
    assert (sorted(found.files), found.sometimes) == (["step.py", "sums.py", "wire.py"], {})
    assert [sorted(files) for files in found.beside.values()] == [["control.py", "exact.py"]]
    entries = [(entry.file, entry.origin) for entry in ways.loss_in_rank(rank, killed=0).entries]
    error, run = "the error", "run.py"
    assert entries == [("sums.py", error), (run, error), ("survive.py", run), ("step.py", run)]
    with pytest.raises(ways.NotFoundError, match=ways.ANNOUNCE):
        ways.loss_in_launcher(rank, killed=0)
    with pytest.raises(ways.NotFoundError, match=ways.UPDATE):
        ways.steps_of(rank, 4)


def test_the_tables_name_what_the_package_has() -> None:
    files = Path(torusgd.__file__).parent.rglob("*.py")
    has = set().union(*(names_of(compile(path.read_text(), path, "exec")) for path in files))
    marks = {ways.BACKWARD, ways.UPDATE, ways.STEP, ways.NOTICE, ways.ANNOUNCE}
    assert marks | set(ways.BESIDE_GRADIENT) | set(ways.BESIDE_LOSS) <= has


def names_of(code: CodeType) -> set[str]:
    """Qualified names of the classes and functions of a file's code."""
    return {code.co_qualname}.union(*(names_of(each) for each in code.co_consts if isinstance(each, CodeType)))
