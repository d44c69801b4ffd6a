"""What reaches a run's port, or a machine that joins, and has no token: it learns nothing; flags that are wrong."""

import errno
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.launch.driven import job_of
from tests.messages import refuses
from tests.polling import until

from torusgd.errors import RunError, UserError
from torusgd.launch import node_agent
from torusgd.launch.node_agent import join_run
from torusgd.ranks import join
from torusgd.ranks.join import NODE, STORE, Channel, ChannelClosed, Listener, Refused

KEY = b"k" * 64


def listener() -> tuple[socket.socket, Future[str]]:
    """The other side of a handshake, and what the listening one finds, in a thread."""
    here, there = socket.socketpair()

    def listen() -> str:
        try:
            return join.prove_to_client(there, KEY)
        except Refused:
            join.hang_up(there)
            raise

    return here, ThreadPoolExecutor(1).submit(listen)


def test_both_sides_prove_that_they_know_the_token_and_who_does_not_gets_nothing() -> None:
    for purpose in (NODE, STORE):
        here, found = listener()
        join.prove_to_listener(here, KEY, purpose)
        assert found.result() == purpose
    here, found = listener()
    with pytest.raises(Refused):
        join.prove_to_listener(here, b"x" * 64, NODE)
    assert str(found.exception()) == "a wrong token"
    here, there = socket.socketpair()
    for message in ({"torusgd": 1, "nonce": "0" * 64}, {"proof": "0" * 64}):
        there.sendall(json.dumps(message).encode() + b"\n")
    with pytest.raises(Refused):
        join.prove_to_listener(here, KEY, NODE)


def test_what_was_overheard_serves_no_second_time() -> None:
    link, found = listener()
    here, mine = socket.socketpair()
    client = ThreadPoolExecutor(1).submit(join.prove_to_listener, here, KEY, NODE)
    mine.sendall(link.recv(4096))
    heard = mine.recv(4096)
    link.sendall(heard)
    mine.sendall(link.recv(4096))
    client.result(240)
    assert found.result() == NODE
    again, found = listener()
    again.recv(4096)
    again.sendall(heard)
    assert again.recv(4096) == b""
    assert str(found.exception()) == "a wrong token"


WRONG_TYPE = b'{"purpose": [], "nonce": "", "proof": ""}\n'


@pytest.mark.parametrize("said", [b"", b"\n", b"[]\n", b'{"proof": 1}\n', WRONG_TYPE, b"x" * 5000, b"[" * 1000 + b"\n"])
def test_garbage_in_place_of_a_proof_is_refused(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if not said:
        monkeypatch.setattr(join, "HANDSHAKE_SECONDS", 0.2)
    here, found = listener()
    here.sendall(said)
    assert isinstance(found.exception(240), Refused)


def test_a_channel_ends_with_silence_with_what_is_no_message_and_with_its_connection() -> None:
    here, there = socket.socketpair()
    channel = Channel(here, silent=-1.0)
    there.sendall(b'{"a": 1}\n{"b":')
    assert list(channel.receive()) == [{"a": 1}]
    there.sendall(b" 2}\n")
    assert list(channel.receive()) == [{"b": 2}]
    refuses("a channel: silence", channel.check_silence, kind=ChannelClosed)
    there.sendall(b"[]\n")
    refuses("a channel: no message", list, channel.receive(), kind=ChannelClosed)
    there.close()
    refuses("a channel: closed", list, channel.receive(), kind=ChannelClosed)


def test_a_token_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    drawn = join.make_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert join.make_token(path) == join.read_token(path) == drawn
    path.chmod(0o640)
    refuses("a token that others may read", join.read_token, path, about=f"--token-file {path}", TMP=tmp_path)
    path.chmod(0o600)
    path.write_text("short")
    refuses("a token that is none", join.read_token, path, about=f"--token-file {path}", TMP=tmp_path)
    refuses("a token that is not there", join.read_token, tmp_path / "none", about="--token-file", TMP=tmp_path)


def test_an_address_has_a_host_and_a_port() -> None:
    for text in ("7000", "host:", ":7000", "host:port", "host:70000", "[fd00::1]:7000"):
        refuses(f"no address: {text}", join.parse_address, text, "--listen", about=f"--listen {text}")
    for host in ("a..b", "127..1", "x" * 64):
        refuses("no name of a host", join.parse_address, f"{host}:7000", "--listen", about="--listen", HOST=host)


@pytest.fixture
def port() -> Iterator[Listener]:
    listener = Listener(("127.0.0.1", 0), KEY, 1, {}, 30.0, print)
    yield listener
    listener.close(0, "")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.address)


