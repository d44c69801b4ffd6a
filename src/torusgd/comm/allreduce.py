"""All-reduce algorithms by name, and the one that picks among them by measurement."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import UserError
from .algorithms import GRIDS, SCHEDULED, Algorithm, parse_algorithm, usual_chunks
from .base import AllReduce, Done, Work, check_tensor
from .connection import Connection, connect
from .native import NativeAllReduce
from .profile import Profile, choose, explain, ranks_a_host
from .tune import hosts_of, measure

__all__ = ["ALGORITHMS", "AllReduce", "Work", "create", "native"]

ALGORITHMS = ("auto", "native", *SCHEDULED)
_PROBE_SECONDS = 15.0


class AlgorithmAllReduce:
    """Sums by the plan that `choose` gives for a number of bytes, or natively where it gives None."""

    def __init__(
        self,
        name: str,
        connection: Connection,
        choose: Callable[[int], Algorithm | None],
        explanation: str,
        profile: Profile | None = None,
    ) -> None:
        self.name = name
        self.explanation = explanation
        """one line: what runs, and why"""
        self.profile = profile
        """what `auto` chooses by"""
        self.connection, self._choose = connection, lru_cache(1024)(choose)

    def start(self, tensor: torch.Tensor) -> Work:
        """See `AllReduce`."""
        check_tensor(tensor)
        if tensor.numel() == 0:
            return Done()
        how = self._choose(tensor.numel() * tensor.element_size())
        return self.connection.native.start(tensor) if how is None else self.connection.engine.run(tensor, how)

    def algorithm_for(self, size: int) -> Algorithm | None:
        """What runs for so many bytes; None for the backend's own all_reduce."""
        return self._choose(size)

    def close(self) -> None:
        """See `AllReduce`."""
        self.connection.close()


def native(group: dist.ProcessGroup | None = None) -> NativeAllReduce:
    """The backend's all_reduce; on one rank, or without torch.distributed, a no-op."""
    return NativeAllReduce(group)


def create(
    name: str = "auto",
    *,
    grid: tuple[int, int] | None = None,
    profile: Path | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: float | None = None,
) -> AlgorithmAllReduce | NativeAllReduce:
    """The all-reduce of that name over `group` (None: all ranks). Every rank of the group calls it.

    Args:
        name: `auto`, `native`, `ring`, `halving-doubling`, `doubling`, `direct`, `torus` or `hierarchical`; the last
            two take the methods of their axes, as `torus:halving/ring`, out of ring, halving, doubling and direct.
        grid: (vertical, horizontal), for `torus` and `hierarchical`; None: hosts times ranks a host, else the squarest.
        profile: For `auto`: a file of `torusgd tune`, read by the first rank; None, or one measured on other ranks: a
            probe of a few seconds.
        device: Where the tensors live.
        timeout: Seconds that a message may take; None: what `group` allows.

    Returns:
        An all-reduce; on one rank the no-op of `native`. Its `explanation` says in one line what runs and why.

    Raises:
        UserError: on every rank, where the name, the grid or the profile don't fit.
    """
    if grid is not None and name.partition(":")[0] not in GRIDS:
        raise UserError(f"grid {grid[0]}x{grid[1]}: has a meaning for {' and '.join(GRIDS)}, not for {name}")
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if name not in ("auto", "native"):
        parse_algorithm(name, size, grid)
    if name == "native" or size == 1:
        return NativeAllReduce(group)
    return over(connect(group, device, timeout), name, grid, profile)


def over(
    connection: Connection, name: str, grid: tuple[int, int] | None = None, profile: Path | None = None
) -> AlgorithmAllReduce:
    """What `create` makes, by any name but `native`, over a connection that several may share; any `close` ends it."""
    size = connection.size
    if name == "auto":
        known, source = _profile(profile, connection)
        return AlgorithmAllReduce(
            name, connection, lambda n: choose(known, n, size).plan, explain(known, source), known
        )
    if grid is None and name.partition(":")[0] in GRIDS:
        grid = _natural_grid(hosts_of(connection.control))
    why = f"allreduce {parse_algorithm(name, size, grid)}: as asked for"
    return AlgorithmAllReduce(name, connection, lambda n: parse_algorithm(name, size, grid, usual_chunks(n)), why)


def _natural_grid(hosts: tuple[int, ...]) -> tuple[int, int] | None:
    """Hosts times ranks a host, where both are more than one."""
    each = ranks_a_host(hosts)
    return (len(hosts) // each, each) if 1 < each < len(hosts) else None


def _profile(path: Path | None, connection: Connection) -> tuple[Profile, str]:
    """The profile that all ranks use, and where it comes from: a file that fits these ranks, or a probe."""
    text = ""
    if path is not None and connection.rank == 0:
        try:
            text = Profile.load(path).model_dump_json()
        except UserError as error:
            text = f"!{error}"
    text = _from_first(text, connection)
    if text.startswith("!"):
        raise UserError(text[1:])
    if text:
        known = Profile.parse(text)
        if known.hosts == hosts_of(connection.control) and known.timings:
            return known, f"from {path}"
    source = "probed just now" if path is None else f"probed just now, for {path} is of other ranks"
    return measure(connection, _PROBE_SECONDS, short=True), source


def _from_first(text: str, connection: Connection) -> str:
    """The first rank's text, on every rank."""
    encoded = text.encode()
    length = torch.tensor([len(encoded)])
    dist.broadcast(length, group=connection.control, group_src=0)
    data = torch.zeros(int(length), dtype=torch.uint8)
    if connection.rank == 0:
        data.copy_(torch.tensor(list(encoded), dtype=torch.uint8))
    dist.broadcast(data, group=connection.control, group_src=0)
    return bytes(data.tolist()).decode()
