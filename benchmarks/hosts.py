"""What benchmarks on emulated hosts (`torusgd.rehearse.lab`) share."""

from pathlib import Path

# Windows of a kernel that nobody has tuned: on a long, fast link a connection waits for them.
USUAL_WINDOWS = {"tcp_rmem": "4096 131072 6291456", "tcp_wmem": "4096 16384 4194304"}


def interface_bytes() -> dict[str, int]:
    """The bytes that have left by each interface of this process' host: `lo` within the host, `tun0` to the others."""
    rows = (line.replace(":", " ").split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return {name: int(numbers[8]) for name, *numbers in rows}
