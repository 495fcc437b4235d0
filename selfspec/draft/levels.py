"""Trees level by level: every level's best nodes, then the best of all. Plain tensor operations, no host.

Where a child's probability depends on its parent, a heap would ask for one distribution at a time; a level asks for all
of its at once. A node among the best M of the tree is among the best M of its level, and so is its parent, so beams of
M lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selfspec.draft import DraftTree

Expand = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(tokens [N, W] of a level's nodes, depth of their children from 0) -> log-probabilities, ids [N, W, K]."""


def by_levels(anchor: Tensor, expand: Expand, depth: int, budget: int, width: int) -> DraftTree:
    """The best `budget` nodes over beams of `width`.

    Args:
        anchor: [N] long.
        expand: a level's candidates.
        depth: levels, T.
        budget: nodes beside the anchor.
        width: nodes of a level that may have children; the result is the best tree for width >= budget.

    Returns:
        Most probable nodes first; of equal ones the shallower.
    """
    n = len(anchor)
    tokens, scores = [anchor[:, None]], [torch.zeros(n, 1, device=anchor.device)]
    parents = [torch.full_like(anchor[:, None], -1)]
    first = 0  # index of the running level's first node
    for d in range(depth):
        top, ids = expand(tokens[-1].clamp(min=0), d)  # [N, W, K]
        offers = scores[-1][:, :, None] + top.clamp(max=0)  # rounding may lift a certain token above 0
        best, at = offers.flatten(1).topk(min(width, offers[0].numel()), -1)  # [N, W']
        parents.append(first + at // top.shape[-1])
        first += tokens[-1].shape[1]
        tokens.append(ids.flatten(1).gather(1, at))
        scores.append(best)
    return _best(tokens, parents, scores, budget)


def _best(tokens: list[Tensor], parents: list[Tensor], scores: list[Tensor], budget: int) -> DraftTree:
    """The best nodes of all levels, renumbered. A parent never scores less than its child, and stands before it."""
    levels = torch.cat([torch.full_like(t, d) for d, t in enumerate(tokens)], 1)
    all_scores = torch.cat(scores, 1)
    short = budget + 1 - all_scores.shape[1]
    value, order = all_scores.sort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    kept, value = order[:, : budget + 1], value[:, : budget + 1]
    real = value > -torch.inf
    parent = torch.cat(parents, 1).gather(1, kept)
    parent = torch.where(real & (parent >= 0), place.gather(1, parent.clamp(min=0)), -1)
    token = torch.where(real, torch.cat(tokens, 1).gather(1, kept), -1)
    level = torch.where(real, levels.gather(1, kept), 0)
    if short > 0:
        pad = torch.nn.functional.pad
        token, parent = (pad(x, (0, short), value=-1) for x in (token, parent))
        value, level = pad(value, (0, short), value=-torch.inf), pad(level, (0, short))
    return DraftTree(token, parent, scores=value, levels=level)
