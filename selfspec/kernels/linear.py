"""y = [rmsnorm](x) W^T [+ bias], then SwiGLU or + residual, in one launch and row-invariant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from selfspec.kernels import norm as norms
from selfspec.kernels.tiles import SMALL, Tile, tile

TICKETS = 1 << 16  # tiles that a split launch can count


@dataclass(frozen=True)
class Span:
    """Some rows of every request: `[first, first + width)`."""

    first: int
    width: int


@triton.jit
def _store(
    acc, gate, bias, gate_bias, residual, out, row, column, ok, N_OUT: tl.constexpr, offset,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Round where torch's separate kernels round: the product, the activation, the sum."""
    kind = out.dtype.element_ty
    wide = row.to(tl.int64)[:, None] * N_OUT + (offset + column)[None, :]
    if BIAS:
        acc += tl.load(bias + column)[None, :].to(tl.float32)
    y = acc.to(kind)
    if SWIGLU:
        if BIAS:
            gate += tl.load(gate_bias + column)[None, :].to(tl.float32)
        g = gate.to(kind).to(tl.float32)
        g = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
        y = (g * y.to(tl.float32)).to(kind)
    if RESIDUAL:
        y = (tl.load(residual + wide, ok, 0.0).to(tl.float32) + y.to(tl.float32)).to(kind)
    tl.store(out + wide, y, ok)