def test_strangers_are_told_now_and_then_and_few_are_heard(port: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    strangers = [socket.create_connection(port.address) for _ in range(join.MOST_STRANGERS)]
    assert all(stranger.recv(4096) for stranger in strangers)
    assert socket.create_connection(port.address).recv(4096) == b""
    for stranger in strangers:
        stranger.sendall(b"garbage\n")
        assert stranger.recv(4096) == b""
    assert until(lambda: capsys.readouterr().out, "a line").count("\n") == 1


def test_a_listener_outlives_a_connection_that_cannot_be_taken(port: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, calls = socket.socket.accept, itertools.count()

    def fails_once(own: socket.socket) -> Any:
        if next(calls) == 0:
            raise OSError(errno.EMFILE, "too many open files")
        return accept(own)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    for _ in range(2):
        with socket.create_connection(port.address, 30) as stranger:
            assert stranger.recv(4096)
    assert next(calls) > 1


def test_a_message_that_holds_no_number_ends_its_machine_alone(port: Listener) -> None:
    with socket.create_connection(port.address, 30) as link:
        join.prove_to_listener(link, KEY, NODE)
        link.sendall(b'{"host": "here", "workers": Infinity, "version": "1"}\n')
        assert link.recv(4096) == b""


GARBAGE = "a first machine that sends garbage"
FIRST: list[Any] = [{"silent": "long", "job": {}}, {"job": {}}, {"end": "over"}, {"end": "over", "code": 1e400}]
START = {"start": 1, "rank": -1, "size": 1, "attempt": 0}
LATER: list[Any] = [{"start": 1}, START, {"kill": [2]}, {"end": "over", "code": -3}]


@pytest.mark.parametrize(("name", "kind", "messages"), [
    ("a job that is none", UserError, [{"silent": 5.0, "job": 7}]),
    ("a job without a recipe", UserError, [{"silent": 5.0, "job": {"device": "tpu"}}]),
    *((GARBAGE, RunError, [tree]) for tree in FIRST),
    *((GARBAGE, RunError, [None, tree]) for tree in LATER),
])  # fmt: skip
def test_odd_messages_of_the_first_machine_are_one_line(tmp_path, recipe, monkeypatch, name, kind, messages) -> None:
    """None: the job as it should be."""
    job = job_of(tmp_path / "out", recipe)
    monkeypatch.setattr(node_agent, "warn", lambda line: None)

    def be_root() -> None:
        with server.accept()[0] as link:
            join.prove_to_client(link, KEY)
            link.recv(4096)  # what the machine brings
            for message in messages:
                link.sendall(json.dumps(message or {"silent": 5.0, "job": job.as_dict()}).encode() + b"\n")
            while link.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=be_root, daemon=True).start()
        host, port = server.getsockname()
        refuses(name, join_run, (host, port), KEY, None, 1, kind=kind, PORT=port)


def test_ranks_can_be_reached_at_an_address_of_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join.interface_of("127.0.0.1") == "lo"
    assert ("lo", "127.0.0.1") in join.interface_addresses()
    monkeypatch.setattr("torusgd.ranks.join.interface_addresses", lambda: [("eth0", "10.0.0.1"), ("eth0", "10.0.0.2")])
    assert join.interface_of("10.0.0.2") == "eth0"
    refuses("an address of another machine", join.interface_of, "0.0.0.0", about="0.0.0.0")


def test_mistakes_are_one_line(tmp_path: Path, recipe: Path, mistake: Any) -> None:
    for flags in ("--listen 7000", "--listen 192.0.2.1:0", "--workers 3:2", "--workers 2:9999", "--workers 2:x"):
        mistake("train", recipe, "--out", tmp_path / "out", *flags.split(), RECIPE=recipe, TMP=tmp_path)
    join.make_token(tmp_path / "token")
    mistake("join", "127.0.0.1:1", "--token-file", tmp_path / "token", "--workers", 2000, TMP=tmp_path)
