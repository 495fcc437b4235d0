"""The best tokens of every row: argmax, or the most probable few in order with their log-probabilities.

A row is cut into stretches, a program each, so that a single row already fills a device. Every score becomes a 64-bit
key that also holds its token: keys are never equal, so the lower token wins a tie and any order of programs gives the
same. `selfspec.tops` has the references.

The most probable K take three launches. The first notes every stretch's peak, and its part of the normaliser. At least
K tokens stand at or above the K-th highest peak, and few more do, wherever the best are spread over the vocabulary: the
second collects those, and the third ranks them by counting who is above whom. In the worst case (all of the best in one
stretch, or all scores equal) this is slower and gives the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens of a stretch
LEAST, MOST = 128, 512  # of a stretch at least, stretches at most
LOWEST = tl.constexpr(-9223372036854775807)  # below every key
NOTHING = tl.constexpr(-2139095041)  # -inf as an ordered integer
LAST = tl.constexpr(0x7FFFFFFF)  # a token in its bits flipped: higher for the lower token
TILE = tl.constexpr(128)  # candidates compared at a time


@triton.jit
def _keys(x, token, live):
    """Higher for higher scores, of equal ones for the lower token. int64"""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (token.to(tl.int64) ^ LAST)
    return tl.where(live, key, LOWEST)


@triton.jit
def _score(key):
    """float32"""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _token(key):
    """int64"""
    return (key & 0xFFFFFFFF) ^ LAST


@triton.jit
def _stretch(x, inner, outer_stride, stride, vocab, BLOCK: tl.constexpr):
    """Scores of this program's stretch, its tokens, and which of them exist."""
    row, token = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * stride
    return tl.load(x + start + token, live, -float("inf")).to(tl.float32), token, live


@triton.jit(do_not_specialize=["inner"])
def _peaks(
    x, peaks, sums, counts, inner, outer_stride, stride, vocab, BLOCK: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    """The best key of a stretch, and its sum of exponentials over its peak."""
    row, part = tl.program_id(0), tl.program_id(1)
    v, token, live = _stretch(x, inner, outer_stride, stride, vocab, BLOCK)
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, tl.max(_keys(v, token, live), 0))
    if SUMS:
        exps = tl.exp(v - tl.max(v, 0))
        tl.store(sums + place, tl.sum(tl.where(v > -float("inf"), exps, 0.0), 0))
        if part == 0:
            tl.store(counts + row, 0)


@triton.jit(do_not_specialize=["inner", "parts"])
def _first(peaks, anchor, out, inner, parts, PARTS: tl.constexpr, LEAD: tl.constexpr):
    """A row's best token; with LEAD each request's rows stand behind its anchor."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(peaks + row * parts + part, part < parts, LOWEST), 0)
    place = row
    if LEAD:
        n = row // inner
        place = row + n + 1
        if row % inner == 0:
            tl.store(out + place - 1, tl.load(anchor + n))
    tl.store(out + place, _token(best))


@triton.jit(do_not_specialize=["inner", "parts", "room", "k"])
def _collect(
    x, peaks, counts, found, inner, outer_stride, stride, vocab, parts, room, k,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Keys of a stretch that may be among the row's best k, into the row's list, in any order."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, PARTS)
    highs = tl.load(peaks + row * parts + column, column < parts, LOWEST) >> 32
    # the largest number, but for its lower 16 bits, that k peaks reach; the smallest of all where there are fewer peaks
    low = row.to(tl.int64) * 0 - 2147483648
    step = low * 0 + 2147483648
    for _ in range(16):
        enough = tl.sum((highs >= low + step).to(tl.int32), 0) >= k
        low = tl.where(enough, low + step, low)
        step = step >> 1
    low = tl.maximum(low, NOTHING + 1) << 32  # what is impossible is no candidate
    best = tl.load(peaks + row * parts + part)
    if best >= low:
        v, token, live = _stretch(x, inner, outer_stride, stride, vocab, BLOCK)
        keys = _keys(v, token, live)
        n = tl.minimum(tl.sum((keys >= low).to(tl.int32), 0), k)
        slot = found + row.to(tl.int64) * room + tl.atomic_add(counts + row, n)
        for i in range(n):
            tl.store(slot + i, best)
            keys = tl.where(keys == best, LOWEST, keys)
            best = tl.max(keys, 0)


@triton.jit
def _normaliser(peaks, sums, row, parts, PARTS: tl.constexpr):
    """log sum exp of a row, from its stretches."""
    column = tl.arange(0, PARTS)
    held = column < parts
    peak = _score(tl.load(peaks + row * parts + column, held, LOWEST))
    some = held & (peak > -float("inf"))
    high = tl.max(tl.where(some, peak, -float("inf")), 0)
    mass = tl.load(sums + row * parts + column, held, 0.0)
    return high + tl.log(tl.sum(tl.where(some, mass * tl.exp(peak - high), 0.0), 0))


@triton.jit(do_not_specialize=["parts", "room", "k"])
def _rank(peaks, sums, counts, found, top, ids, parts, room, k, PARTS: tl.constexpr, KB: tl.constexpr):
    """A row's candidates to their places."""
    row = tl.program_id(0)
    norm = _normaliser(peaks, sums, row, parts, PARTS)
    count = tl.load(counts + row)
    found += row.to(tl.int64) * room
    place = row * k + tl.arange(0, KB)
    missing = (tl.arange(0, KB) >= count) & (tl.arange(0, KB) < k)
    tl.store(top + place, tl.full([KB], -float("inf"), tl.float32), missing)
    tl.store(ids + place, tl.zeros([KB], tl.int64), missing)
    for a in range(0, count, TILE):
        mine = a + tl.arange(0, TILE)
        key = tl.load(found + mine, mine < count, LOWEST)
        rank = tl.zeros([TILE], tl.int32)
        for b in range(0, count, TILE):
            other = b + tl.arange(0, TILE)
            above = tl.load(found + other, other < count, LOWEST)[None, :] > key[:, None]
            rank += tl.sum(above.to(tl.int32), 1)
        good = (mine < count) & (rank < k)
        tl.store(top + row * k + rank, _score(key) - norm, good)
        tl.store(ids + row * k + rank, _token(key), good)


