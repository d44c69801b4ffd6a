"""All-reduces on emulated hosts: every algorithm beside Gloo's own all_reduce, in turn, in one run. Needs root.

    sudo .venv/bin/python -m benchmarks allreduce allreduce --setup far --sizes 4KiB,64KiB,256KiB,1MiB,4MiB
    sudo .venv/bin/python -m benchmarks allreduce allreduce --setup far-slow --sizes 4MiB,16MiB --json far-slow.json
    sudo .venv/bin/python -m benchmarks allreduce allreduce --setup long --sizes 4MiB,16MiB,64MiB --streams 1,4,8

The set-ups are real processes and sockets on this machine with links of set latency and bandwidth
(`torusgd.rehearse.lab`). The ratio is that of the medians, plain torch.distributed.all_reduce over the algorithm.
ns/B is the processor time a byte of the rank where it is most.
`limit` is what the links allow: one latency, and 2 (H - 1) / H of the bytes through each of H hosts' links; no all-
reduce can be faster.

Needs: root, for the network lab.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option

from torusgd.comm.connection import Elapsed
from torusgd.comm.tuning.bench import bench_allreduce
from torusgd.rehearse.lab import MTU, Host, Lab

from ..hosts import USUAL_WINDOWS
from ..record import sample

SETUPS = {
    "far": [Host(latency=5e-3, rate=1e9)] * 16,
    "far-slow": [Host(latency=5e-3, rate=1e8)] * 16,
    "racks": [Host(ranks=4, latency=2e-3, rate=1e9)] * 4,
    "racks-slow": [Host(ranks=4, latency=2e-3, rate=1e8)] * 4,
    "odd": [Host(latency=2e-3, rate=1e9)] * 15,
    "one-slow": [*[Host(latency=1e-3, rate=1e9)] * 7, Host(latency=5e-3, rate=1e8)],
    "long": [Host(latency=50e-3, rate=1e9)] * 4,
}
SETTINGS = {"long": USUAL_WINDOWS}
"""of the kernel in each host, where they are not the lab's own"""


class Emulation(NamedTuple):
    """How packets travel, where that is not the lab's own way."""

    told: str
    mtu: int = MTU
    burst: int = 0
    spinning: int = 0
    """processes that compute without end beside it, and take turns with the one that carries the packets"""


EMULATIONS = {
    "plain": Emulation("packets of 60,000 bytes"),
    "frames": Emulation("packets of 9,000 bytes, so that the process that carries them bounds large messages", 9_000),
    "bucket": Emulation("packets of 9,000 bytes and a token bucket of 1 MiB, as a card's", 9_000, 1 << 20),
    "busy": Emulation("packets of 60,000 bytes, two processes that compute beside it", spinning=2),
}
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"
DESCRIBED = {
    "far": "16 hosts x 1 rank, 5 ms, 1 Gb/s",
    "far-slow": "16 hosts x 1 rank, 5 ms, 100 Mb/s",
    "racks": "4 hosts x 4 ranks, 2 ms, 1 Gb/s between",
    "racks-slow": "4 hosts x 4 ranks, 2 ms, 100 Mb/s between",
    "odd": "15 hosts x 1 rank (a grid of 3x5), 2 ms, 1 Gb/s",
    "one-slow": "7 hosts, 1 ms, 1 Gb/s, and one of 5 ms, 100 Mb/s",
    "long": "4 hosts x 1 rank, 50 ms, 1 Gb/s, the kernel's usual TCP windows",
}
ALGORITHMS = "native,auto,ring,halving-doubling,doubling,direct,torus,torus:direct,hierarchical"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