@triton.jit(do_not_specialize=["n_requests", "n_rows", "first", "width"])
def _linear(
    x, norm, w0, w1, w2, b0, b1, b2, residual, out, parts, tickets,
    n_requests, n_rows, first, width, eps,
    K: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, SPLIT: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """One tile. Rows of one tile of rows stand next to each other in time, so that they share the weights' way in."""
    pid, piece = tl.program_id(0), tl.program_id(1)
    m_tiles = (n_requests * width + BM - 1) // BM
    m_tile, n_tile = pid % m_tiles, pid // m_tiles
    m = m_tile * BM + tl.arange(0, BM)
    live = m < n_requests * width
    row = (m // width) * n_rows + first + m % width
    row = tl.where(live, row, 0)
    w, b, n, offset = w0, b0, N0, 0
    if not SWIGLU:
        T0: tl.constexpr = (N0 + BN - 1) // BN
        T1: tl.constexpr = (N1 + BN - 1) // BN
        if N1 > 0 and n_tile >= T0:
            if N2 > 0 and n_tile >= T0 + T1:
                w, b, n, offset = w2, b2, N2, N0 + N1
                n_tile -= T0 + T1
            else:
                w, b, n, offset = w1, b1, N1, N0
                n_tile -= T0
    column = n_tile * BN + tl.arange(0, BN)
    ok = live[:, None] & (column < n)[None, :]
    column = tl.where(column < n, column, 0)  # columns past the end read the first weight, and are not stored
    x_row = x + row.to(tl.int64)[:, None] * K
    if NORM:
        squares = tl.full([BM], 0.0, tl.float32)
        for low in tl.static_range(0, K, BS):
            s = low + tl.arange(0, BS)
            v = tl.load(x_row + s[None, :], live[:, None] & (s < K)[None, :], 0.0).to(tl.float32)
            squares += tl.sum(v * v, 1)
        factor = tl.rsqrt(squares / K + eps)
    acc = tl.full([BM, BN], 0.0, tl.float32)
    gate = tl.full([BM, BN], 0.0, tl.float32)
    w_row = w + column.to(tl.int64)[:, None] * K
    STEPS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    for step in range(0, STEPS):
        k = (piece * STEPS + step) * BK + tl.arange(0, BK)
        if K % (BK * SPLIT) == 0:
            a = tl.load(x_row + k[None, :], live[:, None], 0.0)
            right = tl.load(w_row + k[None, :])
        else:
            a = tl.load(x_row + k[None, :], live[:, None] & (k < K)[None, :], 0.0)
            right = tl.load(w_row + k[None, :], (k < K)[None, :], 0.0)
        if NORM:
            scale = tl.load(norm + k, k < K, 0.0)
            a = (a.to(tl.float32) * factor[:, None]).to(a.dtype)
            a = (a.to(tl.float32) * scale[None, :].to(tl.float32)).to(a.dtype)
        if SWIGLU:  # w0 is the gate, w1 is what it gates
            other_row = w1 + column.to(tl.int64)[:, None] * K
            if K % (BK * SPLIT) == 0:
                other = tl.load(other_row + k[None, :])
            else:
                other = tl.load(other_row + k[None, :], (k < K)[None, :], 0.0)
            gate = tl.dot(a, tl.trans(right), gate, input_precision="ieee")
            acc = tl.dot(a, tl.trans(other), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(right), acc, input_precision="ieee")
    N_OUT: tl.constexpr = N0 if SWIGLU else N0 + N1 + N2
    if SPLIT == 1:
        if SWIGLU:
            _store(acc, gate, b1, b0, residual, out, row, column, ok, N_OUT, offset, BIAS, RESIDUAL, SWIGLU)
        else:
            _store(acc, gate, b, b, residual, out, row, column, ok, N_OUT, offset, BIAS, RESIDUAL, SWIGLU)
    else:  # whoever comes last adds all parts in their own order
        at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        base = parts + pid.to(tl.int64) * (SPLIT * BM * BN)
        tl.store(base + piece * (BM * BN) + at, acc)
        tl.debug_barrier()  # all threads' parts are written before one thread says so
        before = tl.atomic_add(tickets + pid, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT - 1:
            tl.debug_barrier()
            whole = tl.full([BM, BN], 0.0, tl.float32)
            for i in tl.static_range(SPLIT):
                whole += tl.load(base + i * (BM * BN) + at, cache_modifier=".cg")
            tl.store(tickets + pid, 0)  # ready for the next launch
            _store(whole, gate, b, b, residual, out, row, column, ok, N_OUT, offset, BIAS, RESIDUAL, SWIGLU)


def linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...] | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    span: Span | None = None,
    out: Tensor | None = None,
    tickets: Tensor | None = None,
    how: Tile | None = None,
) -> Tensor:
    """The product of rows with up to three weights, side by side; of two weights when `swiglu`: silu(gate) * up.

    Args:
        x: [N, R, K] contiguous; bfloat16, float16 or float32.
        weights: each [n_i, K], contiguous, in x's dtype.
        biases: each [n_i], for all weights or for none.
        norm: weight [K] and epsilon of an RMSNorm (arXiv 1910.07467) that x goes through first.
        residual: [N, R, sum of n_i], added at the end.
        swiglu: weights are (gate, up) (arXiv 2002.05202).
        span: the rows to compute; None is all of them.
        out: [N, R, sum of n_i or n_0] to write the span's rows into; None makes one.
        tickets: [TICKETS] int32 zeros that no other stream uses at the same time; None makes them where needed.
        how: a tile other than the table's, to be measured.

    Returns:
        out; rows outside the span are left as they were.
    """
    n, r, k = x.shape
    widths = [w.shape[0] for w in weights] + [0] * (3 - len(weights))
    if not x.is_contiguous() or not all(w.is_contiguous() for w in weights):
        raise ValueError("the linear kernel reads rows and weights as they lie: both must be contiguous")
    if swiglu and (len(weights) != 2 or widths[0] != widths[1]):
        raise ValueError("SwiGLU takes two weights of one shape, gate and up")
    span = span or Span(0, r)
    how = how or tile(sum(widths), k)
    if out is None:
        out = x.new_empty(n, r, widths[0] if swiglu else sum(widths))
    m = n * span.width
    if m == 0:
        return out
    if norm is not None and k > SMALL:
        x, norm = norms.rmsnorm(x, *norm), None
    wide = widths[:1] if swiglu else widths
    tiles = triton.cdiv(m, how.m) * sum(triton.cdiv(w, how.n) for w in wide)
    split = 1 if swiglu else how.split
    parts = out
    if split > 1:
        if tiles > TICKETS:
            raise ValueError(f"{m} rows make {tiles} tiles, more than the {TICKETS} that a split product can count")
        tickets = x.new_zeros(TICKETS, dtype=torch.int32) if tickets is None else tickets
        parts = x.new_empty(tiles * split * how.m * how.n, dtype=torch.float32)
    w = (*weights, weights[0], weights[0])[:3]
    b = w if biases is None else (*biases, biases[0], biases[0])[:3]
    _linear[(tiles, split)](
        x, w[0] if norm is None else norm[0], *w, *b, out if residual is None else residual, out, parts,
        out if tickets is None else tickets, n, r, span.first, span.width, 0.0 if norm is None else norm[1],
        K=k, N0=widths[0], N1=widths[1], N2=widths[2],
        BM=how.m, BN=how.n, BK=how.k, BS=min(256, triton.next_power_of_2(k)), SPLIT=split,
        NORM=norm is not None, BIAS=biases is not None, RESIDUAL=residual is not None, SWIGLU=swiglu,
        num_warps=how.warps, num_stages=how.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def reference(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...] | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """The same by torch, as transformers' modules do it."""
    if norm is not None:
        x = norms.reference(x, *norm)
    ys = [functional.linear(x, w, None if biases is None else biases[i]) for i, w in enumerate(weights)]
    y = functional.silu(ys[0]) * ys[1] if swiglu else torch.cat(ys, -1)
    return y if residual is None else residual + y
