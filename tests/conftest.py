"""All tests run with one thread, as every rank of a CPU recipe does: bits differ between one and two."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.comm.gloo_world import start_forkserver
from tests.messages import assert_sentence
from tests.run.processes import RECIPE, results, run_alone
from tests.run.runs import DIGITS_NET, run_here
from torusgd import cli, storage
from torusgd.runtime import ask_for_repeatable_products
from torusgd.signals import STOP_SIGNALS

torch.set_num_threads(1)
# On a busy machine Hypothesis would take slowness for a fault of its tests.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
ask_for_repeatable_products()  # before any test's first product on a GPU
# A shell that starts the tests in the background has them ignore SIGINT, and nohup SIGHUP; what they start would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Folders with the longest files, in the order in which they are begun.
_LONG = ("launch", "run", "ranks", "step", "comm", "gradients", "cuda", "tensor_parallel", "rehearse", "recipe")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the folders with the longest files first, and skips tests that need a GPU where there is none.

    Of several files at a time, the last ones are then short.
    """
    order = {folder: place for place, folder in enumerate((*_LONG, "tests"))}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    if any({"run_ranks", "on_ranks"} & vars(getattr(item, "module", object)).keys() for item in items):
        start_forkserver()
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """The command line in this process, for ends that come before any rank is started: exit code, output, errors."""
    old = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torusgd", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (int(end.value.code or 0), *capsys.readouterr())

    yield run
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture
def mistake(run_cli: Callable[..., Any]) -> Callable[..., None]:
    """A command that is refused: exit code 2, nothing printed but one line, which messages.yaml has by the command.

    `hidden` are words for what differs from run to run (`tests.messages`).
    """

    def run(*words: object, **hidden: object) -> None:
        code, out, error = run_cli(*words)
        assert (code, out) == (2, "")
        assert error.endswith("\n")
        name = " ".join(["torusgd", *map(str, words)])
        for word, found in hidden.items():
            name = name.replace(str(found), word)
        assert_sentence(name, "torusgd: ", error[:-1], hidden)

    return run


@pytest.fixture
def plan(run_cli: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[str, dict[str, Any]]]:
    """`torusgd plan` to its good end: what it prints, and its JSON."""

    def run(*words: object) -> tuple[str, dict[str, Any]]:
        path = tmp_path / "plan.json"
        code, out, err = run_cli("plan", *words, "--json", path)
        assert code == 0, err
        return out, json.loads(path.read_text())

    return run


@pytest.fixture
def memory_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes memory:// the URL of a bucket, fsspec's in this process, which is empty before and after a test."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    # As a bucket does it: an object is there when it is whole, and each reader has a position of its own.
    def put(files: Any, file: str, name: str, **_: Any) -> None:
        files.pipe_file(name, Path(file).read_bytes())

    def read(files: Any, name: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if (found := files.store.get(files._strip_protocol(name))) is None:
            raise FileNotFoundError(name)
        return bytes(found.getvalue()[start:end])

    def get(files: Any, name: str, file: str, **_: Any) -> None:
        Path(file).write_bytes(read(files, name))

    for name, function in (("put_file", put), ("cat_file", read), ("get_file", get)):
        monkeypatch.setattr(MemoryFileSystem, name, function)
    monkeypatch.setattr(storage, "SCHEMES", ("memory", *storage.SCHEMES))
    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0))
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is done, of a network that is built in; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_here(folder, DIGITS_NET)
    return folder


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a short recipe, to which something may happen while it runs (`tests.run.processes`)."""
    path = tmp_path_factory.mktemp("recipe") / "faults.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="session")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a run that nothing happens to: one rank, no launcher, no pauses."""
    return results(run_alone(tmp_path_factory.mktemp("undisturbed") / "out", recipe))
