"""The wire of the lab: one process that makes every host's namespace and carries packets between them, late and slowly.

`lab.Lab` starts it and writes one JSON line to its standard input; it prints one line and carries packets until that
input ends, and the lab with every namespace. A further line is the number of a host whose link is cut from then on.

A packet of a host leaves through its sending link (a queue served at the host's rate), travels the latency, and enters
through the receiver's link. The kernel limits the rate, too (`netns.open_tun`).
"""

import heapq
import json
import os
import select
import sys
import time
from pathlib import Path

from . import netns as namespace


class Wire:
    """Queues between the hosts' devices; `hosts` holds (seconds of one-way latency, bytes a second) of each."""

    def __init__(self, devices: list[int], addresses: list[str], hosts: list[tuple[float, float]]) -> None:
        self._devices = devices
        self._host = {device: host for host, device in enumerate(devices)}
        self._by_address = {bytes(map(int, address.split("."))): host for host, address in enumerate(addresses)}
        self._latency = [latency / 2 for latency, _ in hosts]
        self._seconds_a_byte = [1 / rate for _, rate in hosts]
        self._sends_until = [0.0] * len(hosts)
        self._receives_until = [0.0] * len(hosts)
        self._travelling: list[tuple[float, int, int, bytes, bool]] = []
        self._order = 0
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
        """Takes the packets that a host sends."""
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
            # The link is a queue: a packet begins when the one before it has left.
            sent = max(now, self._sends_until[source]) + len(packet) * self._seconds_a_byte[source]
            self._sends_until[source] = sent
            self._push(sent + self._latency[source] + self._latency[target], target, packet, received=False)

    def _push(self, when: float, target: int, packet: bytes, received: bool) -> None:
        self._order += 1
        heapq.heappush(self._travelling, (when, self._order, target, packet, received))

    def _deliver(self, now: float) -> None:
        """Writes the packets that have arrived to their hosts, once the receiver's link has taken them in."""
        while self._travelling and self._travelling[0][0] <= now:
            when, _, target, packet, received = heapq.heappop(self._travelling)
            if not received:
                # A link as fast as the sender's takes a packet in while it comes: only what is ahead of it delays it.
                end = max(when, self._receives_until[target] + len(packet) * self._seconds_a_byte[target])
                self._receives_until[target] = end
                if end > when:
                    self._push(end, target, packet, received=True)
                    continue
            os.write(self._devices[target], packet)


def _settings(values: dict[str, str]) -> None:
    for name, value in values.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)


def main() -> None:
    """Makes the hosts listed on standard input, prints the namespaces' paths, and carries packets between them."""
    parent, hosts, addresses, prefix, mtu, settings = json.loads(sys.stdin.readline())
    namespace.die_with_parent(parent)
    spaces, devices = [], []
    for address, (_, rate) in zip(addresses, hosts, strict=True):
        spaces.append(f"/proc/{os.getpid()}/fd/{namespace.unshare()}")
        _settings(settings)
        devices.append(namespace.open_tun(address, prefix, mtu, rate))
    print(json.dumps(spaces), flush=True)
    Wire(devices, addresses, hosts).carry(sys.stdin.fileno())


if __name__ == "__main__":
    main()
