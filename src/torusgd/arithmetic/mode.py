"""The contexts in which torch's operators run by portable rules, or are recorded as its own kernels would take them.

Rules decide an operator's bits; which operators there are is torch's: how it takes functions apart, its formulas of
gradients, and the order in which autograd adds the gradients of a tensor that is used three times. Another torch that
does so otherwise has other words of `operators_of`, from the first operator on that differs.
"""

import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import UserError
from . import layers, operations
from .methods import only_methods
from .rules import EXACT_OF_INTEGERS, MOVES, PASSING, SINGLE

_RULES = {**layers.RULES, **operations.RULES}

_checked = threading.local()
_LEAST_SHARE = 32768  # elements that torch gives to a thread at least
VERSION = 1  # of the arithmetic: a change of bits is another one


@contextmanager
def portable(methods: Sequence[str] | None = None) -> Iterator[None]:
    """Runs torch's operators inside so that their results are the same bits on any hardware.

    The construction of a network, its passes, losses and updates belong inside, in every thread that computes: the
    context is its thread's own. Products run by the first of `methods`, names of `methods.METHODS`, that is exact on
    this machine (None: all, the fastest first), which decides the time alone. UserError for an operator inside that has
    no rule, or takes floating-point numbers other than float32; at the begin if torch's threads take denormals for 0.

    >>> import torch
    >>> with portable():
    ...     _ = torch.manual_seed(1)
    ...     layer = torch.nn.Linear(2, 2)
    ...     layer(torch.ones(1, 2)).sum().backward()
    """
    with only_methods(methods):
        if is_portable():  # a second mode would look for rules of what the first one's rules do
            yield
            return
        torch.set_flush_denormal(False)
        _check_denormals()
        # Backward passes run in this thread, a GPU's too: what products go by and what is counted is a thread's own.
        with Attention(), PortableMode(), torch.autograd.set_multithreading_enabled(False):
            yield


def _check_denormals() -> None:
    """UserError if a thread that helps this one takes denormals for 0: it has that from whoever began its pool."""
    count = torch.get_num_threads()
    if count == 1 or getattr(_checked, "threads", 0) == count:
        return
    least = torch.full((count * _LEAST_SHARE,), 1, dtype=torch.int32).view(torch.float32)
    if (least * 2.0**100).amin().item() == 0:
        raise UserError(
            "portable arithmetic: torch's threads take denormals for 0, since torch.set_flush_denormal(True) was "
            "called before they began; leave that call out"
        )
    _checked.threads = count


def is_portable() -> bool:
    """Whether this thread is inside of `portable`."""
    # A look at the modes would break a compiled graph, and no compiled code is portable.
    return not torch.compiler.is_compiling() and PortableMode in map(type, _get_current_dispatch_mode_stack())


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch calls `__torch_dispatch__` through a wrapper: as slow as a small rule, and 2 s to import."""
        return False


class PortableMode(_Mode):
    """Sends each ATen operator to its rule."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # a rule's own calls need no `Attention`
            found = _RULES.get(func)
            if found is not None and not (func in EXACT_OF_INTEGERS and not args[0].is_floating_point()):
                result = found(*args, **kwargs) if kwargs else found(*args)
                return _real(func, args, result)
            result = func(*args, **kwargs) if kwargs else func(*args)
        if func in PASSING:
            return _real(func, args, result) if func in SINGLE else result
        tensors = _tensors((args, kwargs, result))
        # Integers too are other ones where another generator draws them.
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and not all(x.is_cpu for x in tensors)
        if is_draw or any(x.is_floating_point() or x.is_complex() for x in tensors):
            if is_draw:
                remedy = "draw on the CPU and move the result"
            elif torch.is_inference_mode_enabled():  # there operators come whole that have rules for their parts
                remedy = "use torch.no_grad() in place of torch.inference_mode()"
            else:
                remedy = "use another layer, or precision: float32"
            raise UserError(
                f"portable arithmetic: {func}{_place()} has no rule, so its bits would depend on the machine; {remedy}"
            )
        return result


def _real(func: Any, args: Any, result: Any) -> Any:
    """The result; UserError if it is of complex numbers, or complex."""
    for value in (args[0] if args else None, result):
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, Tensor) and first.is_complex():
            raise UserError(f"portable arithmetic: {func}{_place()} of complex numbers has no rule; take real ones")
    return result


class Attention(TorchFunctionMode):
    """Replaces attention by its parts: torch chooses among kernels of other arithmetic by device, layout and mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q k' * scale + mask) v, as torch's `scaled_dot_product_attention` has its arguments."""
    if is_causal and attn_mask is not None:  # which torch refuses too
        raise UserError("portable arithmetic: attention takes attn_mask or is_causal=True, not both; join the masks")
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    shares = torch.ops.aten._safe_softmax.default(scores, -1)  # a row that is masked as a whole gets zeros
    return F.dropout(shares, dropout_p) @ value


def _place() -> str:
    """Words for the innermost module whose method is being called, if there is one."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), nn.Module):
            return f" in {type(found).__name__}"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end, which ends the loop
    return ""


# Operators whose result has their input's values: a torch may have more or fewer of them.
_SAME = """
    _reshape_alias _unsafe_view alias clone contiguous detach expand lift_fresh permute reshape squeeze t transpose
    unsqueeze view view_as
"""
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


class _Recorder(_Mode):
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
        name, results = func._schema.name.removeprefix("aten::").removesuffix("_"), _tensors(result)
        if name in _VALUES_STAY:
            found = [self._hash(args[0])] * len(results)
        else:
            texts = (f"{name} {made_of} {place}" for place in range(len(results)))
            found = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
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


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]
