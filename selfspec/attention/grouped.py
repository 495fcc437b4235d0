"""Draft groups of a training step by our own kernels; clean rows and every other layout go the way of FlexAttention.

For layers without window, soft-cap and sinks. `selfspec.kernels.groups` has the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.kernels.groups import attend
from selfspec.rows import RowLayout


class Ranges(NamedTuple):
    """What the groups of a forward see of the prefix.

    Attributes:
        lo: int32 [N, A], first slot.
        hi: int32 [N, A], the slot after the last.
        size: rows of a group.
        causal: groups are causal.
    """

    lo: Tensor
    hi: Tensor
    size: int
    causal: bool


def serves(layout: RowLayout, n_keys: int) -> bool:
    """Whether a forward is draft groups of one size over a prefix, and nothing else.

    Args:
        layout: the forward.
        n_keys: K, length of the slot axis.
    """
    return layout.n_clean == 0 and layout.group_size is not None and n_keys > layout.n_rows


def ranges(layout: RowLayout) -> Ranges:
    """The slots that each group of a layout sees: a packed document stands in one piece, from its position 0 on."""
    size = layout.group_size
    assert size is not None and layout.limit is not None
    limit = layout.limit[:, ::size]  # [N, A]
    lo = torch.zeros_like(limit)
    if layout.key_segments is not None and layout.segments is not None:
        mine = layout.segments[:, ::size, None] == layout.key_segments[:, None]  # [N, A, S]
        lo = mine.int().argmax(2)
    return Ranges(lo.int(), (lo + limit).int(), size, layout.causal)


def prepare(rule, window: int | None) -> Ranges:
    """Find the ranges; they serve all layers."""
    return rule.ranges()


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
    """The backend's signature (`selfspec.attention`), for the layouts of `serves`.

    Raises:
        ValueError: a layer with a window, a soft-cap or sinks, or with values wider or narrower than its keys.
    """
    if value.shape[3] != key.shape[3]:
        raise ValueError("grouped attention wants keys and values of one width: use attention=flex")
    if window is not None or softcap is not None or sinks is not None:
        raise ValueError("grouped attention knows no window, soft-cap or sinks: use attention=flex")
    lo, hi, size, causal = rule.ranges()
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    return attend(query, key, value, lo, hi, size, scale, causal)[0]
