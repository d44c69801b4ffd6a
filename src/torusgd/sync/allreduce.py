"""All-reduce algorithms by name, and the one that picks among them by measurement."""

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import UserError
from .algorithms import GRIDS, SCHEDULED, Plan, plan, usual_chunks
from .engine import GlooEngine
from .native import Native
from .nccl import NcclEngine
from .profile import Profile, choose, explain, ranks_a_host
from .staged import StagedEngine
from .tune import Bench, hosts_of, measure
from .work import AllReduce, Done, Engine, Work, check_tensor

__all__ = ["ALGORITHMS", "AllReduce", "Work", "create", "native"]

ALGORITHMS = ("auto", "native", *SCHEDULED)
_PROBE_SECONDS = 10.0


class Planned:
    """Sums by the plan that `choose` gives for a number of bytes, or natively where it gives None."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        native: Native,
        choose: Callable[[int], Plan | None],
        explanation: str,
        groups: list[dist.ProcessGroup],
    ) -> None:
        self.name = name
        self.explanation = explanation
        """one line: what runs, and why"""
        self._groups = groups
        self._engine, self._native, self._choose = engine, native, lru_cache(1024)(choose)

    def start(self, tensor: torch.Tensor) -> Work:
        """See `AllReduce`."""
        check_tensor(tensor)
        if tensor.numel() == 0:
            return Done()
        how = self._choose(tensor.numel() * tensor.element_size())
        return self._native.start(tensor) if how is None else self._engine.run(tensor, how)

    def close(self) -> None:
        """See `AllReduce`."""
        self._engine.close()
        for group in self._groups:
            dist.destroy_process_group(group)


def native(group: dist.ProcessGroup | None = None) -> Native:
    """The backend's all_reduce; on one rank, or without torch.distributed, a no-op."""
    return Native(group)


def create(
    name: str = "auto",
    *,
    grid: tuple[int, int] | None = None,
    profile: Path | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: float | None = None,
) -> Planned | Native:
    """The all-reduce of that name over `group` (None: all ranks). Every rank of the group calls it.

    Args:
        name: `auto`, `native`, `ring`, `halving-doubling`, `doubling`, `direct`, `torus` or `hierarchical`; the last
            two take the methods of their axes as `torus:VERTICAL,HORIZONTAL` out of ring, halving, doubling and direct.
        grid: (vertical, horizontal), for `torus` and `hierarchical`; None: hosts times ranks a host, else the squarest.
        profile: For `auto`: a file of `torusgd tune`, read by the first rank; None, or one measured on other ranks: a
            probe of a few seconds.
        device: Where the tensors live.
        timeout: Seconds that a message may take; None: the backend's default.

    Raises:
        UserError: on every rank, where the name, the grid or the profile don't fit.
    """
    if name != "auto" and name not in ("native", *SCHEDULED) and ":" not in name:
        raise UserError(f"allreduce {name}: unknown; one of {', '.join(ALGORITHMS)}")
    if grid is not None and name.partition(":")[0] not in GRIDS:
        raise UserError(f"grid {grid[0]}x{grid[1]}: has a meaning for {' and '.join(GRIDS)}, not for {name}")
    own = Native(group)
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if name == "native" or size == 1:
        return own
    if name != "auto":
        plan(name, size, grid)
    control = _new_group(group, "gloo", timeout)
    groups, target = [control], torch.device(device)
    engine: Engine
    if target.type == "cpu":
        engine = GlooEngine(control)
    elif "nccl" not in dist.get_backend_config(group):
        engine = StagedEngine(GlooEngine(control), target)
    else:
        groups.append(_new_group(group, "nccl", timeout))
        engine = NcclEngine(groups[1], target)
    if name == "auto":
        known, source = _profile(profile, Bench(engine, own, control))
        return Planned(name, engine, own, lambda n: choose(known, n, size).plan, explain(known, source), groups)
    if grid is None and name.partition(":")[0] in GRIDS:
        grid = _natural_grid(hosts_of(control))
    why = f"allreduce {plan(name, size, grid)}: as asked for"
    return Planned(name, engine, own, lambda n: plan(name, size, grid, usual_chunks(n)), why, groups)


def _new_group(group: dist.ProcessGroup | None, backend: str, timeout: float | None) -> dist.ProcessGroup:
    """A new group of the same ranks: messages get connections of their own."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    if group is None or group == dist.group.WORLD:
        return dist.new_group(timeout=limit, backend=backend)
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=True)


def _natural_grid(hosts: tuple[int, ...]) -> tuple[int, int] | None:
    """Hosts times ranks a host, where both are more than one."""
    each = ranks_a_host(hosts)
    return (len(hosts) // each, each) if 1 < each < len(hosts) else None


def _profile(path: Path | None, bench: Bench) -> tuple[Profile, str]:
    """The profile that all ranks use, and where it comes from: a file that fits these ranks, or a probe."""
    hosts = hosts_of(bench.control)
    text = ""
    if path is not None and bench.rank == 0:
        try:
            text = Profile.load(path).model_dump_json()
        except UserError as error:
            text = f"!{error}"
    text = _from_first(text, bench.control)
    if text.startswith("!"):
        raise UserError(text[1:])
    if text:
        known = Profile.parse(text)
        if known.hosts == hosts and known.timings:
            return known, f"from {path}"
    source = "probed just now" if path is None else f"probed just now, for {path} is of other ranks"
    return measure(bench, _PROBE_SECONDS, short=True), source


def _from_first(text: str, control: dist.ProcessGroup) -> str:
    """The first rank's text, on every rank."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    length = torch.tensor([len(text.encode())])
    dist.broadcast(length, group=control, group_src=0)
    if dist.get_rank(control) != 0:
        data = torch.zeros(max(1, int(length)), dtype=torch.uint8)
    dist.broadcast(data, group=control, group_src=0)
    return bytes(data[: int(length)].tolist()).decode()
