"""Whether the ranks of anyone's data-parallel run still hold the same weights, and who does not."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import chain
from zlib import crc32

import torch
from torch import Tensor, nn

from ..comm.groups import AnyGroup, group_of
from ..errors import CorruptionError, UserError
from ..gradients.integer_hash import odd_keys, tensor_hash
from ..rng import DRIFT
from ..step.corruption import differing, named_with_host

_MOST_NAMED = 4


class Replicas:
    """Compares parameters, buffers and the optimizer's state of all ranks by a 64-bit hash of their bits.

    Every rank makes one and calls `step` once a step. A comparison reads each tensor once and sends 16 bytes a rank;
    names of tensors travel only if something differs. DistributedDataParallel overwrites every rank's buffers by those
    of rank 0 before each forward pass, and batch norm changes them in it: they differ between ranks after a step
    unless they are ignored, or batch norm is synchronised.

    Args:
        model: A module, or one in DistributedDataParallel, whose ranks hold whole copies.
        optimizer: Its state is compared too.
        every: Steps from one comparison to the next.
        ignore: Patterns (`*.running_mean`) of names that are left out: parameters and buffers have the model's names,
            state is called `momentum_buffer of fc.weight`.
        group: The ranks that hold copies; None: all ranks.

    Raises:
        UserError: The model's weights or the optimizer's state are sharded; by `check`, there is nothing to compare.

    >>> model = nn.Linear(3, 2)
    >>> replicas = Replicas(model, every=10)
    >>> replicas.step()  # nine of ten calls compare nothing
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int = 100,
        ignore: Sequence[str] = (),
        group: AnyGroup | None = None,
    ) -> None:
        if not (every >= 1 and every % 1 == 0):
            raise UserError(f"every: a whole number of at least 1 step from one comparison to the next, got {every}")
        if any(hasattr(tensor, "device_mesh") for tensor in model.parameters()) or any(
            type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
        ):
            raise UserError(
                "Replicas compares whole copies of the weights, and this model's are sharded over ranks: take it for "
                "DistributedDataParallel, or give the group of ranks that hold the same shards and a model of theirs"
            )
        if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer
            raise UserError(
                f"Replicas compares whole copies of the state, and {type(optimizer).__name__} divides it among ranks: "
                "give the model alone"
            )
        self._model, self._optimizer, self._every, self._ignore = model, optimizer, every, tuple(ignore)
        device = next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
        self._ranks = group_of(group, device)
        self._steps = 0

    def step(self) -> None:
        """Counts a step, and compares if it is time."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        """Compares now. CorruptionError, on every rank: it names ranks, hosts and tensors."""
        names, hashes = self._hashes()
        whole = (hashes * odd_keys(DRIFT, 2, len(hashes)).to(hashes.device)).sum()
        row = torch.stack([whole, torch.tensor(crc32("\n".join(names).encode()), device=whole.device)])
        rows = [gathered.tolist() for gathered in self._ranks.all_gather(row)]
        other = next((index for index, row in enumerate(rows) if row[1] != rows[0][1]), None)
        if other is not None:
            first, second = (set(self._ranks.broadcast_json(names, index)) for index in (0, other))
            who = ", ".join(
                f"{self._listed(sorted(held))} on rank {self._ranks.ranks[index]} alone"
                for index, held in ((0, first - second), (other, second - first))
                if held
            )
            raise CorruptionError(f"after {self._steps} steps ranks hold different tensors: {who}")
        if len({row[0] for row in rows}) == 1:
            return
        columns = list(zip(*(gathered.tolist() for gathered in self._ranks.all_gather(hashes)), strict=True))
        different = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
        suspects, is_clear = differing({index: row[0] for index, row in enumerate(rows)})
        who = ", ".join(named_with_host(self._ranks, index) for index in sorted(suspects)[:_MOST_NAMED])
        more = f" and {len(suspects) - _MOST_NAMED} more ranks" if len(suspects) > _MOST_NAMED else ""
        verdict = "differ" + "s" * (is_clear and len(suspects) == 1)
        verdict += " from most ranks" if is_clear else ", and no majority says who is right"
        raise CorruptionError(f"after {self._steps} steps {who}{more} {verdict}, in {self._listed(different)}")

    def _listed(self, names: Sequence[str]) -> str:
        listed = ", ".join(names[:_MOST_NAMED])
        more = f" and {len(names) - _MOST_NAMED} more tensors" if len(names) > _MOST_NAMED else ""
        if all(name.endswith(("running_mean", "running_var")) for name in names):
            more += "; DistributedDataParallel lets batch norm's differ: ignore=['*running_mean', '*running_var']"
        return listed + more

    def _hashes(self) -> tuple[list[str], Tensor]:
        """The names of all that is compared, and the hash of each: int64 [n]."""
        found = {
            name.removeprefix("module."): tensor_hash(tensor)
            for name, tensor in self._tensors()
            if not any(fnmatch(name.removeprefix("module."), pattern) for pattern in self._ignore)
        }
        if not found:
            raise UserError("Replicas: the model has no parameter and no buffer that ignore= leaves to compare")
        device = self._ranks.small_device
        return list(found), torch.stack([value.to(device) for value in found.values()])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
        for name, parameter in self._model.named_parameters():
            state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
            for key in sorted(state):
                if isinstance(state[key], Tensor):
                    yield f"{key} of {name.removeprefix('module.')}", state[key]
