"""Online confidences: a logistic on the top-2 margin for every position, refitted while serving (vLLM 0.32, docs).

    c_k = sigmoid(w_k * m_k + b_k),   m_k = the largest logit minus the second at position k.

Outcomes of the last rounds are kept per position, and every `every` rounds w_k and b_k are refitted by a few Newton
steps with a weak prior (b = 1.5), so that a position that never failed stays finite. Until `warm` refits are done all
drafts are verified: a rule that cuts would otherwise never see what it cuts. The published measurement has it ahead of
a trained confidence head (area under the curve 0.884 to 0.839). State and refits live on the device; nothing is read
by the host. Margins are marginals, so rules that read them are free to look at all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec import tops

BIAS, RIDGE = 1.5, 0.5  # the prior: its bias, and the weight that holds w at 0 and b at BIAS
STEPS = 8  # of Newton's method


class Margins:
    """Learns while it is used.

    Args:
        depth: positions T.
        device: of the drafts.
        window: outcomes kept per position.
        every: rounds between refits.
        warm: refits before confidences are trusted.
        enough: outcomes that a position needs to be trusted.
    """

    def __init__(
        self,
        depth: int,
        device: torch.device | str = "cpu",
        window: int = 1024,
        every: int = 100,
        warm: int = 3,
        enough: int = 50,
    ):
        self.every, self.warm, self.enough, self.rounds = every, warm, enough, 0
        self.window = window
        self.margin = torch.zeros(depth, window + 1, device=device)  # the last column takes what is not kept
        self.label = torch.zeros(depth, window + 1, device=device)
        self.count = torch.zeros(depth, dtype=torch.long, device=device)  # outcomes so far
        self.fit = torch.tensor([[0.0, BIAS]], device=device).repeat(depth, 1)  # w, b
        self.trusted = torch.zeros((), dtype=torch.bool, device=device)  # a tensor, so that graphs see it change

    def __call__(self, margins: Tensor) -> Tensor:
        """Confidences [N, T] of margins [N, T]; 1 where too little is known."""
        w, b = self.fit[: margins.shape[1]].unbind(1)
        known = (self.count[: margins.shape[1]] >= self.enough) & self.trusted
        return torch.where(known, (w * margins.float() + b).sigmoid(), 1.0)

    def observe(self, margins: Tensor, verified: Tensor, accepted: Tensor) -> None:
        """Note a round's outcomes, and refit when it is time.

        Args:
            margins: [N, T] of the drafts.
            verified: [N] long, drafts that were verified.
            accepted: [N] long, those that were accepted.
        """
        t = margins.shape[1]
        place = torch.arange(t, device=margins.device)
        # a position was tried if all before it were accepted; what comes after the first failure says nothing
        tried = (place <= accepted[:, None]) & (place < verified[:, None])  # [N, T]
        at = self.count[:t] + tried.long().cumsum(0) - 1
        at = torch.where(tried, at % self.window, self.window).T  # [T, N]
        self.margin[:t].scatter_(1, at, margins.float().T)
        self.label[:t].scatter_(1, at, (place < accepted[:, None]).float().T)
        self.count[:t] += tried.sum(0)
        self.rounds += 1
        if self.rounds % self.every == 0:
            self.refit()
            self.trusted.fill_(self.rounds >= self.warm * self.every)

    def refit(self) -> None:
        """Newton's method for every position at once; 2 x 2 systems solved by hand."""
        m, y = self.margin[:, :-1], self.label[:, :-1]
        used = torch.arange(self.window, device=m.device) < self.count[:, None]
        w, b = torch.zeros_like(m[:, :1]), torch.full_like(m[:, :1], BIAS)
        for _ in range(STEPS):
            p = (w * m + b).sigmoid()
            error, weight = (p - y) * used, (p * (1 - p)) * used
            gw = (error * m).sum(1, keepdim=True) + RIDGE * w
            gb = error.sum(1, keepdim=True) + RIDGE * (b - BIAS)
            hww = (weight * m * m).sum(1, keepdim=True) + RIDGE
            hwb = (weight * m).sum(1, keepdim=True)
            hbb = weight.sum(1, keepdim=True) + RIDGE
            det = hww * hbb - hwb * hwb
            w, b = w - ((hbb * gw - hwb * gb) / det).clamp(-2, 2), b - ((hww * gb - hwb * gw) / det).clamp(-4, 4)
        self.fit.copy_(torch.cat([w, b], 1))


def margins(logits: Tensor) -> Tensor:
    """The largest logit minus the second. [N, T, V] -> [N, T] float32"""
    top = tops.ranked(logits, 2)[0]
    return (top[..., 0] - top[..., 1]).clamp(max=100.0)  # all but one banned
