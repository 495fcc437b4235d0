"""Attention of a training step's draft groups, forward and backward: a range of the prefix, and a group's own rows.

One program holds all rows of a group that share keys (its G query heads by its B rows), and walks over the slots that
the group sees: nothing else is read, and no mask is. The prefix is a constant of the loss, so the backward pass has no
gradient for it, and as nobody but a group reads its own keys, none is added up across programs.
`selfspec.attention.sdpa` over the dense mask is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS = 64  # keys of the prefix looked at together
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q, k, v, lo, hi, out, lse, scale, n_groups, per_kv, prefix,
    q_n, q_h, q_r, k_n, k_h, k_r, v_n, v_h, v_r, n_rows,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    M: tl.constexpr, B: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Output and log-normaliser (base 2) of a group's rows under one head of keys."""
    a, kv, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, lane, mate = tl.arange(0, M), tl.arange(0, D), tl.arange(0, B)
    row, head = m % SIZE, kv * per_kv + m // SIZE
    live = m < SIZE * per_kv
    here = lane < WIDTH
    first = a * SIZE
    at_q = n.to(tl.int64) * q_n + head[:, None] * q_h + (first + row)[:, None] * q_r + lane
    x = tl.load(q + at_q, live[:, None] & here, 0.0)
    k += n.to(tl.int64) * k_n + kv * k_h
    v += n.to(tl.int64) * v_n + kv * v_h
    factor = scale * LOG2E
    # its own rows first: every row sees itself, so that the maximum is finite from here on
    own = prefix + first + mate
    own_keys = tl.load(k + own[:, None] * k_r + lane, (mate < SIZE)[:, None] & here, 0.0)
    own_values = tl.load(v + own[:, None] * v_r + lane, (mate < SIZE)[:, None] & here, 0.0)
    seen = (mate < SIZE)[None, :] & ((mate[None, :] <= row[:, None]) | (not CAUSAL))
    own_s = tl.where(seen, tl.dot(x, tl.trans(own_keys)) * factor, -float("inf"))
    high = tl.max(own_s, 1)
    own_p = tl.exp2(own_s - high[:, None])
    mass = tl.sum(own_p, 1)
    acc = tl.dot(own_p.to(own_values.dtype), own_values)
    start, stop = tl.load(lo + n * n_groups + a), tl.load(hi + n * n_groups + a)
    for slot in range(start, stop, SLOTS):
        at = slot + tl.arange(0, SLOTS)
        some = at < stop
        keys = tl.load(k + at[:, None] * k_r + lane, some[:, None] & here, 0.0)
        s = tl.where(some[None, :], tl.dot(x, tl.trans(keys)) * factor, -float("inf"))
        top = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(high - top)
        mass = mass * shrink + tl.sum(p, 1)
        values = tl.load(v + at[:, None] * v_r + lane, some[:, None] & here, 0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values)
        high = top
    at_out = (n.to(tl.int64) * tl.num_programs(1) * per_kv + head) * n_rows + first + row
    tl.store(out + at_out[:, None] * WIDTH + lane, acc / mass[:, None], live[:, None] & here)
    tl.store(lse + at_out, high + tl.log2(mass), live)


