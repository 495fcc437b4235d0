"""Draft rows as they enter their first layer, in one launch; `selfspec.adapters.path.enter` is the reference."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8  # outputs of a program
WIDEST = 1024  # inputs added up at a time, at most


@triton.jit(do_not_specialize=["per_request", "masks"])
def _enter(
    tokens, slots, source, mask, weight, extra, out, per_request, masks, width,
    token_n, token_d, slot_n, slot_d, extra_n, extra_d,
    TABLE: tl.constexpr, WEIGHT: tl.constexpr, EXTRA: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Some columns of one row."""
    row, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n, d = row // per_request, row % per_request
    live = column < width
    token = tl.load(tokens + n * token_n + d * token_d)
    if token >= 0:
        source += (token if TABLE else row).to(tl.int64) * width
        if WEIGHT:
            x = tl.zeros([COLUMNS], tl.float32)
            for first in range(0, width, INNER):
                k = first + tl.arange(0, INNER)
                here = tl.load(source + k, k < width, 0.0).to(tl.float32)
                w = tl.load(weight + column[:, None] * width + k, live[:, None] & (k < width), 0.0).to(tl.float32)
                x += tl.sum(w * here[None, :], 1)
        else:
            x = tl.load(source + column, live, 0.0).to(tl.float32)
    else:
        slot = tl.minimum(tl.load(slots + n * slot_n + d * slot_d), masks - 1)
        x = tl.load(mask + slot * width + column, live, 0.0).to(tl.float32)
    if EXTRA:
        x += tl.load(extra + n * extra_n + d * extra_d + column, live, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + column, x, live)


def enter(
    tokens: Tensor, slots: Tensor, source: Tensor, mask: Tensor, weight: Tensor | None, extra: Tensor | None
) -> Tensor:
    """See `selfspec.adapters.path.enter`."""
    (n, d), width = tokens.shape, source.shape[-1]
    out = source.new_empty(n, d, width)
    weight = None if weight is None else weight.contiguous()
    extra = None if extra is None else extra.expand(n, d, width)
    steps = (0, 0) if extra is None else extra.stride()[:2]
    _enter[(n * d, triton.cdiv(width, COLUMNS))](
        tokens, slots, source.contiguous(), mask.contiguous(), mask if weight is None else weight,
        mask if extra is None else extra, out, d, len(mask), width, *tokens.stride(), *slots.stride(), *steps,
        TABLE=source.dim() == 2, WEIGHT=weight is not None, EXTRA=extra is not None, COLUMNS=COLUMNS,
        INNER=min(WIDEST, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return out
