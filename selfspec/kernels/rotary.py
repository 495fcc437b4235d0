"""Queries, keys and values of new rows: per-head norm, rotary positions, and into the cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels import norm as norms


@triton.jit
def _part(x, d, ok, squares, norm, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Elements d of a head, normalised. float32, rounded to the dtype of x on the way."""
    v = tl.load(x + d, ok, 0.0)
    if NORM:
        v = (v.to(tl.float32) * tl.rsqrt(squares / D + eps)).to(v.dtype).to(tl.float32)
        v = (v * tl.load(norm + d, ok, 0.0).to(tl.float32)).to(x.dtype.element_ty)
    return v.to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "slot_stride", "scn", "scr", "skn", "skh", "svn", "svh"])
def _rotary(
    qkv, cos, sin, q_norm, k_norm, queries, keys, values, requests, slots,
    n_rows, slot_stride, scn, scr, skn, skh, svn, svh, q_eps, k_eps,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head of one row. Rounds to the dtype after every step, as torch's separate kernels do."""
    row, head = tl.program_id(0), tl.program_id(1)
    n, r = row // n_rows, row % n_rows
    d = tl.arange(0, BD)
    ok = d < D
    x = qkv + row.to(tl.int64) * ((H + 2 * HKV) * D) + head * D
    kind = qkv.dtype.element_ty
    request = tl.load(requests + n).to(tl.int64)
    slot = tl.load(slots + n * slot_stride + r).to(tl.int64)
    if head >= H + HKV:
        tl.store(values + request * svn + (head - H - HKV) * svh + slot * D + d, tl.load(x + d, ok, 0.0), ok)
    else:
        squares = 0.0
        if NORM:
            v = tl.load(x + d, ok, 0.0).to(tl.float32)
            squares = tl.sum(v * v, 0)
        norm, eps = q_norm, q_eps
        if head >= H:
            norm, eps = k_norm, k_eps
        turned = d < P
        partner = tl.where(d < P // 2, d + P // 2, d - P // 2)
        partner = tl.where(turned, partner, d)
        a = _part(x, d, ok, squares, norm, eps, D, NORM)
        b = _part(x, partner, ok, squares, norm, eps, D, NORM)
        c = tl.load(cos + n * scn + r * scr + d, turned, 0.0).to(tl.float32)
        s = tl.load(sin + n * scn + r * scr + d, turned, 0.0).to(tl.float32)
        b = tl.where(d < P // 2, -b, b)
        y = (a * c).to(kind).to(tl.float32) + (b * s).to(kind).to(tl.float32)
        y = tl.where(turned, y, a).to(kind)
        if head < H:
            tl.store(queries + (row.to(tl.int64) * H + head) * D + d, y, ok)
        else:
            tl.store(keys + request * skn + (head - H) * skh + slot * D + d, y, ok)


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    requests: Tensor,
    slots: Tensor,
    q_norm: tuple[Tensor, float] | None = None,
    k_norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Rotate queries and keys (RoFormer, arXiv 2104.09864, in transformers' half-split order), and store keys and
    values.

    Args:
        qkv: [N, R, (H + 2 Hkv) * D] contiguous: the projections side by side.
        cos: [N or 1, R, P], P <= D: the first P elements of a head are rotated.
        sin: like cos, in its strides too.
        keys: [requests, Hkv, S, D], the whole cache; a slot's D elements are dense.
        values: likewise.
        requests: [N, 1] or [N], each request's index in the cache.
        slots: [N, R or more], each row's slot.
        q_norm: weight [D] and epsilon of an RMSNorm over each head (Qwen3, arXiv 2505.09388).
        k_norm: the keys' own; both or none.

    Returns:
        Queries, [N, H, R, D], a view of [N, R, H, D].
    """
    n, r, total = qkv.shape
    hkv, d, p = keys.shape[1], keys.shape[3], cos.shape[-1]
    h = total // d - 2 * hkv
    if keys.stride(2) != d or values.stride(2) != d or values.shape[3] != d:
        raise ValueError("the rotary kernel stores keys and values of one size, each slot dense")
    if cos.stride() != sin.stride() or cos.stride(-1) != 1 or slots.stride(1) != 1:
        raise ValueError("the rotary kernel reads cos and sin, and slots, along dense rows")
    queries = qkv.new_empty(n, r, h, d)
    if n * r == 0:
        return queries.transpose(1, 2)
    qw, qe = q_norm or (qkv, 0.0)
    kw, ke = k_norm or (qkv, 0.0)
    _rotary[(n * r, h + 2 * hkv)](
        qkv, cos, sin, qw, kw, queries, keys, values, requests, slots,
        r, slots.stride(0), cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), qe, ke,
        H=h, HKV=hkv, D=d, P=p, BD=triton.next_power_of_2(d), NORM=q_norm is not None,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return queries.transpose(1, 2)


def reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv: int,
    q_norm: tuple[Tensor, float] | None = None,
    k_norm: tuple[Tensor, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch. Returns queries [N, H, R, D], keys and values [N, Hkv, R, D]."""
    n, r, total = qkv.shape
    d, p = total // (n_heads + 2 * n_kv), cos.shape[-1]
    q, k, v = qkv.view(n, r, -1, d).transpose(1, 2).split([n_heads, n_kv, n_kv], 1)
    q = q if q_norm is None else norms.reference(q, *q_norm)
    k = k if k_norm is None else norms.reference(k, *k_norm)
    return _turn(q, cos, sin, p), _turn(k, cos, sin, p), v


def _turn(x: Tensor, cos: Tensor, sin: Tensor, p: int) -> Tensor:
    a, rest = x[..., :p], x[..., p:]
    half = torch.cat([-a[..., p // 2 :], a[..., : p // 2]], -1)
    return torch.cat([a * cos[:, None] + half * sin[:, None], rest], -1)
