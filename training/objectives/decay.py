"""Means over slots that count less the later they stand (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.slots import Slots


class Weighted:
    """`sum_k w_k X_k / sum_k w_k`; a subclass says what w and X are."""

    def each(self, slots: Slots) -> Tensor:
        """X of every slot. [G, T]"""
        raise NotImplementedError

    def weights(self, steps: Tensor) -> Tensor:
        """w of every slot. [T] -> [T]"""
        raise NotImplementedError

    def total(self, slots: Slots) -> Tensor:
        """sum of w_k X_k"""
        return (self.weights(slots.steps) * torch.where(slots.valid, self.each(slots), 0)).sum()

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """sum of w_k"""
        return (self.weights(steps) * valid).sum()


@dataclass(frozen=True)
class Decayed(Weighted):
    """`w_k = exp(-(k - 1) / gamma)`.

    Attributes:
        gamma: decay length in slots; None weighs all slots alike.
    """

    gamma: float | None = 7.0

    def weights(self, steps: Tensor) -> Tensor:
        """w of every slot. [T] -> [T]"""
        return decay(steps, self.gamma)


class PerGroup:
    """A mean over groups that have a draft; a subclass gives the total."""

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """Groups with a draft."""
        return (valid & (steps >= 1)).any(1).sum()


def decay(steps: Tensor, gamma: float | None) -> Tensor:
    """w_k; a hidden bonus (k = 0) counts as the first draft does. [T] -> [T]"""
    k = steps.clamp(min=1).float()
    return torch.ones_like(k) if gamma is None else torch.exp(-(k - 1) / gamma)
