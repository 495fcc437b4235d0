"""Triton backend: static cache prefix plus a tail of rows, under the attention rule and without a dense mask.

Flash-decoding over the slot axis: every program reads one stretch of `SPLIT` slots for the rows of one key/value head,
all query heads of a group at once, and a second kernel combines the stretches in slot order. What a row may read of the
prefix is one number (its limit, and a window in positions); only the rows among themselves need a bit each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT, BLOCK_N = 128, 64  # slots of one program, slots of one step


@triton.jit
def _partial(
    q, k, v, start, limit, position, seen, acc_out, max_out, sum_out,
    sqn, sqh, sqr, skn, skh, skt, svn, svh, svt,
    n_rows, n_draw, n_splits, n_keys, scale, softcap, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, STRETCH: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Unnormalised attention of one stretch of slots: weighted values, running maximum and sum of every row."""
    pid, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, hk = pid // HKV, pid % HKV
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)  # rows of the group's heads, one after another
    live = m < n_draw
    r, head = m % n_rows, hk * G + m // n_rows
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    first = tl.load(start + n)
    end = tl.minimum(first + n_rows, n_keys)  # slots past the last row hold nothing
    begin = split * STRETCH
    queries = tl.load(q + n * sqn + head[:, None] * sqh + r[:, None] * sqr + d, live[:, None] & (d < D), 0.0)
    bound = tl.load(limit + n * n_rows + r, live, 0)
    place = tl.load(position + n * n_rows + r, live, 0)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BDV], tl.float32)
    for low in range(begin, tl.minimum(begin + STRETCH, end), BLOCK):
        t = low + tl.arange(0, BLOCK)
        here = t < end
        keys = tl.load(k + n * skn + hk * skh + t[:, None] * skt + d, here[:, None] & (d < D), 0.0)
        # a compiler hands Python floats over as float64, Triton itself as float32
        scores = (tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale).to(tl.float32)
        if SOFTCAP:
            ratio = (scores / softcap).to(tl.float32)
            scores = (softcap * (1 - 2 / (tl.exp(2 * ratio) + 1))).to(tl.float32)  # tanh
        row = t - first  # below 0: a prefix slot
        allow = (row < 0) & (t < bound[:, None])
        if low + BLOCK > first:
            tail = here & (row >= 0)
            pair = live[:, None] & tail
            bit = tl.load(seen + (n * n_rows + r[:, None]) * n_rows + row, pair, 0)
            allow = allow | (bit != 0)
            if WINDOW:
                where = tl.load(position + n * n_rows + row, tail, 0)
                where = tl.where(row < 0, t, where)
                allow = allow & (place[:, None] - where < window)
        elif WINDOW:
            allow = allow & (place[:, None] - t < window)
        scores = tl.where(allow & here, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + n * svn + hk * svh + t[:, None] * svt + dv, here[:, None] & (dv < DV), 0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new
    at = ((n * HKV * G + head) * n_rows + r) * n_splits + split
    tl.store(max_out + at, top, live)
    tl.store(sum_out + at, total, live)
    tl.store(acc_out + at[:, None] * DV + dv, acc, live[:, None] & (dv < DV))


@triton.jit
def _combine(
    acc_in, max_in, sum_in, sinks, start, out, n_rows, n_splits, heads,
    DV: tl.constexpr, BDV: tl.constexpr, STRETCH: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One row of one head: the stretches put together in slot order, and normalised."""
    at = tl.program_id(0)  # (n * H + head) * R + row
    n, head = at // (heads * n_rows), (at // n_rows) % heads
    dv = tl.arange(0, BDV)
    top = -float("inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32)
        total = 1.0
    acc = tl.zeros([BDV], tl.float32)
    used = tl.minimum(tl.cdiv(tl.load(start + n) + n_rows, STRETCH), n_splits)
    for s in range(used):
        high = tl.load(max_in + at * n_splits + s)
        new = tl.maximum(top, high)
        safe = tl.where(new == -float("inf"), 0.0, new)
        keep, gain = tl.exp(top - safe), tl.exp(high - safe)
        total = total * keep + tl.load(sum_in + at * n_splits + s) * gain
        acc = acc * keep + tl.load(acc_in + (at * n_splits + s) * DV + dv, dv < DV, 0.0) * gain
        top = new
    tl.store(out + at * DV + dv, (acc / total).to(out.dtype.element_ty), dv < DV)


def prepare(rule, window: int | None) -> None:
    """Build the compact rule; it serves all windows."""
    rule.compact()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The backend's signature (`selfspec.attention`), for decoding layouts: slot = position, one document a request.

    Args:
        query: [N, H, R, D] in float32, bfloat16 or float16.
        key: [N, Hkv, K, D], a view of the cache; the last axis is dense.
        value: [N, Hkv, K, Dv]
        rule: the forward's `AttentionRule`.
        window: sliding window in positions, or None.
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [H] one extra logit per head in the denominator.

    Returns:
        [N, H, R, Dv]
    """
    n, h, r, d = query.shape
    hkv, n_keys, dv = key.shape[1], key.shape[2], value.shape[3]
    start, limit, position, seen = rule.compact()
    g = h // hkv
    n_splits = triton.cdiv(n_keys, SPLIT)
    block_m = min(64, max(16, triton.next_power_of_2(g * r)))
    acc = torch.empty(n, h, r, n_splits, dv, device=query.device, dtype=torch.float32)
    high = torch.empty(n, h, r, n_splits, device=query.device, dtype=torch.float32)
    total = torch.empty_like(high)
    out = query.new_empty(n, h, r, dv)
    bd, bdv = (max(16, triton.next_power_of_2(x)) for x in (d, dv))
    _partial[(n * hkv, triton.cdiv(g * r, block_m), n_splits)](
        query, key, value, start, limit, position, seen, acc, high, total,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        r, g * r, n_splits, n_keys, scale, softcap or 0.0, window or 0,
        HKV=hkv, G=g, D=d, DV=dv, BD=bd, BDV=bdv, BLOCK_M=block_m, BLOCK=BLOCK_N, STRETCH=SPLIT,
        WINDOW=window is not None, SOFTCAP=softcap is not None,
    )  # fmt: skip
    _combine[(n * h * r,)](
        acc, high, total, query if sinks is None else sinks, start, out, r, n_splits, h,
        DV=dv, BDV=bdv, STRETCH=SPLIT, SINKS=sinks is not None,
    )  # fmt: skip
    return out
