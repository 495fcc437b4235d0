"""A few given tokens of every row in the order of their scores, with their log-probabilities; `tops.among` by kernels.

The first launch is `topk`'s: every stretch's peak, and its part of the normaliser. The second reads the few scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.topk import BLOCK, MOST, _dense, _keys, _normaliser, _peaks


@triton.jit(do_not_specialize=["inner", "parts", "k"])
def _place(
    x, peaks, sums, ids, top, order, inner, outer_stride, stride, parts, k, PARTS: tl.constexpr, KB: tl.constexpr
):  # fmt: skip
    """A row's tokens to their places: each counts who is above it."""
    row = tl.program_id(0)
    norm = _normaliser(peaks, sums, row, parts, PARTS)
    at = tl.arange(0, KB)
    live = at < k
    token = tl.load(ids + row * k + at, live, -1)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * stride
    score = tl.load(x + start + token, token >= 0, -float("inf")).to(tl.float32)
    value = tl.where(token >= 0, score - norm, -float("inf"))
    key = _keys(value, at, live)  # never equal, so that every place is taken
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    tl.store(top + row * k + rank, value, live)
    tl.store(order + row * k + rank, at.to(tl.int64), live)


def among(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`tops.among`. [N, R, V], [N, R, K] -> float32, long [N, R, K]"""
    x, n, r, vocab = _dense(x)
    k, block = ids.shape[-1], BLOCK
    while triton.cdiv(vocab, block) > MOST:
        block *= 2
    parts = triton.cdiv(vocab, block)
    peaks = torch.empty(n * r, parts, dtype=torch.long, device=x.device)
    sums = torch.empty(n * r, parts, dtype=torch.float32, device=x.device)
    counts = torch.empty(n * r, dtype=torch.int32, device=x.device)
    top = torch.empty(n, r, k, dtype=torch.float32, device=x.device)
    order = torch.empty(n, r, k, dtype=torch.long, device=x.device)
    strides = x.stride()[:2]
    _peaks[(n * r, parts)](
        x, peaks, sums, counts, r, *strides, vocab, BLOCK=block, SUMS=True, num_warps=max(1, block // 256),
        enable_fp_fusion=False,
    )  # fmt: skip
    _place[(n * r,)](
        x, peaks, sums, ids.contiguous(), top, order, r, *strides, parts, k,
        PARTS=triton.next_power_of_2(parts), KB=triton.next_power_of_2(k), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return top, order
