"""A fixed number of drafts: what most systems do, and the baseline of every other rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fixed:
    """Always `length` drafts, or all where there are fewer."""

    length: int
    in_order = True

    def __call__(self, confidence: Tensor) -> Tensor:
        """[N, T] -> [N] long."""
        return torch.full_like(confidence[:, 0], min(self.length, confidence.shape[1]), dtype=torch.long)
