"""The rows on each row's path by depth, one program a row; `selfspec.rows.paths_by_torch` is the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["c"])
def _lines(up, out, c, BLOCK: tl.constexpr):
    """A parent stands before its child, so that depths on a path are ranks among its rows."""
    line = tl.program_id(0).to(tl.int64) * c
    row = tl.arange(0, BLOCK)
    on = tl.load(up + line + row, row < c, 0).to(tl.int32)
    length = tl.sum(on, 0)
    tl.store(out + line + tl.cumsum(on, 0) - 1, row, on > 0)
    tl.store(out + line + row, tl.full([BLOCK], -1, tl.int32), (row >= length) & (row < c))


def paths(up: Tensor) -> Tensor:
    """See `selfspec.rows.paths`. bool [N, C, C] -> int32 [N, C, C]"""
    n, c, _ = up.shape
    out = torch.empty(n, c, c, dtype=torch.int32, device=up.device)
    _lines[(n * c,)](up.contiguous().view(torch.uint8), out, c, BLOCK=triton.next_power_of_2(c), num_warps=1)
    return out
