"""AdaFlash's length head (arXiv 2607.19223): a head on the draft rows says how long the draft will be accepted.

It is trained on the accepted length of past drafts; verified are

    d = round(E[accepted] + lookahead),

one more than expected, so that a run longer than foreseen isn't cut and the head sees that it was too low. Good where a
path has the head: one number per block, which also knows what single positions' confidences don't.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdaFlash:
    """The expected length and a little more.

    Attributes:
        lookahead: drafts beyond the expectation.
    """

    lookahead: float = 1.0
    in_order = False  # the head reads the rows of the whole block

    def __call__(self, lengths: Tensor) -> Tensor:
        """[N, T + 1] probabilities of 0..T accepted drafts -> [N] long, at least 1."""
        t = lengths.shape[1] - 1
        mean = (lengths.float() * torch.arange(t + 1, device=lengths.device)).sum(1)
        return (mean + self.lookahead).round().long().clamp(1, t)


def confidences(lengths: Tensor) -> Tensor:
    """What the head says of single positions, for the other rules: P(L >= i) / P(L >= i - 1). [N, T + 1] -> [N, T]"""
    alive = lengths.float().flip(1).cumsum(1).flip(1)  # [N, T + 1], P(L >= i)
    return (alive[:, 1:] / alive[:, :-1].clamp(min=torch.finfo(torch.float32).tiny)).clamp(0, 1)
