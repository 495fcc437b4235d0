"""TAPS (arXiv 2606.00487): select by acceptance given the prefix, not by the marginal.

A node is only ever tried when its parent was accepted, so what counts is P(accepted | parent accepted), which a
drafter's marginal overstates the more, the deeper it stands. Those conditional rates are learnt here from what the
verifier accepted: nodes whose parent was on the accepted path are counted in cells of depth and marginal probability,
and a cell's estimate starts at the marginal itself,

    a(d, q) = (hits + w q) / (trials + w).

The tree is then the best prefix-closed one of the budget under prod a, found best-first. (The paper's own estimator is
not public; the selection under a fixed budget is its idea.) Good where the marginals are badly calibrated: small
adapters, text unlike the training data.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.draft.tree import grow, ranked

BINS, WIDTH = 16, 0.5  # cells of a depth, by -log q in steps of WIDTH


class TAPS:
    """Selection by conditional rates, which `observe` learns.

    Args:
        depth: deepest position told apart, T.
        device: of the trees.
        weight: w, trials that the marginal counts for.
        decay: of old counts at every observation.
    """

    def __init__(self, depth: int, device: torch.device | str = "cpu", weight: float = 16.0, decay: float = 0.999):
        self.weight, self.decay = weight, decay
        self.hits = torch.zeros(depth * BINS, device=device)
        self.trials = torch.zeros(depth * BINS, device=device)

    def __call__(self, anchor: Tensor, logits: Tensor, budget: int) -> DraftTree:
        """See `draft.trees`. The tree's `scores` are log-products of the estimates, and it has its `marginals`."""
        top, ids = ranked(logits, budget)
        rates, order = self.rates(top).sort(dim=-1, descending=True, stable=True)
        tree = grow(anchor, rates.log(), ids.gather(-1, order), budget)
        slot = (tree.depths - 1).clamp(min=0)
        own = logits.flatten(1).gather(1, slot * logits.shape[-1] + tree.tokens.clamp(min=0)).float()
        return replace(tree, marginals=own - logits.float().logsumexp(-1).gather(1, slot))

    def rates(self, log_q: Tensor) -> Tensor:
        """P(accepted | parent accepted) of candidates with log-marginals [N, T, K]; 0 where banned."""
        cell = self._cell(log_q, torch.arange(log_q.shape[1], device=log_q.device)[:, None])
        q = log_q.exp().clamp(max=1)
        out = (self.hits[cell] + self.weight * q) / (self.trials[cell] + self.weight)
        return torch.where(log_q > -torch.inf, out, 0.0)

    def observe(self, tree: DraftTree, path: Tensor, live: Tensor) -> None:
        """Count a round's outcome, on the device.

        Args:
            tree: as verified, with its `marginals`; a node whose token is -1 was not tried.
            path: [N, A] long, the accepted nodes (`Accepted.rows`).
            live: [N] bool, requests that count.
        """
        assert tree.parents is not None and tree.marginals is not None
        on_path = torch.zeros_like(tree.tokens).scatter(1, path, 1)  # [N, M]
        tried = live[:, None] & (tree.parents >= 0) & (tree.tokens >= 0)
        tried &= on_path.gather(1, tree.parents.clamp(min=0)) > 0
        cell = self._cell(tree.marginals, (tree.depths - 1).clamp(min=0)).flatten()
        self.hits.mul_(self.decay).index_add_(0, cell, (tried & (on_path > 0)).flatten().to(self.hits))
        self.trials.mul_(self.decay).index_add_(0, cell, tried.flatten().to(self.trials))

    def _cell(self, log_q: Tensor, slot: Tensor) -> Tensor:
        """Index of the cell of each candidate."""
        depth = slot.clamp(max=len(self.hits) // BINS - 1)
        return depth * BINS + (-log_q / WIDTH).clamp(0, BINS - 1).long()
