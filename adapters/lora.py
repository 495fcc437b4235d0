"""Low-rank deltas on the base weights of draft rows (LoRA, arXiv 2106.09685; gated per row as in arXiv 2507.11851)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from selfspec.adapters.attention import CopyDelta


class LoraDelta(nn.Module):
    """`base(x) + alpha / rank * B A x`, with B = 0 at the start, so that a fresh path drafts like the base model.

    Args:
        base: the Linear that is tuned; not kept.
        rank: rank of the delta.
        alpha: scale.
        dtype: of A and B.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dtype: torch.dtype | None = None):
        super().__init__()
        dtype = dtype or base.weight.dtype
        device = base.weight.device
        self.A = nn.Parameter(torch.empty(rank, base.in_features, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x: Tensor, base: nn.Module) -> Tensor:
        """[N, D, in] -> [N, D, out]"""
        low = nn.functional.linear(x, self.A.to(x.dtype))
        return base(x) + nn.functional.linear(low, self.B.to(x.dtype)) * self.scale

    @torch.no_grad()
    def whole(self, base: nn.Linear) -> CopyDelta:
        """The same as one weight, for decoding; added up in float32 at least, and stored as the base's."""
        out = CopyDelta(base)
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        out.weight.copy_(base.weight.to(wide) + self.scale * (self.B.to(wide) @ self.A.to(wide)))
        return out
