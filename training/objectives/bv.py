"""BV loss: the expected length that block verification accepts, along a text of the verifier's (arXiv 2609.34832).

Along the text x: `r_i = prod_{k <= i} q_k(x_k) / p_k(x_k)`, `a_i = min(1, min_{j <= i} r_j)`, and the score of slot i
`s_i = sum_v min(a_{i-1} p_i(v), r_{i-1} q_i(v))`. Over texts sampled from p, `E[sum_i s_i]` is the expected number of
drafts that block verification (arXiv 2403.10444) accepts. A group's loss is `-(1/beta) log mean_i s_i^beta`: beta = 0
is `-mean log s_i`, whose gradients are safe early, beta = 1 is `-log mean s_i`; beta rises linearly over a share of
the schedule. Groups count alike, and no decay is multiplied on top.

It needs answers sampled at the temperature that will be decoded with; greedy answers make it optimistic. The share is a
choice (the paper's is not known), and so is that a slot without a label before the first draft counts as accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.training.objectives.decay import PerGroup
from selfspec.training.objectives.slots import Slots, products
from selfspec.training.objectives.tv import overlap

FLOOR = -80.0  # of log scores
LEAST = 1e-3  # beta below this is 0


@dataclass(frozen=True)
class BlockVerification(PerGroup):
    """Attributes:
    anneal: share of the schedule in which beta rises from 0 to 1; 0 starts at 1.
    """

    anneal: float = 0.5

    def total(self, slots: Slots) -> Tensor:
        """sum over groups of -(1/beta) log mean_i s_i^beta"""
        drafts = slots.drafts
        ratios = products(slots.logp - slots.read.verifier_logp(), drafts)  # log r_i
        ratios = torch.nn.functional.pad(ratios[:, :-1], (1, 0))  # log r_{i-1}
        bounds = ratios.cummin(1).values.clamp(max=0)  # log a_{i-1}
        scores = slots.read.measure(overlap, bounds, ratios)
        logs = scores.clamp(min=torch.finfo(scores.dtype).tiny).log().clamp(min=FLOOR)
        n = drafts.sum(1).clamp(min=1)
        mean = torch.where(drafts, logs, 0).sum(1) / n  # the limit at beta = 0
        at = torch.as_tensor(slots.progress, dtype=logs.dtype, device=logs.device)
        exact = at / self.anneal if self.anneal else torch.ones_like(at)
        beta = exact.clamp(LEAST, 1)
        some = drafts.any(1)
        power = torch.where(some[:, None], torch.where(drafts, beta * logs, -torch.inf), 0.0)
        value = (power.logsumexp(1) - n.to(power.dtype).log()) / beta
        return -torch.where(some, torch.where(exact < LEAST, mean, value), 0).sum()
