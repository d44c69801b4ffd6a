"""Machines that join a run: how both sides know each other, what they say, and the launcher's listener.

A machine's agent (`launch/node_agent.py`) makes one connection for messages and one for each connection of its ranks to
the common store, all to the listener's port. Both sides prove that they know a token before anything else is said
(challenge and response by HMAC-SHA256). What follows is neither encrypted nor signed: who can change packets on the way
can change it. Messages are JSON on one line each, bounded in size and time. The agent says how many ranks it brings
(`workers`), gets the job, says that it is `ready` and later how each of its ranks ended (`exit`); the launcher says
which ranks to `start`, which to `kill`, and that it is over (`end`). Both beat by empty messages.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from signal import SIGKILL
from typing import Any

from ..errors import UserError, as_user_error, printable
from ..signals import how_it_ended
from ..text import version_of
from ..untrusted import parse_json
from .liveness import BEAT_SECONDS, Report
from .rank import LOOPBACK

# Seconds for both sides to prove that they know the token.
HANDSHAKE_SECONDS = 10.0
# What a connection is for: messages of a machine's agent, or bytes for the ranks' common store.
NODE, STORE = "node", "store"
# Ranks that one machine may bring.
MOST_RANKS = 1 << 10
# Bytes of a line before the other side is known.
_LINE = 1024
# Bytes of a message after that.
_MESSAGE = 1 << 20
# Characters of a token.
_SHORTEST = 32
_CHUNK = 1 << 16
# Seconds after a connection that could not be taken.
_PAUSE = 1.0
# Seconds without an answer of the other side's kernel after which a connection that is passed on is closed.
_GONE = 60
# Connections at a time that have not authenticated yet.
MOST_STRANGERS = 16
# Seconds for the agents to hang up once all is over.
CLOSE_SECONDS = 2.0
# Seconds from one line about strangers to the next.
STRANGER_SECONDS = 10.0
RANKS_LOST = "its ranks were lost; the same command joins again"
# The call that lists addresses, and the bytes of each row.
_SIOCGIFCONF, _IFREQ = 0x8912, 40
_MOST_ADDRESSES = 1 << 10


class Refused(Exception):
    """The other side doesn't know the token, or is something else than torusgd."""


class ChannelClosed(Exception):
    """The other side has gone, or has said nothing for too long."""


def make_token(path: Path) -> bytes:
    """The token in a file that only its owner may read; drawn and written if there is none; UserError if not so."""
    # With these rights from its first moment on, and never into a file or a link that somebody has put there.
    what, opener = f"--token-file {path}: can't be written", partial(os.open, mode=0o600)
    with as_user_error(what), suppress(FileExistsError), open(path, "x", opener=opener) as stream:
        stream.write(secrets.token_hex(32) + "\n")
    return read_token(path)


def read_token(path: Path) -> bytes:
    """The token in a file; UserError if there is none, or if others than the owner may read it."""
    with as_user_error(f"--token-file {path}: can't be read", "it is a copy of the run's"), path.open("rb") as file:
        # Of the file that is open, since the path may name another one a moment later.
        rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        token = file.read(_LINE).strip()
    if rights & 0o077:
        raise UserError(f"--token-file {path}: others may read it (rights {rights:o}); chmod 600 {path}")
    if len(token) < _SHORTEST:
        raise UserError(f"--token-file {path}: is no token, which has {_SHORTEST} characters or more")
    return token


def prove_to_client(connection: socket.socket, token: bytes) -> str:
    """The listening side: what the connection is for. Refused, having sent a nonce alone, without the token."""
    deadline, mine = time.monotonic() + HANDSHAKE_SECONDS, secrets.token_hex(32)
    try:
        # The listener commits itself first: a proof that was recorded earlier is of another nonce. The client's own
        # nonce does the same for the listener's proof, so nothing that was overheard serves twice.
        _send(connection, {"torusgd": 1, "nonce": mine})
        answer = _receive_line(connection, deadline)
        purpose, theirs, proof = answer["purpose"], answer["nonce"], answer["proof"]
        # In constant time, so that the time of an answer says nothing of how much of a guess was right.
        if not hmac.compare_digest(proof, _proof(token, "client", purpose, mine, theirs)):
            raise Refused("a wrong token")
        if purpose not in (NODE, STORE):
            raise Refused("a connection for nothing that is known")
        _send(connection, {"proof": _proof(token, "listener", purpose, mine, theirs)})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"no handshake ({type(error).__name__})") from None
    return purpose


