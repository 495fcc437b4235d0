"""The reference backend: torch's scaled dot product attention under the dense mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def prepare(rule, window: int | None) -> Tensor:
    """Build the dense mask."""
    return rule.mask(window)


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
    """Grouped-query attention; the heads of a group ride as extra rows, so that no key is repeated.

    Args:
        query: [N, H, R, D]
        key: [N, Hkv, K, D]
        value: [N, Hkv, K, Dv]
        rule: the forward's `AttentionRule`.
        window: sliding window in positions, or None.
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: [H] one extra logit per head in the softmax's denominator (gpt-oss).

    Returns:
        [N, H, R, Dv]
    """
    n, h, r, d = query.shape
    hkv = key.shape[1]
    mask = rule.mask(window)[:, None]  # [N, 1, R, K]
    rows = query.reshape(n, hkv, (h // hkv) * r, d)
    mask = mask.repeat(1, 1, h // hkv, 1)  # [N, 1, G * R, K]
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return out.reshape(n, h, r, -1)
    scores = rows @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores).reshape(1, hkv, -1, 1, 1).expand(n, -1, -1, r, 1).reshape(n, hkv, -1, 1)
        scores = torch.cat([scores, sink], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(value.dtype)
    return (weights[..., : key.shape[2]] @ value).reshape(n, h, r, -1)
