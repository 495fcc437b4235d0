"""Token-level rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).

Draft tokens x_i are drawn from q_i. x_i is kept with probability min(1, p_i(x_i) / q_i(x_i)); at the first refusal a
token comes from max(p_i - q_i, 0), normalised, and after the last acceptance from p. Good where drafts are drawn
anyway; block verification accepts at least as much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selfspec.draft import DraftTree
from selfspec.verify.accepted import Accepted, Noise


def accept(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Probability of keeping each draft token, given that those before it were kept.

    Args:
        p: [N, T + 1, V] target probabilities at the T drafted positions and the one after them.
        q: [N, T, V] the distributions that the drafts were drawn from.
        tokens: [N, T] long.

    Returns:
        [N, T]
    """
    return ratios(p, q, tokens).clamp(max=1)


def residuals(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Weights of the token that comes after i kept ones, i = 0..T. [N, T + 1, V]"""
    return torch.cat([(p[:, :-1] - q).clamp(min=0), p[:, -1:]], 1)


def kept(probabilities: Tensor, u: Tensor) -> Tensor:
    """How many drafts are kept: up to the first refusal. [N, T], [N, T] -> [N] long"""
    return (u <= probabilities).long().cumprod(1).sum(1)


def rejection(tree: DraftTree, scores: Tensor, noise: Noise) -> Accepted:
    """Verify chains token by token. See `selfspec.verify.coupled.coupled` for the arguments.

    Raises:
        ValueError: a tree.
    """
    return verify_chain(tree, scores, noise, accept, residuals, kept)


def verify_chain(
    tree: DraftTree, scores: Tensor, noise: Noise, accept: Callable, residuals: Callable, kept: Callable
) -> Accepted:
    """What token and block verification share: decide how many drafts stay, then draw the token after them.

    Args:
        tree: chains whose drafts were drawn from `tree.probs`; -1 from where nothing was drafted on.
        scores: [N, T + 1, V] target scores.
        noise: of the round.
        accept: (p, q, tokens) -> [N, T] probabilities.
        residuals: (p, q, tokens) -> [N, T + 1, V] weights.
        kept: (probabilities, uniforms) -> [N] long.
    """
    if tree.parents is not None:
        raise ValueError("this verification is for chains; verify='multi' or 'coupled' takes trees")
    p = scores.double().softmax(-1)
    n, m, v = p.shape
    if m == 1:
        return Accepted(torch.zeros_like(tree.tokens), torch.ones_like(noise.start), noise.residual(p[:, 0])[:, None])
    assert tree.probs is not None
    missing, tokens = tree.tokens[:, 1:] < 0, tree.tokens[:, 1:].clamp(min=0)
    q = tree.probs.masked_fill(missing[..., None], 0.0)  # what was never drawn takes nothing from p
    chances = accept(p, q, tokens).masked_fill(missing, -1.0)
    count = kept(chances, noise.uniforms(m - 1))  # [N], 0..T
    weights = residuals(p, q, tokens).gather(1, count[:, None, None].expand(-1, 1, v))[:, 0]  # [N, V]
    # a refusal where p = q but for rounding leaves no weight at all
    weights = torch.where(
        weights.sum(-1, keepdim=True) > 0, weights, p.gather(1, count[:, None, None].expand(-1, 1, v))[:, 0]
    )
    emitted = torch.cat([tokens, tokens[:, :1]], 1).scatter(1, count[:, None], noise.residual(weights)[:, None])
    return Accepted(torch.arange(m, device=p.device).expand(n, m), count + 1, emitted)


def ratios(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """p(x) / q(x) of every draft token. [N, T]"""
    return p[:, :-1].gather(2, tokens[..., None])[..., 0] / q.gather(2, tokens[..., None])[..., 0]