def prove_to_listener(connection: socket.socket, token: bytes, purpose: str) -> None:
    """The connecting side of the handshake; `Refused` if the listener doesn't know the token, or hangs up."""
    deadline, mine = time.monotonic() + HANDSHAKE_SECONDS, secrets.token_hex(32)
    try:
        # A listener that doesn't know the token gets this proof, which is of its own nonce and serves nowhere else.
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
    """JSON messages over a connection; both sides beat by empty ones, and are gone after `silent` seconds without."""

    def __init__(self, connection: socket.socket, silent: float) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        self._connection, self.silent, self._sending = connection, silent, threading.Lock()
        self._read, self._heard = b"", time.monotonic()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message, from any thread; ChannelClosed if the other side has gone."""
        try:
            with self._sending:
                _send(self._connection, message)
        except OSError as error:
            raise ChannelClosed(_why(error)) from None

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come, once `fileno` is readable; ChannelClosed if the other side sends none."""
        try:
            data = self._connection.recv(_CHUNK)
        except OSError as error:
            raise ChannelClosed(_why(error)) from None
        if not data:
            raise ChannelClosed("it closed the connection")
        self._heard = time.monotonic()
        # What follows the last line end is the beginning of a message; it waits for its rest, within bounds.
        *lines, self._read = (self._read + data).split(b"\n")
        try:
            if len(self._read) > _MESSAGE:
                raise ValueError("no end")
            yield from map(_parsed, lines)
        except ValueError:
            raise ChannelClosed("it sends no messages of torusgd") from None

    def check_silence(self) -> None:
        """ChannelClosed if nothing has come for too long."""
        if time.monotonic() - self._heard > self.silent:
            raise ChannelClosed(f"nothing was heard of it for {self.silent:g} s")

    def close(self) -> None:
        hang_up(self._connection)


def accepted(listening: socket.socket) -> Iterator[tuple[socket.socket, str]]:
    """The connections to a listening socket, each with the address of its other side, until the socket is closed."""
    while True:
        try:
            connection, (host, *_) = listening.accept()
        except OSError:
            if listening.fileno() < 0:  # closed
                return
            # One that breaks before it is taken ends nothing, and nor do too many open files.
            time.sleep(_PAUSE)
            continue
        yield connection, host


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Passes on bytes both ways until one side closes, by two threads of its own; then closes both."""
    for connection in (one, other):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A side from which the network has been cut closes nothing; the kernel finds it gone after so many seconds, by
        # probes of a silent connection and by the age of what it has sent.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE)

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
    """HOST:PORT; UserError if it is something else.

    >>> parse_address("10.0.0.1:7000", "--listen")
    ('10.0.0.1', 7000)
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UserError(f"{flag} {text}: write an address and a port, such as 10.0.0.1:7000")
    if ":" in host:
        raise UserError(f"{flag} {text}: IPv6 is not taken; write an IPv4 address and a port, such as 10.0.0.1:7000")
    try:
        host.encode("idna")  # as the socket will, which raises what is no OSError
    except UnicodeError:
        raise UserError(f"{flag} {text}: {host} is no name of a host") from None
    return host, int(port)


def _proof(token: bytes, side: str, purpose: str, listeners: str, clients: str) -> str:
    # The side is in it: else a listener could be sent its own proof back.
    text = json.dumps(["torusgd 1", side, purpose, listeners, clients])
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """One line of a side that is not known yet; OSError or ValueError if it sends something else, or too late."""
    read = b""
    while not read.endswith(b"\n"):
        # One deadline for the whole line: a byte a second must not hold a thread for ever.
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        data = connection.recv(_LINE)
        read += data
        if not data or len(read) > _LINE:
            raise ValueError("no line")
    tree = _parsed(read)
    if not all(isinstance(value, str | int) for value in tree.values()):
        raise ValueError("no message")
    return tree


def _parsed(line: bytes) -> dict[str, Any]:
    tree = parse_json(line.decode())
    if not isinstance(tree, dict):
        raise ValueError("no message")
    return tree


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "nothing gets through to it"
    return f"its connection failed: {error.strerror or error}"


