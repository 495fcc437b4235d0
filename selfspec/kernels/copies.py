"""What followed the last tokens when they stood in the text before, one program a request;
`selfspec.draft.lookup.by_torch` is the reference, dozens of kernels that cost as much as a tenth of a forward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # positions looked at together
LONGER = tl.constexpr(1 << 40)  # beyond all positions: an occurrence of a longer ending comes before any of a shorter


@triton.jit(do_not_specialize=["row", "size"])
def _copies(text, start, out, row, size, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr,
            MOST: tl.constexpr):  # fmt: skip
    """The last occurrence of the longest ending that is known, and what stands behind it."""
    n = tl.program_id(0).to(tl.int64)
    text += n * row
    last = tl.load(start + n).to(tl.int64)
    best = tl.full([], -1, tl.int64)
    for low in range(0, last, BLOCK):
        place = low + tl.arange(0, BLOCK).to(tl.int64)
        hit = place < last  # an ending that stands here is followed by a known token
        for back in tl.static_range(LONGEST):
            want = tl.load(text + tl.maximum(last - back, 0))  # a text too short for it has no such place either
            hit = hit & (place >= back)
            hit = hit & (tl.load(text + place - back, hit, -2) == want)
            if back + 1 >= SHORTEST:
                best = tl.maximum(best, tl.max(tl.where(hit, place + (back + 1 - SHORTEST) * LONGER, -1), 0))
    ahead = tl.arange(0, MOST)
    at = tl.where(best < 0, last, best % LONGER) + ahead  # behind the text's end nothing is known
    known = (at <= last) & (ahead > 0) & (ahead < size)
    guess = tl.load(text + at, known, -1)
    guess = tl.where(ahead == 0, tl.load(text + last), guess)
    tl.store(out + n * size + ahead, guess, ahead < size)


def copies(text: Tensor, start: Tensor, size: int, longest: int, shortest: int) -> Tensor:
    """See `selfspec.draft.lookup.lookup`; endings of `shortest` to `longest` tokens. Returns long [N, size]."""
    out = torch.empty(len(text), size, dtype=torch.long, device=text.device)
    _copies[(len(text),)](
        text, start, out, text.stride(0), size, LONGEST=longest, SHORTEST=shortest, BLOCK=BLOCK,
        MOST=triton.next_power_of_2(size),
    )  # fmt: skip
    return out
