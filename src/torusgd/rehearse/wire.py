"""The wire of the lab: one process that makes every host's namespace and carries packets between them, late and slowly.

`lab.Lab` starts it and writes one JSON line to its standard input; it prints one line and carries packets until that
input ends, and the lab with every namespace. A further line is the number of a host whose link is cut from then on.
"""

import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from ipaddress import ip_interface
from itertools import count
from pathlib import Path

from ..signals import die_with_parent

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_DEVICE, INTERFACE = "/dev/net/tun", "tun0"


def _checked(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def unshare() -> int:
    """Moves this thread into a new, empty network namespace; returns an open file that holds it."""
    # Without a name, other than by `ip netns`: it lives as long as a process or an open file holds it, so that a lab
    # that was killed leaves nothing behind.
    _checked(_LIBC.unshare(_CLONE_NEWNET), "a new network namespace")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter(path: str) -> None:
    """Moves this thread, and the threads and processes it starts from now on, into the namespace at `path`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _checked(_LIBC.setns(handle, _CLONE_NEWNET), f"entering {path}")
    finally:
        os.close(handle)


def open_tun(address: str, prefix: int, mtu: int, burst: int, rate: float) -> int:
    """A TUN device in this namespace, up, with an address; a read gives an IP packet that leaves. The kernel lets out
    `rate` bytes a second, and after a pause up to `burst` bytes at once.
    """
    device = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    # struct ifreq: a name of 16 bytes, then the flags.
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    # tbf: the kernel counts the packets that wait for the rate against each socket, and lets it queue a few only, as
    # before a network card. Without it sockets put whole windows into the device, acknowledgements queue behind them,
    # the round trip grows to seconds, and TCP takes that for losses.
    # rto_min: on slow links acknowledgements wait for seconds behind data, and no packet is ever lost here.
    subnet = ip_interface(f"{address}/{prefix}").network
    for command in (
        f"ip address add {address}/{prefix} dev {INTERFACE}",
        f"ip link set {INTERFACE} mtu {mtu} txqueuelen 10000 up",
        "ip link set lo up",
        f"tc qdisc add dev {INTERFACE} root tbf rate {8 * rate:.0f}bit burst {burst} limit 1gb",
        f"ip route replace {subnet} dev {INTERFACE} proto kernel scope link src {address} rto_min 30s",
    ):
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")
    return device


def why_not() -> str | None:
    """The reason why this process can't make namespaces and TUN devices; None if it can."""
    if not hasattr(_LIBC, "unshare"):
        return "the network lab needs Linux"
    if os.geteuid() != 0:
        return "the network lab needs root, for network namespaces"
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return f"the network lab needs {_DEVICE}"
    for tool in ("tc", "ip"):
        if shutil.which(tool) is None:
            return f"the network lab needs {tool}, of the package iproute2"
    return None


class Wire:
    """Queues between the hosts' devices; `hosts` holds (seconds of one-way latency, bytes a second) of each."""

    def __init__(self, devices: list[int], addresses: list[str], hosts: list[tuple[float, float]]) -> None:
        self._devices = devices
        self._host = {device: host for host, device in enumerate(devices)}
        self._by_address = {bytes(map(int, address.split("."))): host for host, address in enumerate(addresses)}
        self._latency = [latency / 2 for latency, _ in hosts]
        self._seconds_a_byte = [1 / rate for _, rate in hosts]
        self._sends_until, self._receives_until = [0.0] * len(hosts), [0.0] * len(hosts)
        self._travelling: list[tuple[float, int, int, bytes, bool]] = []
        self._order = count()  # of packets that arrive at the same time, the first one sent comes first
        self._cut: set[int] = set()

    def carry(self, orders: int) -> None:
        """Carries packets until the file `orders` ends; a line in it is the number of a host to cut off."""
        # One thread, and one sleep until the next packet is due or a host sends: packets can't overtake each other.
        while True:
            now = time.monotonic()
            self._deliver(now)
            wait = self._travelling[0][0] - now if self._travelling else 1.0
            ready = select.select([orders, *self._devices], (), (), max(wait, 0.0))[0]
            for device in ready:
                if device in self._host:
                    self._take(device)
                elif lines := os.read(orders, 4096):
                    self._cut.update(int(line) for line in lines.split())
                else:
                    return

    def _take(self, device: int) -> None:
        source, now = self._host[device], time.monotonic()
        while True:
            try:
                packet = os.read(device, 65_536)
            except BlockingIOError:
                return
            # Bytes 16 to 19 of an IPv4 header are the destination; other packets (IPv6's own) have none here.
            target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is None or self._cut & {source, target}:
                continue
            # A packet leaves through the sender's link, a queue served at the host's rate: it begins when the one
            # before it has left. It travels the latency, and enters through the receiver's link. The kernel limits the
            # rate, too (`open_tun`).
            sent = max(now, self._sends_until[source]) + len(packet) * self._seconds_a_byte[source]
            self._sends_until[source] = sent
            arrives = sent + self._latency[source] + self._latency[target]
            heapq.heappush(self._travelling, (arrives, next(self._order), target, packet, False))

    def _deliver(self, now: float) -> None:
        """Writes the packets that have arrived to their hosts, once the receiver's link has taken them in."""
        while self._travelling and self._travelling[0][0] <= now:
            when, _, target, packet, received = heapq.heappop(self._travelling)
            if not received:
                # A link as fast as the sender's takes a packet in while it comes: only what is ahead of it delays it.
                end = max(when, self._receives_until[target] + len(packet) * self._seconds_a_byte[target])
                self._receives_until[target] = end
                if end > when:
                    heapq.heappush(self._travelling, (end, next(self._order), target, packet, True))
                    continue
            os.write(self._devices[target], packet)


def main() -> None:
    parent, hosts, addresses, prefix, mtu, burst, settings = json.loads(sys.stdin.readline())
    die_with_parent(parent)
    spaces, devices = [], []
    try:
        for address, (_, rate) in zip(addresses, hosts, strict=True):
            spaces.append(f"/proc/{os.getpid()}/fd/{unshare()}")
            for name, value in settings.items():
                Path("/proc/sys/net/ipv4", name).write_text(value)
            devices.append(open_tun(address, prefix, mtu, burst, rate))
    except OSError as error:  # such as of root in a container; a text in the place of the list tells the lab
        reason = str(error).removeprefix(f"[Errno {error.errno}] ")
        print(json.dumps(f"{reason}; it needs the capabilities SYS_ADMIN and NET_ADMIN"), flush=True)
        return
    print(json.dumps(spaces), flush=True)
    Wire(devices, addresses, hosts).carry(sys.stdin.fileno())


if __name__ == "__main__":
    main()
