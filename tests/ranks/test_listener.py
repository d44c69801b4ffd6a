"""What reaches a run's port, or a machine that joins, and does not belong there; addresses and flags that are none."""

import errno
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.messages import refused
from tests.polling import until

from torusgd.errors import RunError, UserError
from torusgd.launch import node_agent
from torusgd.launch.node_agent import join_run
from torusgd.ranks.join import (
    MOST_STRANGERS,
    NODE,
    Listener,
    interface_addresses,
    interface_of,
    make_token,
    prove_to_client,
    prove_to_listener,
)
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.job import Job
from torusgd.runtime import resolve_auto


def test_strangers_are_told_now_and_then_and_only_so_many_are_heard_at_a_time() -> None:
    lines: list[str] = []
    listener = Listener(("127.0.0.1", 0), b"k" * 64, 1, {}, 30.0, lines.append)
    strangers = [socket.create_connection(listener.address) for _ in range(MOST_STRANGERS)]
    assert all(stranger.recv(4096) for stranger in strangers)
    assert socket.create_connection(listener.address).recv(4096) == b""
    for stranger in strangers:
        stranger.sendall(b"garbage\n")
        assert stranger.recv(4096) == b""
    assert len(until(lambda: lines, "a line")) == 1
    listener.close(0, "")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.address)


def test_a_listener_outlives_a_connection_that_can_not_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = socket.socket.accept, list[int]()

    def fails_once(own: socket.socket) -> Any:
        if not failed:
            failed.append(errno.EMFILE)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(own)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    listener = Listener(("127.0.0.1", 0), b"k" * 64, 1, {}, 30.0, lambda line: None)
    with socket.create_connection(listener.address, 30) as stranger:
        assert stranger.recv(4096)
    listener.close(0, "")
    assert failed


def test_a_message_that_holds_no_number_ends_its_machine_alone() -> None:
    listener = Listener(("127.0.0.1", 0), b"k" * 64, 1, {}, 30.0, lambda line: None)
    with socket.create_connection(listener.address, 30) as link:
        prove_to_listener(link, b"k" * 64, NODE)
        link.sendall(b'{"host": "here", "workers": Infinity, "version": "1"}\n')
        assert link.recv(4096) == b""
    listener.close(0, "")


GARBAGE = "a first machine that sends garbage"


@pytest.mark.parametrize(
    ("name", "kind", "messages"),
    [
        ("a job that is none", UserError, [{"silent": 5.0, "job": 7}]),
        ("a job without a recipe", UserError, [{"silent": 5.0, "job": {"device": "tpu"}}]),
        (GARBAGE, RunError, [{"silent": "long", "job": {}}]),
        (GARBAGE, RunError, [{"job": {}}]),
        (GARBAGE, RunError, [{"end": "over"}]),
        (GARBAGE, RunError, [{"end": "over", "code": 1e400}]),
        (GARBAGE, RunError, [None, {"start": 1}]),
        (GARBAGE, RunError, [None, {"start": 1, "rank": -1, "size": 1, "attempt": 0}]),
        (GARBAGE, RunError, [None, {"kill": [2]}]),
        (GARBAGE, RunError, [None, {"end": "over", "code": -3}]),
    ],
)
def test_odd_messages_of_the_first_machine_are_one_line(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception], messages: list[Any]
) -> None:
    """None: the job as it should be."""
    token, told = b"k" * 64, list[str]()
    job = Job(resolve_auto(load_recipe(str(recipe)).recipe, "cpu"), RuntimeOptions(), "cpu", tmp_path / "out")
    monkeypatch.setattr(node_agent, "warn", told.append)

    def be_root() -> None:
        with server.accept()[0] as link:
            prove_to_client(link, token)
            link.recv(4096)  # what the machine brings
            for message in messages:
                link.sendall(json.dumps(message or {"silent": 5.0, "job": job.as_dict()}).encode() + b"\n")
            while link.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=be_root, daemon=True).start()
        host, port = server.getsockname()
        with refused(name, kind=kind, PORT=port):
            join_run((host, port), token, None, 1)


def test_ranks_can_be_reached_at_an_address_of_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert ("lo", "127.0.0.1") in interface_addresses()
    monkeypatch.setattr("torusgd.ranks.join.interface_addresses", lambda: [("eth0", "10.0.0.1"), ("eth0", "10.0.0.2")])
    assert interface_of("10.0.0.2") == "eth0"
    with refused("an address of another machine", "0.0.0.0"):
        interface_of("0.0.0.0")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--listen", "7000"], "--listen 7000: write an address and a port"),
        (["--listen", "192.0.2.1:0"], "192.0.2.1: no network interface of this machine has it"),
        (["--workers", "3:2"], "workers = 3:2: give the smaller number first"),
        (["--workers", "2:9999"], "the recipe has"),
        (["--workers", "2:x"], "workers_range"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, recipe: Path, run_cli: Any, flags: list[str], reason: str) -> None:
    code, _, err = run_cli("train", recipe, "--out", tmp_path / "out", *flags)
    assert code == 2
    assert reason in err
    assert err.count("\n") == 1


def test_a_machine_brings_so_many_ranks_at_most(tmp_path: Path, run_cli: Any) -> None:
    make_token(tmp_path / "token")
    told = run_cli("join", "127.0.0.1:1", "--token-file", tmp_path / "token", "--workers", 2000)
    assert told == (2, "", "torusgd: --workers 2000: one machine may bring 1024 ranks at most\n")
