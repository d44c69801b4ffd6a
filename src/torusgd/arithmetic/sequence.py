"""The operators of a network's passes, each with a hash of the values that it works on.

Rules decide an operator's bits; which operators there are is torch's: how it takes functions apart, its formulas of
gradients, and the order in which autograd adds the gradients of a tensor that is used three times. Another torch that
does so otherwise has other words here, from the first operator on that differs.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from .mode import Attention
from .rules import MOVES

_SAME = """
    _reshape_alias _unsafe_view alias clone contiguous detach expand lift_fresh permute reshape squeeze t transpose
    unsqueeze view view_as
"""
"""whose result has their input's values: a torch may have more or fewer of them"""
_VALUES_STAY, _WITHOUT_WORD = frozenset(_SAME.split()), frozenset(MOVES.split())


def operators_of(passes: Callable[[], object]) -> tuple[str, ...]:
    """The floating-point operators that a function calls, by torch's own kernels, as NAME.HASH in their order.

    A hash is of the name, of numbers beside tensors and of the hashes of what made its tensors, be it a mere move.

    >>> import torch
    >>> x = torch.ones(2)
    >>> [word.split(".")[0] for word in operators_of(lambda: (x.view(1, 2) * 3 + 1).sum())]
    ['mul', 'add', 'sum']
    """
    with _disable_current_modes(), Attention(), _Recorder() as recorder:
        passes()
    return tuple(recorder.words)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        # Without a reference: autograd adds in place, or copies, by how many there are.
        self._hashes = WeakTensorKeyDictionary()
        self._inputs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = kwargs or {}
        beside = {key: value for key, value in known.items() if isinstance(value, Tensor | float | int)}
        made_of = repr([self._described(each) for each in (*args, beside)])
        result = func(*args, **known)
        # In place or not, by how many references autograd sees.
        name, results = func._schema.name.removeprefix("aten::").removesuffix("_"), list(_tensors(result))
        if name in _VALUES_STAY:
            found = [self._hash(args[0])] * len(results)
        else:
            found = [_digest(f"{name} {made_of} {place}") for place in range(len(results))]
            if name not in _WITHOUT_WORD and any(x.is_floating_point() for x in (*results, *_tensors(args))):
                self.words.append(".".join([name, *found[:1]]))
        self._hashes.update(zip(results, found, strict=True))
        return result

    def _hash(self, tensor: Tensor) -> str:
        """Of a tensor that no operator has made: its number among those, in the order in which they are used."""
        if tensor not in self._hashes:
            self._hashes[tensor] = f"input {self._inputs}"
            self._inputs += 1
        return str(self._hashes[tensor])

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._hash(value)
        if isinstance(value, dict):
            return {key: self._described(value[key]) for key in sorted(value)}
        return [self._described(each) for each in value] if isinstance(value, list | tuple) else str(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
