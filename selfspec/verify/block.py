"""Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2): the longest prefix that a joint test passes.

With r_0 = 1 and r_i = min(r_{i-1} p(x_i) / q_i(x_i), 1): for i < T,
    Z_i = sum_x max(r_i p(x | x_<=i) - q_{i+1}(x), 0),  h_i = Z_i / (Z_i + 1 - r_i),  and h_T = r_T.
The LAST i with u_i <= h_i is kept (an early failure ends nothing), and the next token comes from
max(r_i p - q_{i+1}, 0), scaled by the running product r_i, or from p after all T. Never accepts less than token
verification on average. Chains only: on a tree the running product of a branch says nothing about its siblings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.verify.accepted import Accepted, Noise
from selfspec.verify.rejection import ratios, verify_chain


def running(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """r_0..r_T. [N, T + 1]; see `rejection.accept` for the arguments."""
    out = [torch.ones_like(p[:, 0, 0])]
    for ratio in ratios(p, q, tokens).unbind(1):
        out.append((out[-1] * ratio).clamp(max=1))
    return torch.stack(out, 1)


def accept(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """h_1..h_T: the chance that a prefix of this length passes on its own. [N, T]"""
    r = running(p, q, tokens)
    z = residuals(p, q, tokens)[:, 1:-1].sum(-1)  # [N, T - 1]
    below = z + 1 - r[:, 1:-1]
    h = torch.where(below > 0, z / below.clamp(min=torch.finfo(z.dtype).tiny), 1.0)
    return torch.cat([h, r[:, -1:]], 1)


def residuals(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Weights of the token that comes after i kept ones, i = 0..T. [N, T + 1, V]"""
    r = running(p, q, tokens)
    return torch.cat([(r[:, :-1, None] * p[:, :-1] - q).clamp(min=0), p[:, -1:]], 1)


def kept(probabilities: Tensor, u: Tensor) -> Tensor:
    """How many drafts are kept: the last success counts. [N, T], [N, T] -> [N] long"""
    lengths = torch.arange(1, u.shape[1] + 1, device=u.device)
    return ((u <= probabilities) * lengths).amax(1)


def block(tree: DraftTree, scores: Tensor, noise: Noise) -> Accepted:
    """Verify chains as blocks. See `selfspec.verify.coupled.coupled` for the arguments.

    Raises:
        ValueError: a tree.
    """
    return verify_chain(tree, scores, noise, accept, residuals, kept)
