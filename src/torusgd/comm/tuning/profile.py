"""A measured network, and what follows from it: which algorithm runs at which size, and how large buckets should be."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import UserError
from ...text import byte_size, plural
from ...untrusted import read_text
from ..algorithms import Algorithm, parse_algorithm, usual_chunks
from ..connection import Elapsed
from .cost import AlphaBeta, Topology, seconds

Seconds = Annotated[float, Field(ge=0, le=1e6)]
Bytes = Annotated[int, Field(ge=1, le=1 << 50)]
Count = Annotated[int, Field(ge=1, le=1 << 16)]
Backend = Literal["nccl", "gloo"]
# fraction of the time of the backend's own, which an algorithm replaces if it takes at most that
_MARGIN = 0.97
# The same beyond twice the largest size that was timed: many flows that meet in a link cost more than the formulas
# say (16 hosts at 100 Mb/s, timed to 4 MiB: direct exchanges of 16 MiB took a tenth more).
_FAR_MARGIN = 0.9
# fraction of a timing that is noise: within it rivals are level, and the formulas decide between them
_NOISE = 0.04


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Link(_Part):
    """One kind of link: seconds a round and a byte, each with its standard error."""

    latency: Seconds
    latency_error: Seconds
    per_byte: Seconds
    per_byte_error: Seconds

    def __str__(self) -> str:
        rate = 8e-9 / self.per_byte if self.per_byte else float("inf")
        return f"{self.latency * 1e3:.2f} ms and {rate:.2f} Gb/s"


class Timing(_Part):
    """One algorithm at one size: median seconds of an all-reduce."""

    size: Bytes
    algorithm: str
    grid: tuple[Count, Count] | None
    chunks: Count
    median: Annotated[Seconds, Field(gt=0)]
    skew: Seconds = 0.0  # median of the seconds by which the first rank began before the last one
    bound: Seconds = 0.0  # seconds by which clocks of several machines may have changed a time

    @classmethod
    def of(cls, size: int, plan: Algorithm | None, taken: Elapsed) -> "Timing":
        name, grid, chunks = ("native", None, 1) if plan is None else (plan.name, plan.grid, plan.chunks)
        times = {"median": taken.seconds, "skew": taken.skew, "bound": taken.bound}
        return cls(size=size, algorithm=name, grid=grid, chunks=chunks, **times)

    @property
    def elapsed(self) -> Elapsed:
        return Elapsed(self.median, self.skew, self.bound)

    def as_algorithm(self, ranks: int) -> Algorithm | None:
        return None if self.algorithm == "native" else parse_algorithm(self.algorithm, ranks, self.grid, self.chunks)


class Crowd(_Part):
    """So many ranks compute at once: each takes `slowdown` times as long as alone."""

    ranks: Annotated[int, Field(ge=2)]
    slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)]


class InStep(_Part):
    """What an all-reduce of `size` bytes adds to the computation of a step."""

    size: Bytes
    hidden: Seconds  # seconds by which it slows the computation, if it travels meanwhile
    waited: Seconds  # seconds if it leaves when the computation ends


class Profile(_Part):
    """The result of `tune`: `hosts` holds the host of each rank, `inside` and `between` the links within and across."""

    version: Literal[2] = 2  # 1 had times from a barrier on, whose skew was counted into them
    backend: Backend
    hosts: Annotated[tuple[int, ...], Field(min_length=1, max_length=1 << 16)]
    streams: Count = 1
    message: Seconds  # seconds of work that each message costs a rank, beyond its round
    inside: Link | None
    between: Link | None
    timings: tuple[Timing, ...]  # times of the algorithms tried, native among them at every size
    crowding: tuple[Crowd, ...] = ()  # slowdowns by growing numbers of ranks; empty: not measured
    in_steps: tuple[InStep, ...] = ()  # costs within steps by growing sizes; empty: not measured

    @property
    def topology(self) -> Topology:
        """The network as `cost` takes it; of unequal hosts every message is priced as if it left the fullest."""
        links = [AlphaBeta(link.latency, link.per_byte) for link in (self.inside, self.between) if link is not None]
        inside, between = (links[0], links[-1]) if links else (AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 0.0))
        each = ranks_a_host(self.hosts)
        if each == 1:
            between = between._replace(beta=max(Counter(self.hosts).values()) * between.beta)
        return Topology(each, inside, between, self.message, (between if len(set(self.hosts)) > 1 else inside).alpha)

    def dump(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Reads a file that holds the text of `dump`; UserError if it is damaged."""
        try:
            return cls.parse(read_text(path))
        except OSError as error:
            raise UserError(f"profile {path}: {error.strerror}; make one with torusgd tune --out {path}") from None
        except ValueError as error:
            raise UserError(f"profile {path}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> "Profile":
        try:
            profile = cls.model_validate_json(text)
            rivals = {timing.size for timing in profile.timings if timing.as_algorithm(len(profile.hosts)) is not None}
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "no profile"
            raise UserError(f"{key}: {first['msg']}; make it anew with torusgd tune") from None
        if rivals != {timing.size for timing in profile.timings if timing.algorithm == "native"}:
            raise UserError("timings: each size needs native and another; make it anew with torusgd tune")
        hosts = len(set(profile.hosts))
        for name, link, is_used in (
            ("between", profile.between, hosts > 1), ("inside", profile.inside, hosts < len(profile.hosts)),
        ):  # fmt: skip
            if is_used and link is None:
                raise UserError(f"{name}: is missing, and ranks have such a link; make it anew with torusgd tune")
        return profile


def expect(profile: Profile, size: int) -> tuple[Algorithm | None, float, float]:
    """The algorithm for `size` bytes on the profile's own ranks (None: native), its expected seconds, and native's."""
    ranks, topology = len(profile.hosts), profile.topology
    sizes = {timing.size for timing in profile.timings}
    # Each timing at the nearest size, by ratio, is carried over to this one by the difference of the formula. Native
    # gets the least that any algorithm needs, the transfer of 2 (P - 1) / P of the bytes: if in doubt, it is preferred.
    nearest = min(sizes, key=lambda known: max(known / max(size, 1), size / known))
    per_byte = min(link.per_byte for link in (profile.inside, profile.between) if link is not None)
    native = 0.0
    rivals: list[tuple[Algorithm, float, float]] = []
    for timing in profile.timings:
        if timing.size == nearest and (timed := timing.as_algorithm(ranks)) is not None:
            change = seconds(timed, size, topology) - seconds(timed, nearest, topology)
            if size > 2 * nearest and profile.backend == "gloo":  # chunks overlap nothing over NCCL
                timed = replace(timed, chunks=max(timed.chunks, usual_chunks(size)))
            rivals.append((timed, max(0.0, timing.median + change), _NOISE * timing.median))
        elif timing.size == nearest:
            native = max(0.0, timing.median + 2 * (ranks - 1) / ranks * per_byte * (size - nearest))
    _, quickest, noise = min(rivals, key=lambda rival: rival[1])
    # Between rivals that differ by noise only the formulas decide, so that neighbouring sizes get one algorithm.
    level = [rival for rival in rivals if rival[1] <= quickest + noise]
    chosen, least, _ = min(level, key=lambda rival: seconds(rival[0], size, topology))
    margin = _MARGIN if size <= 2 * max(sizes) else _FAR_MARGIN
    return (chosen, least, native) if least <= margin * native else (None, native, native)


def hidden(profile: Profile, size: float) -> float:
    """Seconds by which an all-reduce of `size` bytes slows the computation beside it; 0 if that is not measured."""
    steps = profile.in_steps
    # Beyond the largest size it grows as the all-reduce's own time does, of which it is a part. What is above that,
    # where messages interrupt ranks that share cores, is for each message, and not for each byte.
    if steps and size > steps[-1].size and profile.timings:
        known = expect(profile, steps[-1].size)[1]
        part = min(1.0, steps[-1].hidden / known) if known else 1.0  # far below the timed sizes it may become 0
        return steps[-1].hidden + part * (expect(profile, round(size))[1] - known)
    return float(np.interp(size, [step.size for step in steps], [step.hidden for step in steps])) if steps else 0.0


def waited(profile: Profile, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes after a computation; if that is not measured, of one alone."""
    steps = profile.in_steps
    if not steps:
        return expect(profile, round(size))[1]
    # Beyond the largest size it grows by as much as the all-reduce's own time.
    if size > steps[-1].size and profile.timings:
        return steps[-1].waited + max(0.0, expect(profile, round(size))[1] - expect(profile, steps[-1].size)[1])
    return float(np.interp(size, [step.size for step in steps], [step.waited for step in steps]))


def ranks_a_host(hosts: Sequence[int]) -> int:
    """How many neighbouring ranks share a host, if all hosts have as many; else 1."""
    runs = [len(list(neighbours)) for _, neighbours in groupby(hosts)]
    return runs[0] if len(set(runs)) == 1 else 1


def explain(profile: Profile, source: str) -> str:
    """One line: the network, and the algorithm for each size."""
    ranks, hosts = len(profile.hosts), len(set(profile.hosts))
    named = ((profile.between, "between"), (profile.inside, "inside"))
    links = "; ".join(f"{link} {where} hosts" for link, where in named if link)
    by_size = groupby([1 << power for power in range(12, 27)], lambda size: str(expect(profile, size)[0] or "native"))
    *ends, last = [(name, max(sizes)) for name, sizes in by_size]
    parts = ", ".join([*(f"{name} to {byte_size(size)}" for name, size in ends), f"{last[0]} above"])
    doubtful = [timing for timing in profile.timings if timing.elapsed.is_doubtful]
    if doubtful:
        apart = 1e3 * max(timing.skew + timing.bound for timing in doubtful)
        source += f"; {len(doubtful)} of {len(profile.timings)} timings doubtful, begun up to {apart:.2g} ms apart"
    return f"allreduce auto: {ranks} ranks on {plural(hosts, 'host')}; {links}; {parts} ({source})"
