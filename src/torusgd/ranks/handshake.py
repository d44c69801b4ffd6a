"""Connections between the machines of a run: a token that both sides know, JSON messages, and bytes passed on.

Both sides prove that they know the token before anything else is said (challenge and response by HMAC-SHA256, with a
nonce of each side, so that nothing that was overheard serves twice). What follows is neither encrypted nor signed: who
can change packets on the way can change it. Messages are JSON on one line each, bounded in size and time.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..untrusted import parse_json

HANDSHAKE_SECONDS = 10.0
"""for both sides to prove that they know the token"""
NODE, STORE = "node", "store"
"""what a connection is for: messages of a machine's agent, or bytes for the ranks' common store"""
MOST_RANKS = 1 << 10
"""that one machine may bring"""
_LINE = 1024
"""bytes of a line before the other side is known"""
_MESSAGE = 1 << 20
"""bytes of a message after that"""
_SHORTEST = 32
"""characters of a token"""
_CHUNK = 1 << 16
_PAUSE = 1.0
"""seconds after a connection that could not be taken"""
_GONE = 60
"""seconds without an answer of the other side's kernel after which a connection that is passed on is closed"""


class Refused(Exception):
    """The other side doesn't know the token, or is something else than torusgd."""


class ChannelClosed(Exception):
    """The other side has gone, or has said nothing for too long."""


def make_token(path: Path) -> bytes:
    """The token in a file that only its owner may read; drawn and written if there is none.

    Raises:
        UserError: See `read_token`, or the file can't be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise UserError(f"--token-file {path}: can't be written: {error.strerror}") from None
    with os.fdopen(file, "w") as stream:
        stream.write(secrets.token_hex(32) + "\n")
    return read_token(path)


def read_token(path: Path) -> bytes:
    """The token in a file; UserError where there is none, or others than the owner may read it."""
    try:
        with path.open("rb") as file:
            rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(_LINE).strip()
    except OSError as error:
        raise UserError(f"--token-file {path}: can't be read: {error.strerror}; it is a copy of the run's") from None
    if rights & 0o077:
        raise UserError(f"--token-file {path}: others may read it (rights {rights:o}); chmod 600 {path}")
    if len(token) < _SHORTEST:
        raise UserError(f"--token-file {path}: is no token, which has {_SHORTEST} characters or more")
    return token


def prove_to_client(connection: socket.socket, token: bytes) -> str:
    """The listening side of the handshake.

    Returns:
        What the connection is for: NODE or STORE.

    Raises:
        Refused: The other side doesn't know the token; it has been told nothing but a nonce.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    mine = secrets.token_hex(32)
    try:
        _send(connection, {"torusgd": 1, "nonce": mine})
        told = _receive_line(connection, deadline)
        purpose, theirs, proof = told["purpose"], told["nonce"], told["proof"]
        if not hmac.compare_digest(proof, _proof(token, "client", purpose, mine, theirs)):
            raise Refused("a wrong token")
        if purpose not in (NODE, STORE):
            raise Refused("a connection for nothing that is known")
        _send(connection, {"proof": _proof(token, "listener", purpose, mine, theirs)})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"no handshake ({type(error).__name__})") from None
    return purpose


