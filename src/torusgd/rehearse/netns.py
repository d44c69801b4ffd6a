"""Linux network namespaces and TUN devices by system calls, as `ip netns` makes them, but without names to clean up.

A namespace here has no name: it lives as long as a process or an open file holds it, so that a lab that was killed
leaves nothing behind.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
from ipaddress import ip_interface

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI, _IFF_UP = 0x1, 0x1000, 0x1
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_DEVICE = "/dev/net/tun"
INTERFACE = "tun0"


def _checked(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def unshare() -> int:
    """Moves this thread into a new, empty network namespace; returns an open file that holds it."""
    _checked(_LIBC.unshare(_CLONE_NEWNET), "a new network namespace")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter(path: str) -> None:
    """Moves this thread, and the threads and processes it starts from now on, into the namespace at `path`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _checked(_LIBC.setns(handle, _CLONE_NEWNET), f"entering {path}")
    finally:
        os.close(handle)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it (of process `parent`) ends."""
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def open_tun(address: str, prefix: int, mtu: int, rate: float) -> int:
    """A TUN device in this namespace, up, with an address; a read of its file returns an IP packet that leaves.

    The kernel lets out `rate` bytes a second.
    """
    device = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    # struct ifreq: a name of 16 bytes, then the flags.
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    mask = socket.inet_ntoa(struct.pack(">I", (0xFFFFFFFF << (32 - prefix)) & 0xFFFFFFFF))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, mask)):
            inet = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(control, request, struct.pack("16s16s8x", INTERFACE.encode(), inet))
        for request, number in ((_SIOCSIFMTU, mtu), (_SIOCSIFTXQLEN, 10_000)):
            fcntl.ioctl(control, request, struct.pack("16si20x", INTERFACE.encode(), number))
        for name in (INTERFACE, "lo"):
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), _IFF_UP))
    # tbf: the kernel counts the packets that wait for the rate against each socket, and lets it queue a few only, as
    # before a network card. Without it sockets put whole windows into the device, acknowledgements queue behind them,
    # the round trip grows to seconds, and TCP takes that for losses.
    # rto_min: on slow links acknowledgements wait for seconds behind data, and no packet is ever lost here.
    subnet = ip_interface(f"{address}/{prefix}").network
    for command in (
        f"tc qdisc add dev {INTERFACE} root tbf rate {8 * rate:.0f}bit burst {mtu + 4096} limit 1gb",
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