class RemoteRank:
    """The process of a rank on another machine, `node`: to the supervisor one like those here."""

    def __init__(self, node: "JoinedNode", number: int) -> None:
        # The number of its start among all starts there: a later attempt uses the ranks' numbers again.
        self.node, self._number = node, number
        self.exitcode: int | None = None  # minus the signal's number if a signal ended it; None while it runs
        self.why = ""  # how it ended, for people
        # The supervisor waits for processes by what the kernel can watch, so this one has a pair of sockets.
        self._read, self._write = socket.socketpair()
        self.sentinel = self._read.fileno()  # readable once it has ended

    def kill(self) -> None:
        """Ends it; what becomes of it over there is no longer waited for."""
        self.node.kill(self._number)
        self.ended(-SIGKILL)

    def join(self) -> None:
        self._read.close()
        self._write.close()

    def ended(self, code: int) -> None:
        """Its agent reports its end, or is gone itself."""
        self.note(code)
        self.wake()

    def note(self, code: int, why: str = "") -> None:
        """Notes how it ended; the first time counts."""
        if self.exitcode is None:
            self.exitcode, self.why = code, f"on {self.node.host} {why or how_it_ended(code)}"

    def wake(self) -> None:
        with suppress(OSError):
            self._write.send(b"x")


@dataclass
class JoinedNode:
    """A machine that brings ranks; `is_ready` once it has opened its data."""

    host: str
    workers: int
    channel: Channel
    address: str = ""
    is_ready: bool = False
    gone: str = ""  # why it is no longer there; empty: it is
    attempt: int = -1  # in which its ranks were started last
    ranks: dict[int, RemoteRank] = field(default_factory=dict)  # by the number of their start
    _starts: int = 0

    def start(self, ranks: list[int], size: int, attempt: int) -> list[RemoteRank]:
        """Starts ranks there, in the attempt that began with `size` ranks."""
        self.attempt, started = attempt, []
        for rank in ranks:
            self._starts += 1
            started.append(RemoteRank(self, self._starts))
            self.ranks[self._starts] = started[-1]
            self._send(start=self._starts, rank=rank, size=size, attempt=attempt)
        if self.gone:
            self.lose(self.gone)
        return started

    def kill(self, number: int) -> None:
        self.ranks.pop(number, None)
        self._send(kill=number)

    def end(self, code: int, line: str) -> None:
        """Has its agent end, with an exit code and a line for people."""
        self._send(end=line, code=code)
        self.gone = self.gone or line

    def lose(self, why: str) -> None:
        """All its ranks count as lost."""
        self.gone = why  # before they are listed: `start` adds its ranks first, and then looks here
        ranks = [*self.ranks.values()]
        for rank in ranks:
            rank.note(-SIGKILL, f"was lost with its machine: {why}")
        for rank in ranks:  # now that all have ended: whoever wakes finds them all, and the others go on once
            rank.wake()
        self.ranks.clear()

    def _send(self, **message: Any) -> None:
        with suppress(ChannelClosed):  # whoever listens to the machine finds that out
            self.channel.send(**message)