def prove_to_listener(connection: socket.socket, token: bytes, purpose: str) -> None:
    """The connecting side of the handshake; `Refused` where the listener doesn't know the token, or hangs up."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    mine = secrets.token_hex(32)
    try:
        theirs = _receive_line(connection, deadline)["nonce"]
        proof = _proof(token, "client", purpose, theirs, mine)
        _send(connection, {"purpose": purpose, "nonce": mine, "proof": proof})
        answer = _receive_line(connection, deadline)["proof"]
        is_known = hmac.compare_digest(answer, _proof(token, "listener", purpose, theirs, mine))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"it hangs up, or is no run of torusgd ({type(error).__name__})") from None
    if not is_known:
        raise Refused("it doesn't know the token itself")


class Channel:
    """JSON messages over a connection after its handshake; both sides beat by empty ones.

    Args:
        connection: Taken over.
        silent: Seconds without any message after which the other side counts as gone.
    """

    def __init__(self, connection: socket.socket, silent: float) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        self._connection, self.silent = connection, silent
        self._sending = threading.Lock()
        self._read, self._heard = b"", time.monotonic()

    def fileno(self) -> int:
        """Readable once there is something to `receive`."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message, from any thread; ChannelClosed where the other side has gone."""
        try:
            with self._sending:
                _send(self._connection, message)
        except OSError as error:
            raise ChannelClosed(_why(error)) from None

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come, once `fileno` is readable.

        Raises:
            ChannelClosed: The other side has gone, or sends what is no message.
        """
        try:
            data = self._connection.recv(_CHUNK)
        except OSError as error:
            raise ChannelClosed(_why(error)) from None
        if not data:
            raise ChannelClosed("it closed the connection")
        self._heard = time.monotonic()
        *lines, self._read = (self._read + data).split(b"\n")
        if len(self._read) > _MESSAGE:
            raise ChannelClosed("it sends no messages of torusgd")
        for line in lines:
            yield _parsed(line)

    def check_silence(self) -> None:
        """ChannelClosed where nothing has come for too long."""
        if time.monotonic() - self._heard > self.silent:
            raise ChannelClosed(f"nothing was heard of it for {self.silent:g} s")

    def close(self) -> None:
        """Hangs up, and wakes whoever waits for a message."""
        hang_up(self._connection)


def accepted(listening: socket.socket) -> Iterator[tuple[socket.socket, str]]:
    """The connections to a listening socket, each with the address of its other side, until the socket is closed.

    One that breaks before it is taken ends nothing, and nor do too many open files: what comes later is taken again.
    """
    while True:
        try:
            connection, (host, *_) = listening.accept()
        except OSError:
            if listening.fileno() < 0:  # closed
                return
            time.sleep(_PAUSE)
            continue
        yield connection, host


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Passes on bytes both ways until one side closes, by two threads of its own; then closes both.

    A side from which the network has been cut closes nothing; the kernel finds it gone after `_GONE` seconds.
    """
    for connection in (one, other):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # ends it when a machine has vanished

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                target.sendall(data)
        for connection in (source, target):
            hang_up(connection)

    for pair in ((one, other), (other, one)):
        threading.Thread(target=copy, args=pair, daemon=True, name="torusgd-pass-on").start()


def hang_up(connection: socket.socket) -> None:
    """Ends a connection, also for threads that wait in it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """HOST:PORT; UserError where it is something else.

    >>> parse_address("10.0.0.1:7000", "--listen")
    ('10.0.0.1', 7000)
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UserError(f"{flag} {text}: write an address and a port, such as 10.0.0.1:7000")
    try:
        host.encode("idna")  # as the socket will, which raises what is no OSError
    except UnicodeError:
        raise UserError(f"{flag} {text}: {host} is no name of a host") from None
    return host, int(port)


def as_text(address: tuple[str, int]) -> str:
    """What `parse_address` reads.

    >>> as_text(("10.0.0.1", 7000))
    '10.0.0.1:7000'
    """
    return f"{address[0]}:{address[1]}"


def printable(text: str) -> str:
    """What another machine sends for people, without what steers a terminal."""
    return "".join(c for c in text if c.isprintable())


def _proof(token: bytes, side: str, purpose: str, listeners: str, clients: str) -> str:
    text = json.dumps(["torusgd 1", side, purpose, listeners, clients])
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """One line of a side that is not known yet, which then waits for an answer; OSError or ValueError otherwise."""
    read = b""
    while not read.endswith(b"\n"):
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        data = connection.recv(_LINE)
        read += data
        if not data or len(read) > _LINE:
            raise ValueError("no line")
    tree = parse_json(read.decode())
    if not isinstance(tree, dict) or not all(isinstance(value, str | int) for value in tree.values()):
        raise ValueError("no message")
    return tree


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        tree = parse_json(line.decode())
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise ChannelClosed("it sends no messages of torusgd")
    return tree


def _why(error: OSError) -> str:
    return "nothing gets through to it" if isinstance(error, TimeoutError) else f"its connection failed: {error}"
