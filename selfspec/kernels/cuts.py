"""Cuts of a distribution's tail over each row's best columns: top-k, top-p, min-p and typical-p in one launch.

transformers' formulas over columns that fall; a cut's sums are made in a fixed order of the columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax(s):
    """Probabilities of a row that holds one finite score at least."""
    e = tl.exp(s - tl.max(s, 0))
    return tl.div_rn(e, tl.sum(e, 0) + tl.zeros_like(e))


@triton.jit(do_not_specialize=["vocab", "k", "keep_p", "keep_min", "keep_mass"])
def _cut(
    scores, top, ids, out, vocab, k, beyond, keep_p, min_p, keep_min, mass, keep_mass, COLUMNS: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """A row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    place = row * COLUMNS + column
    live = tl.load(top + place) > -float("inf")
    s = tl.load(scores + row * vocab + tl.load(ids + place), live, -float("inf"))
    s = tl.where(s < tl.max(tl.where(column == k - 1, s, -float("inf")), 0), -float("inf"), s)
    if TOP_P:
        s = tl.where((tl.cumsum(_softmax(s), 0, reverse=True) <= beyond) & (column >= keep_p), -float("inf"), s)
    if MIN_P:
        p = _softmax(s)
        s = tl.where((p < min_p * tl.max(p, 0)) & (column >= keep_min), -float("inf"), s)
    if TYPICAL:
        best = tl.max(s, 0)
        e = tl.exp(s - best)
        log_p = s - best - tl.log(tl.sum(e, 0))
        p = tl.exp(log_p)
        entropy = -tl.sum(tl.where(s > -float("inf"), log_p * p, 0.0), 0)
        far = tl.abs(-log_p - entropy)
        before = (far[None, :] < far[:, None]) | ((far[None, :] == far[:, None]) & (column[None, :] < column[:, None]))
        rank = tl.sum(before.to(tl.int32), 1)
        p = tl.div_rn(e, tl.sum(e, 0) + tl.zeros_like(e))
        total = p + tl.sum(tl.where(before, p[None, :], 0.0), 1)
        last = tl.minimum(tl.sum((total < mass).to(tl.int32), 0), COLUMNS - 1)
        limit = tl.max(tl.where(rank == last, far, 0.0), 0)
        s = tl.where((far > limit) & (rank >= keep_mass), -float("inf"), s)
    tl.store(out + place, s)


def cut(scores: Tensor, top: Tensor, ids: Tensor, cuts: dict[str, tuple[float, int]]) -> Tensor:
    """Scores of the columns, -inf for those that are cut.

    Args:
        scores: [N, M, V] float32
        top: [N, M, C] float32, falling; -inf where a row has fewer tokens. C is a power of two.
        ids: [N, M, C] long, the columns' tokens.
        cuts: of transformers' classes in `recipe.KERNEL`'s order, a threshold and the tokens that are kept in any case.

    Returns:
        [N, M, C] float32
    """
    out = torch.empty_like(top)
    columns = top.shape[-1]
    (k, _), nothing = cuts["TopKLogitsWarper"], (0.0, 1)
    p, keep_p = cuts.get("TopPLogitsWarper", nothing)
    min_p, keep_min = cuts.get("MinPLogitsWarper", nothing)
    mass, keep_mass = cuts.get("TypicalLogitsWarper", nothing)
    _cut[(out.numel() // columns,)](
        scores.contiguous(), top, ids, out, scores.shape[-1], k, 1 - p, keep_p, min_p, keep_min, mass, keep_mass,
        COLUMNS=columns, TOP_P="TopPLogitsWarper" in cuts, MIN_P="MinPLogitsWarper" in cuts,
        TYPICAL="TypicalLogitsWarper" in cuts, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out
