"""The handshake of machines that join: who doesn't know the token learns nothing, and what is sent has bounds."""

import json
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.messages import refused

from torusgd.ranks import join
from torusgd.ranks.join import (
    NODE,
    STORE,
    Channel,
    ChannelClosed,
    Refused,
    hang_up,
    make_token,
    parse_address,
    prove_to_client,
    prove_to_listener,
    read_token,
)

KEY = b"k" * 64


def listener() -> tuple[socket.socket, Future[str]]:
    """The other side of a handshake, and what the listening one finds, in a thread."""
    here, there = socket.socketpair()

    def listen() -> str:
        try:
            return prove_to_client(there, KEY)
        except Refused:
            hang_up(there)
            raise

    return here, ThreadPoolExecutor(1).submit(listen)


def test_both_sides_prove_that_they_know_the_token() -> None:
    for purpose in (NODE, STORE):
        here, found = listener()
        prove_to_listener(here, KEY, purpose)
        assert found.result() == purpose
    here, found = listener()
    with pytest.raises(Refused):
        prove_to_listener(here, b"x" * 64, NODE)
    assert str(found.exception()) == "a wrong token"


def test_a_listener_that_does_not_know_the_token_gets_nothing_of_a_machine() -> None:
    here, there = socket.socketpair()
    there.sendall(json.dumps({"torusgd": 1, "nonce": "0" * 64}).encode() + b"\n")
    there.sendall(json.dumps({"proof": "0" * 64}).encode() + b"\n")
    with pytest.raises(Refused):
        prove_to_listener(here, KEY, NODE)


def test_what_was_overheard_serves_no_second_time() -> None:
    link, found = listener()
    here, mine = socket.socketpair()
    client = ThreadPoolExecutor(1).submit(prove_to_listener, here, KEY, NODE)
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


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"[]\n",
        b'{"proof": 1}\n',
        b'{"purpose": [], "nonce": "", "proof": ""}\n',
        b"x" * 5000,
        b"[" * 1000 + b"\n",
    ],
)
def test_garbage_in_place_of_a_proof_is_refused(said: bytes) -> None:
    here, found = listener()
    here.sendall(said)
    assert isinstance(found.exception(240), Refused)


def test_who_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "HANDSHAKE_SECONDS", 0.2)
    _here, found = listener()
    assert isinstance(found.exception(240), Refused)


def test_a_channel_ends_with_silence_with_what_is_no_message_and_with_its_connection() -> None:
    here, there = socket.socketpair()
    channel = Channel(here, silent=-1.0)
    there.sendall(b'{"a": 1}\n{"b":')
    assert list(channel.receive()) == [{"a": 1}]
    there.sendall(b" 2}\n")
    assert list(channel.receive()) == [{"b": 2}]
    with refused("a channel: silence", kind=ChannelClosed):
        channel.check_silence()
    there.sendall(b"[]\n")
    with refused("a channel: no message", kind=ChannelClosed):
        list(channel.receive())
    there.close()
    with refused("a channel: closed", kind=ChannelClosed):
        list(channel.receive())


def test_a_token_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    drawn = make_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_token(path) == read_token(path) == drawn
    path.chmod(0o640)
    with refused("a token that others may read", f"--token-file {path}", TMP=tmp_path):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with refused("a token that is none", f"--token-file {path}", TMP=tmp_path):
        read_token(path)
    with refused("a token that is not there", f"--token-file {tmp_path / 'none'}", TMP=tmp_path):
        read_token(tmp_path / "none")


@pytest.mark.parametrize("text", ["7000", "host:", ":7000", "host:port", "host:70000"])
def test_an_address_has_a_host_and_a_port(text: str) -> None:
    with refused(f"no address: {text}", f"--listen {text}"):
        parse_address(text, "--listen")


@pytest.mark.parametrize("host", ["a..b", "127..1", "x" * 64])
def test_what_can_be_no_name_of_a_host_is_a_mistake(host: str) -> None:
    with refused("no name of a host", f"--listen {host}:7000", HOST=host):
        parse_address(f"{host}:7000", "--listen")
