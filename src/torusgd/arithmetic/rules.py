"""Which ATen operators pass as they are, and the registry of rules for others.

A rule takes its operator's arguments and gives what it gives. An operator that has no rule and isn't in `PASSING` can't
be used: its bits would depend on the machine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

aten = torch.ops.aten

Rule = Callable[..., Any]

# Values stay as they are, or are converted to another dtype.
MOVES = """
    _conj _local_scalar_dense _pin_memory _reshape_alias _to_copy _unsafe_view alias as_strided as_strided_
    bucketize cat channel_shuffle chunk clone constant_pad_nd contiguous copy copy_ detach detach_ diagonal
    diagonal_backward embedding empty empty_like empty_strided expand eye fill fill_ flip full full_like gather
    index index_fill index_fill_ index_select is_pinned lift lift_fresh lift_fresh_copy masked_fill masked_fill_
    masked_scatter masked_select narrow native_channel_shuffle new_empty new_empty_like new_empty_strided new_full
    new_ones new_zeros nonzero ones ones_like permute pixel_shuffle pixel_unshuffle record_stream reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    reshape resize_ roll rot90 scalar_tensor scatter scatter_ select select_backward select_scatter set_ slice
    slice_backward slice_scatter split split_with_sizes squeeze squeeze_ stack t t_ take tile transpose transpose_
    tril tril_ triu triu_ unbind unflatten unfold unsqueeze unsqueeze_ view view_as where zero zero_ zeros zeros_like
"""
# Of equal values the first index is given (`argmax`, `max`, `max_pool2d`). `sort` and `topk` promise no order, so they
# don't pass.
_COMPARISONS = """
    _unique2 all amax amin aminmax any argmax argmin bitwise_and bitwise_not bitwise_or clamp clamp_ clamp_max
    clamp_max_ clamp_min clamp_min_ count_nonzero eq equal fmax fmin ge gt hardtanh hardtanh_ hardtanh_backward
    heaviside is_nonzero is_same_size isfinite isin isinf isneginf isposinf isnan le logical_and logical_and_
    logical_not logical_or logical_xor lt max max_pool2d_with_indices maximum min minimum nan_to_num nan_to_num_ ne relu
    relu6 relu_ searchsorted sign signbit threshold threshold_backward
"""
_SINGLE = "abs abs_ ceil ceil_ floor floor_ frexp mul mul_ neg neg_ round round_ trunc trunc_ frac copysign sgn"
# Of torch.distributed, that move values.
_MESSAGES = """
    _allgather_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ alltoall_ alltoall_base_
    barrier broadcast_ gather_ monitored_barrier_ recv_ recv_any_source_ scatter_ send
"""


def _overloads(space: Any, names: str) -> frozenset[Any]:
    return frozenset(
        getattr(packet, overload)
        for name in names.split()
        if (packet := getattr(space, name, None)) is not None
        for overload in packet.overloads()
        # Those of `scatter` that add, and a rounding to decimals, which is a product, a rounding and a quotient.
        if "reduce" not in overload and "decimals" not in overload
    )


# By overload, as those below.
PASSING = (
    _overloads(aten, MOVES + _COMPARISONS + _SINGLE) | _overloads(torch.ops.c10d, _MESSAGES) | {aten.median.default}
)
# Operators that pass, of real numbers only: a library's product of complex ones is several operations.
SINGLE = _overloads(aten, _SINGLE)
# Operators with a rule that integers don't need.
EXACT_OF_INTEGERS = _overloads(aten, "addmm baddbmm bmm dot index_add index_add_ mm mv scatter_add scatter_add_")


class Rules(dict[Any, Rule]):
    """Rules by the overloads of their operators."""

    def of(self, *overloads: Any) -> Callable[[Rule], Rule]:
        """Makes a function the rule of overloads."""

        def register(function: Rule) -> Rule:
            self.update(dict.fromkeys(overloads, function))
            return function

        return register

    def both(self, name: str, function: Rule, *overloads: str) -> None:
        """Makes a function the rule of an operator and of its in-place form, as far as torch has them."""
        for suffix, form in (("", function), ("_", in_place(function))):
            packet = getattr(aten, name + suffix, None)
            for overload in overloads or ("default",):
                if packet is not None and overload in packet.overloads():
                    self[getattr(packet, overload)] = form


def in_place(function: Rule) -> Rule:
    """The rule that writes a function's result into its first argument."""

    def write(x: Tensor, *args: Any, **options: Any) -> Tensor:
        result = function(x, *args, **options)
        if result.is_floating_point() and not x.is_floating_point():  # which `copy_` would cut off
            raise UserError(f"portable arithmetic: a result of {result.dtype} in the place of {x.dtype}")
        return x.copy_(result)

    return write
