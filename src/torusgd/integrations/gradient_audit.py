"""Silent faults of processors in anyone's loop: a micro-batch's gradients, computed once more on another rank."""

import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..comm.groups import AnyGroup, group_of
from ..errors import CorruptionError, UserError
from ..gradients.integer_hash import tensor_hash
from ..rng import AUDIT, keyed_integer, keyed_uniform
from ..run.fingerprint import machine
from ..step.corruption import named_with_host


class GradientAudit:
    """Has a fraction of the steps check one micro-batch of each rank, bit for bit, on another rank.

    Where two ranks differ a third computes it too, and the one that stands alone is named. It costs two passes in a
    step that is checked (the rank's own and another's), so `fraction` 0.01 with four micro-batches a step costs 0.5 %.

    Args:
        compute: The gradients of the micro-batch that a key names, such as a position in the stream of a
            `StreamSampler`: any rank can be given any rank's key. It must be a function of key and weights alone
            (dropout seeded by the key) and leave model, buffers and `.grad` as they were; `torch.autograd.grad` does.
            None stands for a parameter without a gradient.
        fraction: Of the steps, from 0 to 1.
        seed: Decides which.
        device: Of what computes.
        group: The ranks; None: all ranks.

    Raises:
        UserError: On every rank: the ranks compute under different conditions (processor, build of torch,
            environment), so that their bits may differ without a fault.

    >>> weights = torch.ones(3, requires_grad=True)
    >>> audit = GradientAudit(lambda key: torch.autograd.grad((weights * key).sum(), [weights]), fraction=1.0)
    >>> audit.step(key=7)
    True
    """

    def __init__(
        self,
        compute: Callable[[int], Iterable[Tensor | None]],
        *,
        fraction: float = 0.01,
        seed: int = 0,
        device: torch.device | str = "cpu",
        group: AnyGroup | None = None,
    ) -> None:
        if not 0 <= fraction <= 1:
            raise UserError(f"fraction: from 0 to 1 of the steps, got {fraction}")
        self._compute, self._fraction, self._seed = compute, fraction, seed
        self._ranks = group_of(group, device)
        self._steps = 0
        self._check_conditions(torch.device(device))

    def step(self, key: int) -> bool:
        """Checks this step if it is drawn; every rank calls it before the optimizer's step.

        `key` names a micro-batch that this rank computed in the step. Returns whether the step was checked.

        Raises:
            CorruptionError: On every rank: names the rank and host that computed something else.
        """
        try:
            key = operator.index(key)  # others compute the integer that travels: of 2.5 it would be 2
        except TypeError:
            raise UserError(f"key: a whole number names a micro-batch on any rank, got {key!r}") from None
        step, size, me = self._steps, self._ranks.size, self._ranks.rank
        self._steps += 1
        if float(keyed_uniform(AUDIT, 3, self._seed, step)) >= self._fraction:
            return False
        # Everyone checks someone else, at a distance that changes from step to step; a rank alone checks itself.
        distance = 1 + int(keyed_integer(size - 1, AUDIT, 4, self._seed, step)) if size > 1 else 0
        keys = [row[0] for row in self._gathered([key])]
        rows = self._gathered([self._hash(key), self._hash(keys[(me + distance) % size])])
        for auditor in range(size):
            owner = (auditor + distance) % size
            if rows[owner][0] != rows[auditor][1]:
                self._blame(step, owner, auditor, keys[owner], rows[owner][0], rows[auditor][1])
        return True

    def _blame(self, step: int, owner: int, auditor: int, key: int, first: int, second: int) -> None:
        judge = next((rank for rank in range(self._ranks.size) if rank not in (owner, auditor)), None)
        own = self._hash(key) if self._ranks.rank == judge else 0
        verdict = 0 if judge is None else self._gathered([own])[judge][0]
        suspects = [auditor] if verdict == first else [owner] if verdict == second else sorted({owner, auditor})
        who = " or ".join(named_with_host(self._ranks, index) for index in suspects)
        raise CorruptionError(
            f"step {step}: {who} computed other gradients of micro-batch {key} than the others: its memory or "
            "processor has failed, or compute() is no function of key and weights; go on from the last checkpoint "
            "without that machine"
        )

    def _hash(self, key: int) -> int:
        found = [0 if grad is None else int(tensor_hash(grad)) for grad in self._compute(key)]
        return sum((2 * index + 1) * value for index, value in enumerate(found)) % 2**62

    def _gathered(self, row: list[int]) -> list[list[int]]:
        mine = torch.tensor(row, dtype=torch.int64, device=self._ranks.small_device)
        return [gathered.tolist() for gathered in self._ranks.all_gather(mine)]

    def _check_conditions(self, device: torch.device) -> None:
        mine = {**machine(device), "threads": torch.get_num_threads()}
        first = self._ranks.broadcast_json(mine)
        other = sorted(name for name in mine if mine[name] != first.get(name))
        differ = [row[0] for row in self._gathered([len(other)])]
        index = next((index for index, count in enumerate(differ) if count), None)
        if index is None:
            return
        what = self._ranks.broadcast_text(", ".join(other), index)
        raise UserError(
            f"ranks 0 and {self._ranks.ranks[index]} compute under different conditions ({what}), so that their bits "
            "may differ without a fault: audit among ranks of one kind, by group=..."
        )
