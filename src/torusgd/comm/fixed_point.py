"""`exact_all_reduce`: a sum over ranks whose bits depend on the addends alone, not on who holds them or on any order.

A sum of floats depends on the order of its additions, and in an all-reduce the order follows from the algorithm and the
number of ranks. Integers have no such order. So the ranks agree on a power of two for each block of 4,096 elements, by
which every addend is multiplied before it is rounded to an integer; all further additions, on a rank and between ranks,
are of int64 (ours; fixed-point sums go back to Kulisch's accumulator). Three collectives:

1. The shape, dtype and number of the addends: a few integers.
2. The largest exponent in each block, and whether all of its values are finite: 8 bytes a block.
3. The integers: 8 bytes an element, whatever the number of ranks and addends. By any all-reduce, for integer sums have
   the same bits by all of them. K addends leave 62 - ceil(log2 K) bits for each.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import UserError
from .allreduce import AnyAllReduce
from .groups import AnyGroup, Group, group_of

BLOCK = 4096  # number of elements, in memory order of the contiguous tensor, that share a power of two
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_ADDENDS, _MOST_RANKS, _MOST_DIMS = 2**31, 2**15 - 1, 8
# One bit less than the magnitude of an int64 has, since rounding may reach the bound of a block's sum itself.
_SUM_BITS = 62
# bits of an int64 in a block with inf or nan: of the sum, then of each number of ranks (see `_count_nonfinite`)
_FIELD, _COUNT = 34, 15
# exponent of a block of zeros: below that of any float64
_LEAST = -2000
# largest shift: no float64 has bits below 2**-1074
_FINEST = 1074
# number of elements of one pass, so that they stay in a CPU's cache
_AT_ONCE = 1 << 17


@torch.no_grad()
def exact_all_reduce(
    addends: Tensor | Sequence[Tensor], group: AnyGroup | None = None, allreduce: AnyAllReduce | None = None
) -> Tensor:
    """The sum of all addends of all ranks, with the same bits however they are spread over ranks and in any order.

    Every rank of the group calls it. The bits are the same for any number of ranks and addends a rank, any algorithm,
    and any backend, on CPU and GPU alike. At most 8 bytes an element travel, and 8 a block of 4,096 elements. Beside
    its own addends a rank needs memory for one sum and its result.

    Args:
        addends: A tensor, or a list of tensors of one shape, dtype and device: float16, bfloat16, float32 or float64,
            of any shape of up to 8 dims, empty ones as well. Ranks may hold different numbers of addends; a rank
            without any gives an empty list, and learns the shape and dtype from the others.
        group: A `Group`, or a group of torch.distributed; None: all ranks, or this process alone.
        allreduce: What `create` made, instead of a group: it carries the integers over its own ranks.

    Returns:
        A new tensor of the addends' shape, dtype and device, the same on all ranks. With K addends in all, c =
        ceil(log2 K), and M the largest finite magnitude in a block, it differs from the true sum by at most
        M * 2^(2 c - 62), plus half a unit in the last place of its own dtype (float32 and narrower: by 2^-29 of one
        more, as it is rounded to float64 first). That is 2^-42 M for 1,024 addends and 2^-22 M for 2^20. float32
        addends of at least M * 2^(c - 38), and float64 addends of at least M * 2^(c - 9), are added without any error.
        As in IEEE arithmetic an element is nan if an addend is nan or infinities of both signs meet, and inf if one
        addend is or the sum is beyond the dtype. The other elements of a block with inf or nan have 30 bits less:
        they differ by at most M * 2^(2 c - 32). The sum of negative zeros is 0.

    Raises:
        UserError: On every rank: the addends' shapes or dtypes differ, nobody has an addend, or there are more than
            2^31 of them or 32,767 ranks; here: a group and an all-reduce are given.
        CommError: Ranks could not exchange messages.

    >>> exact_all_reduce([torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])])
    tensor([1.])
    """
    mine = [addends] if isinstance(addends, Tensor) else addends
    if group is not None and allreduce is not None:
        raise UserError("group: an all-reduce has a group of its own; give one of the two")
    ranks = group_of(group) if allreduce is None else allreduce.group
    shape, dtype, device, count = _agree(mine, ranks)
    numel = shape.numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device=device)

    exponents = _exponents(mine, numel, device).to(ranks.small_device)
    ranks.all_reduce(exponents, maximum=True)
    exponent, nonfinite = exponents.to(device)
    is_flagged = nonfinite > 0
    # Each addend is below 2**bits, so that the sum of K of them stays below 2**_SUM_BITS in any order.
    bits = torch.where(is_flagged, _FIELD - 2, _SUM_BITS) - (count - 1).bit_length()
    shift = torch.where(exponent > _LEAST, bits - exponent, 0).clamp(max=_FINEST)

    total = _add_up(mine, numel, _powers(shift), device)
    if bool(is_flagged.any()):
        _count_nonfinite(mine, total)
    if allreduce is not None:
        allreduce.start(total).wait()
    else:
        ranks.all_reduce(total)
    return _to_floats(total, shift, is_flagged, dtype).view(shape)


def _to_floats(total: Tensor, shift: Tensor, is_flagged: Tensor, dtype: torch.dtype) -> Tensor:
    # The values [numel] of summed integers, block by block times 2**-shift.
    result, (first, second) = torch.empty(total.shape, dtype=dtype, device=total.device), _powers(-shift)
    all_finite = not bool(is_flagged.any())
    for blocks, elements, width in _runs(len(total), total.device):
        integers, flags = total[elements].unflatten(0, (-1, width)), is_flagged[blocks, None]
        # Of a block with inf or nan the sums below the numbers of ranks, with their sign.
        field = integers if all_finite else (integers << (64 - _FIELD)) >> (64 - _FIELD)
        sums = integers if all_finite else torch.where(flags, field, integers)
        values = sums.double().mul_(first[blocks]).mul_(second[blocks])
        if not all_finite:  # inf or nan where the numbers of ranks above the sum say so
            counts, most = (integers - field) >> _FIELD, (1 << _COUNT) - 1
            positive, negative = flags & ((counts & most) > 0), flags & (((counts >> _COUNT) & most) > 0)
            values.masked_fill_(positive, torch.inf).masked_fill_(negative, -torch.inf)
            values.masked_fill_(positive & negative, torch.nan)
        result[elements] = values.flatten().to(dtype)
    return result


def _agree(addends: Sequence[Tensor], ranks: Group) -> tuple[torch.Size, torch.dtype, torch.device, int]:
    # Agrees on shape, dtype and device, and counts the addends.
    problem = _problem(addends, ranks)
    addends = [] if problem else addends
    own = [0] * (5 + _MOST_DIMS)
    own[:2] = bool(problem), len(addends)
    if addends:
        first = addends[0]
        described = [_DTYPES.index(first.dtype), first.device.type == "cuda", first.dim(), *first.shape]
        own[2 : 2 + len(described)] = described
    rows = ranks.all_gather(torch.tensor(own, dtype=torch.int64, device=ranks.small_device)).tolist()
    problems, counts, *_ = zip(*rows, strict=True)
    kinds, total = {tuple(kind) for _, count, *kind in rows if count}, sum(counts)
    if any(problems):
        raise UserError(f"exact_all_reduce: {problem or 'the addends of another rank do not fit: see its error'}")
    if not total:
        raise UserError("exact_all_reduce: no rank has an addend; give at least one, such as a tensor of zeros")
    if len(kinds) > 1:
        raise UserError("exact_all_reduce: addends differ in shape, dtype or device among the ranks; make them equal")
    if total > _MOST_ADDENDS:
        raise UserError(f"exact_all_reduce: {total} addends; add up at most 2^31 at a time")
    ((dtype, is_cuda, dims, *sizes),) = kinds
    elsewhere = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    return torch.Size(sizes[:dims]), _DTYPES[dtype], addends[0].device if addends else elsewhere, total


def _problem(addends: object, ranks: Group) -> str:
    if ranks.size > _MOST_RANKS:
        return f"{ranks.size} ranks; it takes at most {_MOST_RANKS}"
    if not isinstance(addends, Sequence) or not all(isinstance(each, Tensor) for each in addends):
        return f"addends of type {type(addends).__name__}; give a tensor, or a list of tensors"
    if not addends:
        return ""
    first = addends[0]
    if any(each.layout is not torch.strided or each.is_meta for each in addends):
        return "an addend that is sparse, or holds no values; give dense ones, such as tensor.to_dense()"
    if first.dtype not in _DTYPES or first.dim() > _MOST_DIMS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        return f"an addend of {first.dtype} and {first.dim()} dims; give {names}, of at most {_MOST_DIMS} dims"
    kinds = {(addend.shape, addend.dtype, addend.device) for addend in addends}
    described = sorted(f"{tuple(shape)} {dtype} on {device}" for shape, dtype, device in kinds)
    return "" if len(kinds) == 1 else f"addends of {', '.join(described)}; make them equal"


def _runs(numel: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
    # Runs of whole blocks: their numbers, their elements, and the width of each; the last block may be narrower.
    whole = numel // BLOCK
    step = _AT_ONCE // BLOCK if device.type == "cpu" else max(1, whole)
    for first in range(0, whole, step):
        stop = min(first + step, whole)
        yield slice(first, stop), slice(first * BLOCK, stop * BLOCK), BLOCK
    if numel % BLOCK:
        yield slice(whole, whole + 1), slice(whole * BLOCK, numel), numel % BLOCK


def _parts(addends: Sequence[Tensor], numel: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    # Of some addends at a time, several if they are small, a run of blocks: numbers, elements, and [k, blocks, width].
    several = max(1, _AT_ONCE // numel)
    for first in range(0, len(addends), several):
        some = addends[first : first + several]
        stack = some[0].reshape(1, numel) if len(some) == 1 else torch.stack(list(some)).reshape(-1, numel)
        for blocks, elements, width in _runs(numel, device):
            yield blocks, elements, stack[:, elements].unflatten(1, (-1, width))


def _exponents(addends: Sequence[Tensor], numel: int, device: torch.device) -> Tensor:
    # int32 [2, blocks]: the least e with |x| < 2**e for all finite x of a block, and whether some x is not finite.
    found = torch.full((2, -(-numel // BLOCK)), _LEAST, dtype=torch.int32, device=device)
    found[1] = 0
    for blocks, _, values in _parts(addends, numel, device):
        # One pass over the values without a copy of their magnitudes. A nan makes both ends nan.
        low, high = torch.aminmax(values, dim=2)
        largest = torch.maximum(-low, high).double()
        nonfinite = ~largest.isfinite()
        if bool(nonfinite.any()):  # rare: the second pass, over finite values only
            largest = values.nan_to_num(0.0, 0.0, 0.0).abs().amax(2).double()
        _, exponent = torch.frexp(largest)
        exponent = torch.where(largest > 0, exponent, _LEAST).to(torch.int32)
        found[0, blocks] = torch.maximum(found[0, blocks], exponent.amax(0))
        found[1, blocks] |= nonfinite.any(0).to(torch.int32)
    return found


def _powers(shift: Tensor) -> tuple[Tensor, Tensor]:
    # Two float64 [blocks, 1] whose product is 2**shift, which by itself may be beyond float64's range.
    half = shift.long()[:, None] // 2
    # Made of the bits of the exponents, since exp2 is not exact on every device.
    first, second = (((each + 1023) << 52).view(torch.float64) for each in (half, shift.long()[:, None] - half))
    return first, second


def _add_up(addends: Sequence[Tensor], numel: int, powers: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    # int64 [numel]: the sum of the addends times both powers, each rounded; what is not finite counts as 0.
    total, (first, second) = torch.zeros(numel, dtype=torch.int64, device=device), powers
    for blocks, elements, values in _parts(addends, numel, device):
        scaled = torch.mul(values, first[blocks]).mul_(second[blocks]).round_().nan_to_num_(0.0, 0.0, 0.0)
        integers = scaled.to(torch.int64)
        total[elements] += integers.sum(0).flatten() if len(integers) > 1 else integers.flatten()
    return total


def _count_nonfinite(addends: Sequence[Tensor], total: Tensor) -> None:
    # Adds, above the sums of this rank, 1 to the number of ranks with +inf or nan, and of those with -inf or nan.
    # An int64 of a block with inf or nan holds, from its lowest bits on, the sum (34 bits), the first number (15) and
    # the second. The numbers of other blocks are 0, and so their sums may have all 64 bits.
    for is_infinite, bit in ((torch.isposinf, _FIELD), (torch.isneginf, _FIELD + _COUNT)):
        found = torch.zeros(len(total), dtype=torch.bool, device=total.device)
        for _, elements, values in _parts(addends, len(total), total.device):
            found[elements] |= (is_infinite(values) | values.isnan()).any(0).flatten()
        total += found.to(torch.int64) << bit