def parse_size(text: str) -> int:
    """Reads `64KiB`, `4MiB` or a number of bytes."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def show_size(size: int) -> str:
    """As `parse_size` reads it."""
    return next((f"{size // f} {u}" for u, f in reversed(UNITS.items()) if size % f == 0), f"{size} B")


def limit(hosts: list[Host], size: int) -> float:
    """Seconds that the links need for `size` bytes, whatever the algorithm."""
    slowest = min(hosts, key=lambda host: host.rate)
    return min(host.latency for host in hosts) + 2 * (len(hosts) - 1) / len(hosts) * size * 8 / slowest.rate


def table(setup: str, emulation: str, records: list[dict[str, Any]]) -> str:
    """Markdown: sizes down, each algorithm's median, spread and ratio."""
    lines = [
        f"{DESCRIBED[setup]}, {EMULATIONS[emulation].told}, n = {records[0]['n']}",
        "",
        "| size | algorithm | ran as | median ms | least - most | Gloo / it | limit ms | of it | skew ms | ns/B |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        native = next(
            r for r in records if r["algorithm"] == "native" and all(r[k] == record[k] for k in ("bytes", "streams"))
        )
        told = f", {record['streams']} streams" if record["streams"] > 1 and record["algorithm"] != "native" else ""
        median, least, most = (record[key] * 1e3 for key in ("median_s", "min_s", "max_s"))
        doubtful = Elapsed(record["median_s"], record["skew_s"], record["bound_s"]).is_doubtful
        skew = f"{1e3 * (record['skew_s'] + record['bound_s']):.2g}" + " *" * doubtful
        ratio, floor = native["median_s"] / record["median_s"], limit(SETUPS[setup], record["bytes"]) * 1e3
        lines.append(
            f"| {show_size(record['bytes'])} | {record['algorithm']} | {record['runs']}{told} | {median:.1f} "
            f"| {least:.1f} - {most:.1f} | {ratio:.2f} | {floor:.1f} | {floor / median:.0%} | {skew} "
            f"| {1e9 * record['cpu_s'] / record['bytes']:.2g} |"
        )
    return "\n".join(lines)


def be_a_rank(sizes: list[int], names: list[str], repetitions: int, streams: list[int], profile: Path | None) -> None:
    """Times on one of the lab's ranks; the first tells the records."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = [
        {**asdict(record), "streams": each}
        for each in streams
        for record in bench_allreduce(sizes, names, profile=profile, repetitions=repetitions, streams=each)
    ]
    if dist.get_rank() == 0:
        print("told:", json.dumps(records))


def main(
    setup: Annotated[str, Option(help=", ".join(SETUPS))] = "far",
    emulation: Annotated[str, Option(help=", ".join(EMULATIONS))] = "plain",
    sizes: str = "4KiB,64KiB,256KiB,1MiB,4MiB",
    algorithms: str = ALGORITHMS,
    repetitions: int = 7,
    streams: Annotated[str, Option(help="numbers of TCP connections between two ranks, one after another")] = "1",
    profile: Annotated[str | None, Option(help="of torusgd tune; without it auto probes")] = None,
    json_file: Annotated[str | None, Option("--json", help="file for the records")] = None,
    rank: Annotated[bool, Option("--rank", hidden=True)] = False,
) -> None:
    """Builds the lab and shows what its ranks tell."""
    if rank:
        sizes_given = [parse_size(size) for size in sizes.split(",")]
        profile_given = Path(profile) if profile else None
        be_a_rank(sizes_given, algorithms.split(","), repetitions, [int(n) for n in streams.split(",")], profile_given)
        return
    given = ["--sizes", sizes, "--algorithms", algorithms, "--repetitions", str(repetitions)]
    given += ["--streams", streams, *(["--profile", profile] if profile else [])]
    how = EMULATIONS[emulation]
    beside = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(how.spinning)]
    try:
        with Lab(SETUPS[setup], SETTINGS.get(setup), how.mtu, how.burst) as lab:
            output = lab.run(["-m", __name__, "--rank", *given], timeout=1800)[0]
    finally:
        for process in beside:
            process.kill()
            process.wait()
    records = json.loads(next(line for line in output.splitlines() if line.startswith("told: ")).removeprefix("told: "))
    if json_file:
        Path(json_file).write_text(json.dumps(records, indent=1) + "\n")
    for record in records:
        case = f"{setup}, {emulation}, {record['bytes']} bytes, {record['streams']} streams, {record['algorithm']}"
        sample(f"{case}, ms", [1e3 * each for each in record["samples_s"]])
        if record["algorithm"] == "auto":
            sample(f"{case}, ran as {record['runs']}", [record["n"]])
        sample(f"{case}, skew and error of clocks, ms", [1e3 * (record["skew_s"] + record["bound_s"])])
        sample(f"{case}, processor time of a rank, ns a byte", [1e9 * record["cpu_s"] / record["bytes"]])
    print(table(setup, emulation, records))


if __name__ == "__main__":
    typer.run(main)