class Listener:
    """Accepts machines that know the token, gives them the job, and connects their ranks to the common store.

    The `address` is one of this machine's with a port (0: any that is free); UserError if it can't be had. The store is
    at `port` on loopback; after `silent` seconds without a message a machine counts as lost.
    """

    def __init__(
        self, address: tuple[str, int], token: bytes, port: int, job: dict[str, Any], silent: float, report: Report
    ) -> None:
        self.interface = interface_of(address[0])  # through which ranks reach each other
        self._token, self._store_port, self._job, self._silent, self._report = token, port, job, silent, report
        self._nodes: list[JoinedNode] = []
        self._pending = threading.Semaphore(MOST_STRANGERS)
        self._reported, self._unreported = -STRANGER_SECONDS, 0
        try:
            self._socket = socket.create_server(address)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise UserError(f"--listen {address[0]}:{address[1]}: {why}; choose another port") from None
        self.address: tuple[str, int] = self._socket.getsockname()
        threading.Thread(target=self._accept, daemon=True, name="torusgd-listener").start()

    def waiting(self, attempt: int) -> JoinedNode | None:
        """A machine whose ranks have not been started in this attempt yet."""
        return next((node for node in self._nodes if node.is_ready and not node.gone and node.attempt != attempt), None)

    def close(self, code: int, line: str) -> None:
        """Ends all agents, with an exit code and a line, and listens no more."""
        hang_up(self._socket)
        for node in [*self._nodes]:
            node.end(code, line)
        until = time.monotonic() + CLOSE_SECONDS
        while self._nodes and time.monotonic() < until:  # else the kernel may drop what they have not read yet
            time.sleep(0.01)

    def _accept(self) -> None:
        for connection, host in accepted(self._socket):
            # Strangers are bounded in number: each costs a thread until its handshake fails or times out. Machines that
            # have proved themselves are not: their ranks connect again whenever the ranks change.
            is_known = any(node.address == host for node in [*self._nodes])
            if is_known or self._pending.acquire(blocking=False):
                arguments = connection, host, not is_known
                threading.Thread(target=self._receive, args=arguments, daemon=True, name="torusgd-joined").start()
            else:
                connection.close()

    def _receive(self, connection: socket.socket, host: str, is_stranger: bool) -> None:
        """One connection, from its handshake to its end or to the threads that pass it on."""
        try:
            purpose = prove_to_client(connection, self._token)
        except Refused as error:
            hang_up(connection)
            # At most a line each `STRANGER_SECONDS`, so that nobody can fill a log.
            if time.monotonic() - self._reported < STRANGER_SECONDS:
                self._unreported += 1
            else:
                others = f"; and {self._unreported} others before" if self._unreported else ""
                self._report(f"refused {host}, which wanted to join: {error}{others}")
                self._reported, self._unreported = time.monotonic(), 0
            return
        finally:
            if is_stranger:
                self._pending.release()
        if purpose == NODE:
            self._serve(Channel(connection, self._silent), host)
            return
        try:
            pass_on(connection, socket.create_connection((LOOPBACK, self._store_port)))
        except OSError:  # the run is over
            hang_up(connection)

    def _serve(self, channel: Channel, address: str) -> None:
        node: JoinedNode | None = None
        beaten = time.monotonic()
        try:
            while True:
                for message in channel.receive() if wait([channel.fileno()], BEAT_SECONDS / 2) else ():
                    if node is None:
                        node = self._greet(channel, address, message)
                    elif "ready" in message:
                        node.is_ready = True
                    elif "exit" in message and (rank := node.ranks.pop(message["exit"], None)) is not None:
                        rank.ended(int(message["code"]))
                        if not node.ranks and message["code"] == 0:
                            node.end(0, "its ranks have done their part")
                        elif not node.ranks and message["code"] < 0:  # after other ends all may start again
                            node.end(1, RANKS_LOST)
                channel.check_silence()
                # Before it has spoken, nothing may follow the handshake's last line: both would arrive together.
                if node is not None and time.monotonic() - beaten > BEAT_SECONDS:
                    beaten = time.monotonic()
                    channel.send()
        except (ChannelClosed, KeyError, TypeError, ValueError, OverflowError) as error:  # int of JSON's Infinity
            why = str(error) if isinstance(error, ChannelClosed) else "it sends no messages of torusgd"
        channel.close()
        if node is not None:
            node.lose(node.gone or why)
            self._nodes.remove(node)

    def _greet(self, channel: Channel, address: str, hello: Mapping[str, Any]) -> JoinedNode:
        """A machine says who it is and gets the job; ChannelClosed if it is not wanted."""
        host, workers, its = str(hello["host"])[:64], int(hello["workers"]), str(hello["version"])[:32]
        if its != (mine := version_of()):
            line = f"the run is trained by torusgd {mine}, this machine has {its}; install the same"
            channel.send(end=line, code=2)
            raise ChannelClosed(line)
        if not 1 <= workers <= MOST_RANKS:
            raise ValueError
        node = JoinedNode(printable(host) or address, workers, channel, address)
        self._nodes.append(node)
        channel.send(job=self._job, silent=self._silent)
        return node


def interface_of(address: str) -> str:
    """The name of the network interface that has an IPv4 address; UserError if none has."""
    names = [name for name, found in interface_addresses() if found == address]
    names += ["lo"] if address.startswith("127.") else []  # which answers to all of them
    if not names:
        remedy = "give the one through which the others reach it"
        raise UserError(f"{address}: is no IPv4 address of a network interface of this machine; {remedy}")
    return names[0]


def interface_addresses() -> list[tuple[str, str]]:
    """All IPv4 addresses of this machine, each with its interface, which may have several (netdevice(7))."""
    room = array("B", bytes(_MOST_ADDRESSES * _IFREQ))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(room), room.buffer_info()[0]))
    filled = room.tobytes()[: struct.unpack("iP", answer)[0]]
    rows = [filled[begin : begin + _IFREQ] for begin in range(0, len(filled), _IFREQ)]
    # An address that was added with a label of its own stands under that: eth0:1.
    names = [row[:16].split(b"\0")[0].decode(errors="replace").partition(":")[0] for row in rows]
    return [(name, socket.inet_ntoa(row[20:24])) for name, row in zip(names, rows, strict=True)]
