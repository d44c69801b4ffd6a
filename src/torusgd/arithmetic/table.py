"""ATen operators that pass as they are: what moves values, compares them, or rounds the result of one operation once."""

import torch

_MOVES = """
    _reshape_alias _to_copy _unsafe_view alias as_strided bucketize cat chunk clone constant_pad_nd contiguous copy copy_
    detach detach_ diagonal diagonal_backward empty empty_like empty_strided expand fill fill_ flip full full_like gather
    index index_fill index_fill_ index_select lift lift_fresh lift_fresh_copy masked_fill masked_fill_ masked_scatter
    masked_select narrow new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like permute pixel_shuffle
    pixel_unshuffle repeat repeat_interleave reshape resize_ roll rot90 scalar_tensor scatter scatter_ select
    select_backward select_scatter set_ slice slice_backward slice_scatter split split_with_sizes squeeze squeeze_ stack t
    t_ take tile transpose transpose_ tril tril_ triu triu_ unbind unfold unsqueeze unsqueeze_ view view_as where zero zero_
    zeros zeros_like reflection_pad2d replication_pad2d _local_scalar_dense _pin_memory is_pinned channel_shuffle
    native_channel_shuffle eye unflatten embedding _fill_mem_eff_dropout_mask_ new_empty_like _conj
"""
_COMPARISONS = """
    all amax amin any aminmax argmax argmin eq equal ge gt isfinite isinf isnan le logical_and logical_and_ logical_not
    logical_or logical_xor lt max maximum min minimum ne sign signbit topk sort clamp clamp_ clamp_max clamp_max_ clamp_min
    clamp_min_ fmax fmin heaviside hardtanh hardtanh_ hardtanh_backward relu relu_ relu6 threshold threshold_backward
    is_same_size is_nonzero unique2 _unique2 searchsorted isin bitwise_and bitwise_not bitwise_or
"""
_SINGLE_OPERATIONS = "abs abs_ ceil ceil_ floor floor_ mul mul_ neg neg_ round round_ trunc trunc_ frac copysign square_"

PASSING = frozenset(
    getattr(packet, overload)
    for name in (_MOVES + _COMPARISONS + _SINGLE_OPERATIONS).split()
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for overload in packet.overloads()
)
"""by overload"""
