"""Attention tuning: draft rows use their own copies of whole projections (Orthrus, arXiv 2605.12825;
FlexDraft, arXiv 2605.20022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CopyDelta(nn.Module):
    """A trainable copy of a Linear's weight that takes the place of the base for draft rows.

    Args:
        base: the Linear that is copied.
        dtype: of the copy.
    """

    is_linear = True  # no more than its own weight and bias

    def __init__(self, base: nn.Linear, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach().to(dtype or base.weight.dtype, copy=True))
        bias = getattr(base, "bias", None)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(self.weight.dtype, copy=True))

    def forward(self, x: Tensor, base: nn.Module) -> Tensor:
        """[N, D, in] -> [N, D, out]"""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)