def best(x: Tensor, anchor: Tensor | None = None) -> Tensor:
    """`tops.best`, or `tops.chain` with an anchor. [N, T, V] -> [N, T] or [N, T + 1] long"""
    x, n, t, vocab = _dense(x)
    parts = triton.cdiv(vocab, BLOCK)
    peaks = torch.empty(n * t, parts, dtype=torch.long, device=x.device)
    out = torch.empty(n, t + (anchor is not None), dtype=torch.long, device=x.device)
    strides = x.stride()[:2]
    _peaks[(n * t, parts)](x, peaks, peaks, peaks, t, *strides, vocab, BLOCK=BLOCK, SUMS=False, num_warps=4)
    _first[(n * t,)](
        peaks, out if anchor is None else anchor.contiguous(), out, t, parts,
        PARTS=triton.next_power_of_2(parts), LEAD=anchor is not None, num_warps=1,
    )  # fmt: skip
    return out


def ranked(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`tops.ranked`. [N, T, V] -> float32, long [N, T, K]"""
    x, n, t, vocab = _dense(x)
    block = stretch(vocab, k)
    parts = triton.cdiv(vocab, block)
    padded, rows, room = triton.next_power_of_2(parts), n * t, parts * min(k, block)
    peaks = torch.empty(rows, parts, dtype=torch.long, device=x.device)
    sums = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    counts = torch.empty(rows, dtype=torch.int32, device=x.device)
    found = torch.empty(rows, room, dtype=torch.long, device=x.device)
    top = torch.empty(n, t, k, dtype=torch.float32, device=x.device)
    ids = torch.empty(n, t, k, dtype=torch.long, device=x.device)
    where = (t, *x.stride()[:2], vocab)
    warps = max(1, block // 256)
    _peaks[(rows, parts)](
        x, peaks, sums, counts, *where, BLOCK=block, SUMS=True, num_warps=warps, enable_fp_fusion=False
    )
    _collect[(rows, parts)](x, peaks, counts, found, *where, parts, room, k, BLOCK=block, PARTS=padded, num_warps=warps)
    _rank[(rows,)](
        peaks, sums, counts, found, top, ids, parts, room, k,
        PARTS=padded, KB=triton.next_power_of_2(k), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return top, ids


def stretch(vocab: int, k: int) -> int:
    """Tokens of a stretch: half as many stretches again as are asked for, so that their peaks tell most of the rest."""
    block = BLOCK
    while block > LEAST and 2 * triton.cdiv(vocab, block) < 3 * k:
        block //= 2
    while triton.cdiv(vocab, block) > MOST:
        block *= 2
    return block


def _dense(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x as [N, T, V] with dense rows, and its sizes."""
    x = x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
    return (x if x.stride(2) == 1 else x.contiguous()), *x.shape
