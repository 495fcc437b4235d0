"""Counter-based Gumbel noise added to scores, and the best token of every row, in one reading of the scores.

`selfspec.sampling` is the reference: the same integers to the bit, the same float64 operations in the same order. Only
the logarithm is each library's own, so a device may choose another token where two sums agree to their last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens of a program


@triton.jit
def _mixed(h, part):
    """One link of `sampling.hashed`. int64, which wraps."""
    x = h + part + -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(seed, position, token):
    """`sampling.gumbel` of tokens, float64. seed, position: int64 numbers."""
    zero = tl.zeros_like(token).to(tl.int64)
    h = _mixed(_mixed(_mixed(zero, seed), position), token.to(tl.int64))
    uniform = (((h >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["vocab"])
def _noise(scores, seeds, positions, best, at, noisy, vocab, BLOCK: tl.constexpr, WRITE: tl.constexpr):
    """A stretch of a row's vocabulary: its best sum and that one's token, or all sums in float32."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    gumbel = _gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    at_row = row.to(tl.int64) * vocab
    total = tl.load(scores + at_row + token, live, 0.0).to(tl.float64) + gumbel
    if WRITE:
        tl.store(noisy + at_row + token, total.to(tl.float32), live)
    else:
        low = tl.full([BLOCK], -float("inf"), tl.float64)
        high, index = tl.max(tl.where(live, total, low), 0, return_indices=True, return_indices_tie_break_left=True)
        place = row * tl.num_programs(1) + part
        tl.store(best + place, high)
        tl.store(at + place, part * BLOCK + index)


@triton.jit(do_not_specialize=["parts"])
def _first_best(best, at, out, parts, BLOCK: tl.constexpr):
    """Of a row's stretches the best, the first of equals."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    sums = tl.load(best + row * parts + part, part < parts, -float("inf"))
    _, index = tl.max(sums, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(at + row * parts + index).to(tl.int64))


@triton.jit(do_not_specialize=["k"])
def _few(scores, ids, seeds, positions, out, noisy, k, BLOCK: tl.constexpr, WRITE: tl.constexpr):
    """A row's few tokens: the one of the best sum, of equals the lowest, or all sums in float32."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    live = at < k
    token = tl.load(ids + row * k + at, live, 0)
    gumbel = _gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    total = tl.load(scores + row * k + at, live, -float("inf")).to(tl.float64) + gumbel
    if WRITE:
        tl.store(noisy + row * k + at, total.to(tl.float32), live)
    else:
        high = tl.max(total, 0)
        tl.store(out + row, tl.min(tl.where(live & (total == high), token, 0x7FFFFFFFFFFFFFFF), 0))


def draw(scores: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """`sampling.draw`: argmax of scores + noise, the first of equals. [R, V], [R], [R] -> [R] long"""
    scores, seed, position = scores.contiguous(), seed.contiguous(), position.contiguous()
    rows, vocab = scores.shape
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty(rows, parts, dtype=torch.float64, device=scores.device)
    at = torch.empty(rows, parts, dtype=torch.int32, device=scores.device)
    out = torch.empty(rows, dtype=torch.long, device=scores.device)
    if rows:
        _noise[(rows, parts)](
            scores, seed, position, best, at, best, vocab, BLOCK=BLOCK, WRITE=False, enable_fp_fusion=False
        )
        _first_best[(rows,)](best, at, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return out


def noisy(scores: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """`sampling.noisy`: scores + noise, summed in float64. [R, V], [R], [R] -> [R, V] float32"""
    scores, seed, position = scores.contiguous(), seed.contiguous(), position.contiguous()
    rows, vocab = scores.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=scores.device)
    if rows:
        _noise[(rows, triton.cdiv(vocab, BLOCK))](
            scores, seed, position, out, out, out, vocab, BLOCK=BLOCK, WRITE=True, enable_fp_fusion=False
        )
    return out


def draw_among(scores: Tensor, ids: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """`sampling.draw_among`. [R, K], [R, K], [R], [R] -> [R] long"""
    out = torch.empty(len(scores), dtype=torch.long, device=scores.device)
    _launch_few(scores, ids, seed, position, out, False)
    return out


def noisy_among(scores: Tensor, ids: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """`sampling.noisy_among`. [R, K], [R, K], [R], [R] -> [R, K] float32"""
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    _launch_few(scores, ids, seed, position, out, True)
    return out


def _launch_few(scores: Tensor, ids: Tensor, seed: Tensor, position: Tensor, out: Tensor, write: bool) -> None:
    """Either of the two."""
    rows, k = scores.shape
    if rows:
        _few[(rows,)](
            scores.contiguous(), ids.contiguous(), seed.contiguous(), position.contiguous(), out, out, k,
            BLOCK=triton.next_power_of_2(k), WRITE=write, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
