"""Attention backends behind one signature, and the function that transformers' layers call.

A backend is `fn(query [N, H, R, D], key [N, Hkv, K, D], value [N, Hkv, K, Dv], rule, window, scale, softcap, sinks)` and
returns [N, H, R, Dv]; `rule` is the `AttentionRule` of the forward. Each stands in its own file and in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from selfspec.attention.flex import block_mask, flex
from selfspec.attention.sdpa import sdpa
from selfspec.rows import RowLayout, attention_rule

BACKENDS: dict[str, Callable[..., Tensor]] = {"sdpa": sdpa, "flex": flex}
NAME = "selfspec"  # this package's entry in transformers' AttentionInterface


class AttentionRule:
    """The attention rule of one forward, handed to the layers in place of a mask tensor.

    Args:
        layout: the forward.
        n_keys: K, length of the slot axis that attention reads.
        backend: a name in `BACKENDS`.
    """

    def __init__(self, layout: RowLayout, n_keys: int, backend: str = "sdpa"):
        self.layout, self.n_keys, self.backend = layout, n_keys, BACKENDS[backend]
        self._masks: dict[int | None, Tensor] = {}
        self._blocks: dict[int | None, Any] = {}

    def mask(self, window: int | None) -> Tensor:
        """The dense mask, built once per window. bool [N, R, K]"""
        if window not in self._masks:
            self._masks[window] = attention_rule(self.layout, self.n_keys, window)
        return self._masks[window]

    def blocks(self, window: int | None):
        """The rule as FlexAttention's `BlockMask`, built once per window."""
        if window not in self._blocks:
            self._blocks[window] = block_mask(self.layout, self.n_keys, window)
        return self._blocks[window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionRule,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface over an `AttentionRule`. Returns ([N, R, H, Dv], None)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_mask.backend(query, key, value, attention_mask, sliding_window, scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
