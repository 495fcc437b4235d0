"""What follows what among a few tokens: `selfspec.draft.condition`'s products with those rows of the head alone.

One program has a position of a request: the states after all its candidates, and the rows of the head that are asked
for. Drafts alone depend on it, so it may add in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.topk import _keys

STEP = 64  # of the states' width at a time


@triton.jit
def _pairs(
    states, readout, ids, top, first, best_out, top_out, order_out, k, w, d, wr,
    KB: tl.constexpr, WB: tl.constexpr, STEP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Scores [KB, WB] of the tokens after every candidate, and what is asked of them."""
    place = tl.program_id(0).to(tl.int64)
    row, column, part = tl.arange(0, KB), tl.arange(0, WB), tl.arange(0, STEP)
    token = tl.load(ids + place * w + column, column < w, -1)
    scores = tl.zeros([KB, WB], tl.float32)
    for low in range(0, d, STEP):
        at = low + part
        a = tl.load(states + (place * k + row[:, None]) * d + at, (row[:, None] < k) & (at < d), 0.0)
        b = tl.load(readout + token[:, None] * wr + at, (token[:, None] >= 0) & (at < d), 0.0)
        scores += tl.dot(a, tl.trans(b), input_precision="ieee")
    scores = tl.where((token >= 0)[None, :], scores, -float("inf"))
    kept = (column < k)[None, :]
    if NEAR:
        likely = tl.load(top + place * w + column, column < w, -float("inf"))
        rest = tl.maximum(1.0 - tl.sum(tl.exp(likely), 0), 0.0)
        base = tl.load(first + place).to(tl.float32) - tl.load(top + place * w)
        beside = tl.log(rest) + base  # -inf where nothing is left
        high = tl.maximum(tl.max(scores, 1), beside)
        total = high + tl.log(tl.sum(tl.exp(scores - high[:, None]), 1) + tl.exp(beside - high))
        scores = scores - total[:, None]
        keys = tl.reshape(_keys(scores, tl.broadcast_to(column[None, :], [KB, WB]), kept), [KB, WB])
        rank = tl.sum((keys[:, None, :] > keys[:, :, None]).to(tl.int32), 2)  # [KB, WB]
        out = (place * k + row[:, None]) * k + rank
        live = (row[:, None] < k) & kept
        tl.store(top_out + out, scores, live)
        tl.store(order_out + out, tl.broadcast_to(column[None, :], [KB, WB]).to(tl.int64), live)
    else:
        keys = _keys(scores, tl.broadcast_to(column[None, :], [KB, WB]), kept)
        high = tl.max(keys, 1)
        found = tl.sum(tl.where(keys == high[:, None], column[None, :], 0), 1)  # keys are never equal
        tl.store(best_out + place * k + row, found.to(tl.int64), row < k)


def best(states: Tensor, readout: Tensor, ids: Tensor) -> Tensor:
    """`draft.condition.successors`. [N, T, K, d], [V, d], [N, T, K] -> long [N, T, K]"""
    out = torch.empty(ids.shape, dtype=torch.long, device=ids.device)
    _run(states, readout, ids, None, None, out, None, None)
    return out


def near(states: Tensor, readout: Tensor, ids: Tensor, top: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """`draft.condition.near`. [N, T, K, d], [V, d], [N, T, W], [N, T, W], [N, T] -> float32, long [N, T, K, K]"""
    n, t, k, _ = states.shape
    likely = torch.empty(n, t, k, k, dtype=torch.float32, device=ids.device)
    order = torch.empty(n, t, k, k, dtype=torch.long, device=ids.device)
    _run(states, readout, ids, top, first, None, likely, order)
    return likely, order


def _run(states, readout, ids, top, first, best_out, top_out, order_out) -> None:
    n, t, k, d = states.shape
    w = ids.shape[-1]
    none = ids
    _pairs[(n * t,)](
        states.contiguous(), readout, ids.contiguous(), none if top is None else top.contiguous(),
        none if first is None else first.contiguous(), none if best_out is None else best_out,
        none if top_out is None else top_out, none if order_out is None else order_out, k, w, d, readout.stride(0),
        KB=max(16, triton.next_power_of_2(k)), WB=max(16, triton.next_power_of_2(w)), STEP=STEP, NEAR=top is not None,
        num_warps=4,
    )  # fmt: skip
