"""What a round emits, written where the next one reads it; `selfspec.decode.torch_move_on` is the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _settle(text, start, left, counts, tokens, ready, out, st, sk, depth, BLOCK: tl.constexpr, READY: tl.constexpr):
    """One request."""
    n = tl.program_id(0)
    step = tl.arange(0, BLOCK)
    first, rest = tl.load(start + n), tl.load(left + n)
    count = tl.minimum(tl.load(counts + n), rest)
    token = tl.load(tokens + n * sk + step, step < depth, 0)
    tl.store(text + n * st + first + 1 + step, token, (step < count) & (step < depth))
    row = out + n * (depth + 2)
    tl.store(row + 1 + step, token, step < depth)
    tl.store(row, count)
    saved = count * 0
    if READY:
        saved = tl.load(ready + n).to(tl.int64)
    tl.store(row + 1 + depth, saved)
    tl.store(start + n, first + count)
    tl.store(left + n, rest - count)


def move_on(text: Tensor, start: Tensor, left: Tensor, count: Tensor, tokens: Tensor, ready: Tensor | None) -> Tensor:
    """See `selfspec.decode.move_on`."""
    n, depth = tokens.shape
    out = torch.empty(n, depth + 2, dtype=torch.long, device=text.device)
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    _settle[(n,)](
        text, start, left, count.contiguous(), tokens, count if ready is None else ready, out,
        text.stride(0), tokens.stride(0), depth,
        BLOCK=triton.next_power_of_2(max(depth, 2)), READY=ready is not None, num_warps=1,
    )  # fmt: skip
    return out
