"""Triton backend: static cache prefix plus a tail of rows, under the attention rule and without a dense mask.

Flash-decoding over the slot axis: every program reads one stretch of `SPLIT` slots for the rows of one key/value head,
all query heads of a group at once, and a second kernel combines the stretches in slot order. What a row may read of the
prefix is one number (its position or its limit, and a window in positions); only draft rows need a bit for every row.

Clean rows are exact: a row's bits depend on the keys and values of its own path alone. Tiles are absolute (tile b
holds positions `[64 b, 64 b + 64)`), a tile of which a row sees nothing adds exactly nothing to it, and no size depends
on the number of rows. In a chain slot = position. A tree's rows stand at other slots, so there the stretches that reach
into the tail are read once for every row, its ancestors' slots gathered in the order of their positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT, BLOCK_N, BLOCK_M = 128, 64, 16  # slots of one program, slots and rows of one step; never by number of rows
CHUNK = 16  # stretches that are combined at a time


@triton.jit(
    do_not_specialize=["n_rows", "n_clean", "n_draw", "n_splits", "n_keys", "tails", "window", "spn", "sln", "slr"]
)
def _partial(
    q, k, v, start, position, limit, seen, path, base, acc_out, max_out, sum_out,
    sqn, sqh, sqr, skn, skh, skt, svn, svh, svt, spn, sln, slr,
    n_rows, n_clean, n_draw, n_splits, n_keys, tails, scale, softcap, window,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, STRETCH: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DRAFT: tl.constexpr, TREE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Unnormalised attention of one stretch of slots: weighted values, running maximum and sum of every row."""
    pid, item = tl.program_id(0), tl.program_id(1)
    n, hk = (pid // HKV).to(tl.int64), (pid % HKV).to(tl.int64)
    kv = n
    if BASE:
        kv = tl.load(base + n)
    first = tl.load(start + n).to(tl.int32)
    m = (item // n_splits) * BLOCK_M + tl.arange(0, BLOCK_M)  # rows of the group's heads, one after another
    live = m < n_draw
    r, head = m % n_rows, m // n_rows
    split = item % n_splits
    alone = item < 0  # the program has the heads of one row of a tree
    if TREE:
        PARTS: tl.constexpr = (G + BLOCK_M - 1) // BLOCK_M
        shared = ((n_draw + BLOCK_M - 1) // BLOCK_M) * n_splits
        alone = item >= shared
        one = tl.maximum(item - shared, 0) // tails
        mine = (one % PARTS) * BLOCK_M + tl.arange(0, BLOCK_M)
        head = tl.where(alone, mine, head)
        split = tl.where(alone, first // STRETCH + tl.maximum(item - shared, 0) % tails, split)
        shareable = (split + 1) * STRETCH <= first  # nothing of the tail in it: slot = position for every row
        theirs = live & (r >= tl.where(shareable, 0, n_clean))
        live = tl.where(alone, mine < tl.where(split < n_splits, G, 0), theirs)
        r = tl.where(alone, one // PARTS, r)
    draws = live & (head < G)
    h = hk * G + tl.where(draws, head, 0)
    r = tl.where(draws, r, 0)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    end = tl.minimum(first + n_rows, n_keys)  # slots past the last row hold nothing
    begin = split * STRETCH
    stop = tl.minimum(begin + STRETCH, end)
    if TREE:  # noqa: SIM102  # rows may reach into fewer stretches than they could; clean ones share none of the tail
        if (alone & (begin >= stop)) | ((not DRAFT) & (not alone) & (not shareable)):
            return
    queries = tl.load(q + n * sqn + h[:, None] * sqh + r[:, None] * sqr + d, draws[:, None] & (d < D), 0.0)
    place = tl.load(position + n * spn + r, draws, 0).to(tl.int32)
    bound = place
    if DRAFT:
        drafts = draws & (r >= n_clean)
        bound = tl.load(limit + n * sln + (r - n_clean) * slr, drafts, 0).to(tl.int32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BDV], 0.0, tl.float32)
    for low in range(begin, stop, BLOCK):
        t = low + tl.arange(0, BLOCK)  # a slot; the position of a program's one row
        here = t < end
        row = t - first  # below 0: a prefix slot
        slot = t
        if TREE:
            # of the one row; every row's position is its depth behind the first
            line = path + (n * n_clean + one // PARTS) * n_clean
            ancestor = tl.load(line + row, (row >= 0) & (row < tl.where(alone, n_clean, 0)), -1).to(tl.int32)
            slot = tl.where(ancestor >= 0, first + ancestor, t)
        at = slot.to(tl.int64)[:, None]
        keys = tl.load(k + kv * skn + hk * skh + at * skt + d, here[:, None] & (d < D), 0.0)
        # a compiler hands Python floats over as float64, Triton itself as float32
        scores = (tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale).to(tl.float32)
        if SOFTCAP:
            ratio = (scores / softcap).to(tl.float32)
            scores = (softcap * (1 - 2 / (tl.exp(2 * ratio) + 1))).to(tl.float32)  # tanh
        allow = t <= place[:, None]  # a clean row's own path, in the order of positions
        where = t
        if DRAFT:
            tail = here & (row >= 0)
            bits = seen + (n * n_rows + r[:, None]) * n_rows + row
            bit = tl.load(bits, drafts[:, None] & tail, 0)
            allow = tl.where(drafts[:, None], ((row < 0) & (t < bound[:, None])) | (bit != 0), allow)
            if WINDOW:
                where = tl.load(position + n * spn + row, tail, 0).to(tl.int32)
                where = tl.where(alone, t, tl.where(row < 0, t, where))
        if WINDOW:
            allow = allow & (place[:, None] - where < window)
        scores = tl.where(allow & here, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + kv * svn + hk * svh + at * svt + dv, here[:, None] & (dv < DV), 0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new
    out = ((n * HKV * G + h) * n_rows + r) * n_splits + split
    tl.store(max_out + out, top, draws)
    tl.store(sum_out + out, total, draws)
    tl.store(acc_out + out[:, None] * DV + dv, acc, draws[:, None] & (dv < DV))


@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def _combine(
    acc_in, max_in, sum_in, sinks, start, out, n_rows, n_splits,
    H: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, STRETCH: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """One row of one head: the stretches put together in slot order, and normalised. Stretches unseen add nothing."""
    pid = tl.program_id(0)  # (n * R + row) * H + head
    n, head = (pid // H // n_rows).to(tl.int64), pid % H
    at = (n * H + head) * n_rows + (pid // H) % n_rows
    dv = tl.arange(0, BDV)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32)
        total += 1.0
    acc = tl.full([BDV], 0.0, tl.float32)
    used = tl.minimum((tl.load(start + n).to(tl.int32) + n_rows + STRETCH - 1) // STRETCH, n_splits)
    for low in range(0, used, CHUNK):
        s = low + tl.arange(0, CHUNK)
        ok = s < used
        high = tl.load(max_in + at * n_splits + s, ok, -float("inf"))
        new = tl.maximum(top, tl.max(high, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        keep, gain = tl.exp(top - safe), tl.exp(high - safe)
        total = total * keep + tl.sum(tl.load(sum_in + at * n_splits + s, ok, 0.0) * gain, 0)
        parts = tl.load(acc_in + (at * n_splits + s)[:, None] * DV + dv, ok[:, None] & (dv < DV), 0.0)
        acc = acc * keep + tl.sum(parts * gain[:, None], 0)
        top = new
    tl.store(out + pid.to(tl.int64) * DV + dv, (acc / total).to(out.dtype.element_ty), dv < DV)


def prepare(rule, window: int | None):
    """Build the compact rule (`selfspec.attention.Compact`); it serves all windows."""
    return rule.compact()


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
        [N, H, R, Dv], a view of [N, R, H, Dv]
    """
    n, h, r, d = query.shape
    hkv, n_keys, dv = key.shape[1], key.shape[2], value.shape[3]
    compact, c = rule.compact(), rule.layout.n_clean
    g = h // hkv
    n_splits = triton.cdiv(n_keys, SPLIT)
    acc = torch.empty(n, h, r, n_splits, dv, device=query.device, dtype=torch.float32)
    high = torch.empty(n, h, r, n_splits, device=query.device, dtype=torch.float32)
    total = torch.empty_like(high)
    out = query.new_empty(n, r, h, dv)
    bd, bdv = (max(16, triton.next_power_of_2(x)) for x in (d, dv))
    items, tails = triton.cdiv(g * r, BLOCK_M) * n_splits, 1
    if compact.path is not None:
        tails = triton.cdiv(max(r - 1, 0), SPLIT) + 1  # stretches that R rows can reach into
        items += c * triton.cdiv(g, BLOCK_M) * tails
    none = compact.start  # stands in for what a layout does not have
    limit = none[:, None] if compact.limit is None else compact.limit
    _partial[(n * hkv, items)](
        query, key, value, compact.start, compact.positions, limit,
        none if compact.seen is None else compact.seen, none if compact.path is None else compact.path,
        none if rule.base is None else rule.base,
        acc, high, total, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        compact.positions.stride(0), *limit.stride(),
        r, c, g * r, n_splits, n_keys, tails, scale, softcap or 0.0, window or 0,
        HKV=hkv, G=g, D=d, DV=dv, BD=bd, BDV=bdv, BLOCK_M=BLOCK_M, BLOCK=BLOCK_N, STRETCH=SPLIT,
        WINDOW=window is not None, SOFTCAP=softcap is not None,
        DRAFT=compact.seen is not None, TREE=compact.path is not None, BASE=rule.base is not None,
        enable_fp_fusion=False,
    )  # fmt: skip
    _combine[(n * h * r,)](
        acc, high, total, query if sinks is None else sinks, compact.start, out, r, n_splits,
        H=h, DV=dv, BDV=bdv, STRETCH=SPLIT, CHUNK=CHUNK, SINKS=sinks is not None,
        enable_fp_fusion=False,  # variants of a kernel could be contracted differently
    )  # fmt: skip
    return out.transpose(1, 2)
