"""All-reduces on emulated hosts: every algorithm beside Gloo's own all_reduce, in turn, in one run. Needs root.

    sudo .venv/bin/python benchmarks/allreduce.py --setup far --sizes 4KiB,64KiB,256KiB,1MiB,4MiB
    sudo .venv/bin/python benchmarks/allreduce.py --setup far-slow --sizes 4MiB,16MiB --json far-slow.json
    sudo .venv/bin/python benchmarks/allreduce.py --setup long --sizes 4MiB,16MiB,64MiB --streams 1,4,8

The set-ups are real processes and sockets on this machine with links of set latency and bandwidth
(`torusgd.rehearse.lab`). The ratio is that of the medians, plain torch.distributed.all_reduce over the algorithm.
`limit` is what the links allow: one latency, and 2 (H - 1) / H of the bytes through each of H hosts' links; no all-
reduce can be faster.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from torusgd.comm.tuning.bench import bench_allreduce
from torusgd.rehearse.lab import MTU, USUAL_WINDOWS, Host, Lab

SETUPS = {
    "far": [Host(latency=5e-3, rate=1e9)] * 16,
    "far-slow": [Host(latency=5e-3, rate=1e8)] * 16,
    "racks": [Host(ranks=4, latency=2e-3, rate=1e9)] * 4,
    "racks-slow": [Host(ranks=4, latency=2e-3, rate=1e8)] * 4,
    "odd": [Host(latency=2e-3, rate=1e9)] * 15,
    "one-slow": [*[Host(latency=1e-3, rate=1e9)] * 7, Host(latency=5e-3, rate=1e8)],
    "long": [Host(latency=50e-3, rate=1e9)] * 4,
    "busy": [Host(latency=5e-3, rate=1e9)] * 16,
}
SETTINGS = {"long": USUAL_WINDOWS}
"""of the kernel in each host, where they are not the lab's own"""
MTUS = {"busy": 9_000}
"""bytes of a packet, likewise: the process that carries them is then what bounds large messages"""
DESCRIBED = {
    "far": "16 hosts x 1 rank, 5 ms, 1 Gb/s",
    "far-slow": "16 hosts x 1 rank, 5 ms, 100 Mb/s",
    "racks": "4 hosts x 4 ranks, 2 ms, 1 Gb/s between",
    "racks-slow": "4 hosts x 4 ranks, 2 ms, 100 Mb/s between",
    "odd": "15 hosts x 1 rank (a grid of 3x5), 2 ms, 1 Gb/s",
    "one-slow": "7 hosts, 1 ms, 1 Gb/s, and one of 5 ms, 100 Mb/s",
    "long": "4 hosts x 1 rank, 50 ms, 1 Gb/s, the kernel's usual TCP windows",
    "busy": "16 hosts x 1 rank, 5 ms, 1 Gb/s, packets of 9,000 bytes",
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


def table(setup: str, records: list[dict[str, Any]]) -> str:
    """Markdown: sizes down, each algorithm's median, spread and ratio."""
    lines = [
        f"{DESCRIBED[setup]}, n = {records[0]['n']}",
        "",
        "| size | algorithm | ran as | median ms | least - most | Gloo / it | limit ms | of the limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        native = next(
            r for r in records if r["algorithm"] == "native" and all(r[k] == record[k] for k in ("bytes", "streams"))
        )
        told = f", {record['streams']} streams" if record["streams"] > 1 and record["algorithm"] != "native" else ""
        median, least, most = (record[key] * 1e3 for key in ("median_s", "min_s", "max_s"))
        ratio, floor = native["median_s"] / record["median_s"], limit(SETUPS[setup], record["bytes"]) * 1e3
        lines.append(
            f"| {show_size(record['bytes'])} | {record['algorithm']} | {record['runs']}{told} | {median:.1f} "
            f"| {least:.1f} - {most:.1f} | {ratio:.2f} | {floor:.1f} | {floor / median:.0%} |"
        )
    return "\n".join(lines)


def be_a_rank(options: argparse.Namespace) -> None:
    """Times on one of the lab's ranks; the first tells the records."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    profile = Path(options.profile) if options.profile else None
    names = options.algorithms.split(",")
    records = [
        {**record.as_dict(), "streams": streams}
        for streams in map(int, options.streams.split(","))
        for record in bench_allreduce(sizes, names, profile=profile, repetitions=options.repetitions, streams=streams)
    ]
    if dist.get_rank() == 0:
        print("told:", json.dumps(records))


def main() -> None:
    """Builds the lab and shows what its ranks tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", choices=SETUPS, default="far")
    parser.add_argument("--sizes", default="4KiB,64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--algorithms", default=ALGORITHMS)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--streams", default="1", help="numbers of TCP connections between two ranks, one after another"
    )
    parser.add_argument("--profile", help="of torusgd tune; without it auto probes")
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_a_rank(options)
        return
    given = ["--sizes", options.sizes, "--algorithms", options.algorithms, "--repetitions", str(options.repetitions)]
    given += ["--streams", options.streams, *(["--profile", options.profile] if options.profile else [])]
    with Lab(SETUPS[options.setup], SETTINGS.get(options.setup), MTUS.get(options.setup, MTU)) as lab:
        output = lab.run([__file__, "--rank", *given], timeout=1800)[0]
    records = json.loads(next(line for line in output.splitlines() if line.startswith("told: ")).removeprefix("told: "))
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")
    print(table(options.setup, records))


if __name__ == "__main__":
    main()
