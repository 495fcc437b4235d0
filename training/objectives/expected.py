"""Expected acceptance at T = 1, from distributions alone; a measure, not a loss (`dblast` and `bv` train for it).

Token verification accepts a slot with probability `alpha = sum_v min(p(v), q(v))` (arXiv 2211.17192), so a draft of
marginals is expected to be accepted for `sum_k prod_{i <= k} alpha_i` tokens, p taken along the text at hand. That is
exact where p does not depend on the tokens before it, and a good measure on any text. On texts sampled from p itself
`sum_k prod_{i < k} min(1, q_i(x_i) / p_i(x_i)) alpha_k` has the expectation itself as its mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accepted(overlap: Tensor, drafts: Tensor) -> Tensor:
    """sum_k prod_{i <= k} alpha_i: drafts that a round is expected to take; with the bonus it emits one more.

    Args:
        overlap: [..., T] alpha of every slot (`objectives.tv.overlap`).
        drafts: [..., T] bool, slots that are drafts with a token to match; the others neither count nor stop a run.

    Returns:
        [...]
    """
    return (torch.where(drafts, overlap, 1).cumprod(-1) * drafts).sum(-1)


def accepted_on_samples(overlap: Tensor, draft_logp: Tensor, verifier_logp: Tensor, drafts: Tensor) -> Tensor:
    """sum_k prod_{i < k} min(1, q_i(x_i) / p_i(x_i)) alpha_k, unbiased on texts x sampled from p at T = 1.

    Args:
        overlap: [..., T] alpha of every slot.
        draft_logp: [..., T] log q_i(x_i).
        verifier_logp: [..., T] log p_i(x_i).
        drafts: [..., T] bool.

    Returns:
        [...]
    """
    passes = torch.where(drafts, (draft_logp - verifier_logp).clamp(max=0), 0).cumsum(-1)
    before = torch.nn.functional.pad(passes[..., :-1], (1, 0)).exp()
    return (before * torch.where(drafts, overlap, 0)).sum(-1)
