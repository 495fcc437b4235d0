"""Moving accepted rows to the front of a forward's tail, in all layers at once; the reference: `selfspec.cache.moved`.

Indexing by torch takes 64-bit arithmetic for every number that moves, once to read and once to write.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["first", "depth"])
def _compact(
    pool, rows, start, first, depth, row_stride, stores, slots, heads, positions,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows of one request, in one head of one store."""
    n, store, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    step, column = tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    live = (step < depth)[:, None] & (column < WIDTH)[None, :]
    row = tl.load(rows + n * row_stride + step, step < depth, 0)
    base = pool + store * stores + (first + n).to(tl.int64) * slots + head * heads
    base += tl.load(start + n) * positions
    found = tl.load(base + row[:, None] * positions + column[None, :], live)
    tl.debug_barrier()  # a row may be another's target: all are read before any is written
    tl.store(base + step[:, None] * positions + column[None, :], found, live)


def compact(pool: Tensor, rows: Tensor, start: Tensor, first: int) -> None:
    """See `selfspec.cache.KVCache.compact`.

    Args:
        pool: [stores, slots, Hkv, S, D], written in place.
        rows: [n, A] long.
        start: [n] long
        first: slot of the first request.
    """
    n, depth = rows.shape
    rows, start = rows if rows.stride(1) == 1 else rows.contiguous(), start.contiguous()
    if n and depth and pool.numel():
        _compact[(n, pool.shape[0], pool.shape[2])](
            pool, rows, start, first, depth, rows.stride(0), *pool.stride()[:4],
            WIDTH=pool.shape[4], DEPTH=triton.next_power_of_2(max(depth, 2)),
            COLUMNS=triton.next_power_of_2(pool.shape[4]), num_warps=1,
        )  # fmt: skip