@triton.jit
def _gradients(
    q, k, v, lo, hi, out, lse, grad, dq, dk, dv, scale, n_groups, per_kv, prefix,
    q_n, q_h, q_r, k_n, k_h, k_r, v_n, v_h, v_r, g_n, g_h, g_r, n_rows, n_keys,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    M: tl.constexpr, B: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Gradients of a group's queries, and of its own keys and values, under one head of keys."""
    a, kv, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, lane, mate = tl.arange(0, M), tl.arange(0, D), tl.arange(0, B)
    row, head = m % SIZE, kv * per_kv + m // SIZE
    live = m < SIZE * per_kv
    here = lane < WIDTH
    first = a * SIZE
    at_q = n.to(tl.int64) * q_n + head[:, None] * q_h + (first + row)[:, None] * q_r + lane
    x = tl.load(q + at_q, live[:, None] & here, 0.0)
    at_g = n.to(tl.int64) * g_n + head[:, None] * g_h + (first + row)[:, None] * g_r + lane
    g = tl.load(grad + at_g, live[:, None] & here, 0.0)
    at_out = (n.to(tl.int64) * tl.num_programs(1) * per_kv + head) * n_rows + first + row
    y = tl.load(out + at_out[:, None] * WIDTH + lane, live[:, None] & here, 0.0)
    norm = tl.load(lse + at_out, live, 0.0)
    delta = tl.sum(g.to(tl.float32) * y.to(tl.float32), 1)
    k += n.to(tl.int64) * k_n + kv * k_h
    v += n.to(tl.int64) * v_n + kv * v_h
    factor = scale * LOG2E
    own = prefix + first + mate
    mates = (mate < SIZE)[:, None] & here
    own_keys = tl.load(k + own[:, None] * k_r + lane, mates, 0.0)
    own_values = tl.load(v + own[:, None] * v_r + lane, mates, 0.0)
    seen = (mate < SIZE)[None, :] & ((mate[None, :] <= row[:, None]) | (not CAUSAL)) & live[:, None]
    own_p = tl.where(seen, tl.exp2(tl.dot(x, tl.trans(own_keys)) * factor - norm[:, None]), 0.0)
    own_ds = own_p * (tl.dot(g, tl.trans(own_values)) - delta[:, None]) * scale
    acc = tl.dot(own_ds.to(own_keys.dtype), own_keys)
    at_kv = ((n.to(tl.int64) * tl.num_programs(1) + kv) * n_keys + own)[:, None] * WIDTH + lane
    tl.store(dk + at_kv, tl.dot(tl.trans(own_ds.to(x.dtype)), x), mates)
    tl.store(dv + at_kv, tl.dot(tl.trans(own_p.to(g.dtype)), g), mates)
    start, stop = tl.load(lo + n * n_groups + a), tl.load(hi + n * n_groups + a)
    for slot in range(start, stop, SLOTS):
        at = slot + tl.arange(0, SLOTS)
        some = at < stop
        keys = tl.load(k + at[:, None] * k_r + lane, some[:, None] & here, 0.0)
        values = tl.load(v + at[:, None] * v_r + lane, some[:, None] & here, 0.0)
        p = tl.where(some[None, :], tl.exp2(tl.dot(x, tl.trans(keys)) * factor - norm[:, None]), 0.0)
        ds = p * (tl.dot(g, tl.trans(values)) - delta[:, None]) * scale
        acc += tl.dot(ds.to(keys.dtype), keys)
    tl.store(dq + at_out[:, None] * WIDTH + lane, acc, live[:, None] & here)


@torch.library.custom_op(
    "selfspec::groups",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor lo, Tensor hi, int size, float scale, bool causal) "
    "-> (Tensor, Tensor)",
)
def attend(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, size: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of groups, one after another in the row axis.

    Args:
        q: [N, H, A * B, D]
        k: [N, Hkv, S + A * B, D], the prefix and then the groups' own rows.
        v: likewise.
        lo: int32 [N, A], first slot of the prefix that a group sees.
        hi: int32 [N, A], the slot after its last.
        size: B.
        scale: factor on the scores.
        causal: a row sees its group up to itself.

    Returns:
        [N, H, A * B, D], and the base-2 logarithm of each row's normaliser [N, H, A * B] float32
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    grid, shape, tiles = _launch(q, k, lo, size, causal)
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    _attend[grid](q, k, v, lo, hi, out, lse, scale, *shape, *steps, q.shape[2], **tiles, num_warps=4)
    return out, lse


@attend.register_fake
def _(q, k, v, lo, hi, size, scale, causal):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "selfspec::groups_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor lo, Tensor hi, Tensor out, Tensor lse, Tensor grad, int size, "
    "float scale, bool causal) -> (Tensor, Tensor, Tensor)",
)
def gradients(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    size: int, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `attend`'s q, k and v; those of the prefix are 0, as it is a constant of the loss."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    grid, shape, tiles = _launch(q, k, lo, size, causal)
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3])
    _gradients[grid](
        q, k, v, lo, hi, out, lse, grad, dq, dk, dv, scale, *shape, *steps, q.shape[2], k.shape[2], **tiles, num_warps=4
    )
    return dq, dk, dv


@gradients.register_fake
def _(q, k, v, lo, hi, out, lse, grad, size, scale, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, lo, hi, ctx.size, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, lo, hi, *output)


def _backward(ctx, grad, _):
    if grad.stride(3) != 1:
        grad = grad.contiguous()
    found = gradients(*ctx.saved_tensors, grad, ctx.size, ctx.scale, ctx.causal)
    return *found, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)


def _launch(q: Tensor, k: Tensor, lo: Tensor, size: int, causal: bool):
    """Grid, sizes and tiles of both kernels.

    Raises:
        ValueError: rows are no whole groups.
    """
    n, h, r, d = q.shape
    n_groups, per_kv = lo.shape[1], h // k.shape[1]
    if n_groups * size != r:
        raise ValueError(f"{r} rows are not {n_groups} groups of {size}")
    tiles = dict(
        SIZE=size, WIDTH=d, CAUSAL=causal, M=max(16, triton.next_power_of_2(size * per_kv)),
        B=max(16, triton.next_power_of_2(size)), D=max(16, triton.next_power_of_2(d)), SLOTS=SLOTS,
    )  # fmt: skip
    return (n_groups, k.shape[1], n), (n_groups, per_kv, k.shape[2] - r), tiles
