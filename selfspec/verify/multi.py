"""Multi-candidate verification of trees whose siblings are drawn without replacement.

Recursive rejection sampling (Yang et al., "Multi-candidate speculative decoding", arXiv 2401.06706; Jeon et al.,
"Recursive speculative decoding", arXiv 2402.14160): the children x_1, x_2, ... of a node come from q, then from q
without x_1, and so on. Child x_k is kept with probability min(1, p_k(x_k) / q_k(x_k)); a refusal leaves
p_{k+1} = max(p_k - q_k, 0) and q_{k+1} = q_k without x_k, both normalised. After the last refusal the token comes from
what is left of p. With one child a node it is token-level rejection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec import rows
from selfspec.draft import DraftTree, repeat_parents
from selfspec.verify.accepted import Accepted, Noise


def accept(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """Probability of keeping a child. p, q: [N, V], token: [N] long. Returns [N]; 0 where q never draws it."""
    px, qx = (t.gather(1, token[:, None])[:, 0] for t in (p, q))
    return torch.where(qx > 0, (px / qx.clamp(min=torch.finfo(qx.dtype).tiny)).clamp(max=1), 0.0)


def refused(p: Tensor, q: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of both distributions after a child was refused. Returns ([N, V], [N, V])"""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    rest = torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)
    q = q.scatter(1, token[:, None], 0.0)
    return rest, q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def multi(tree: DraftTree, scores: Tensor, noise: Noise) -> Accepted:
    """Try the nodes in order. Parents stand before their children, and siblings in the order of their drawing.

    See `selfspec.verify.coupled.coupled` for the arguments; `tree.probs` holds q of each depth.
    """
    p_all = scores.double().softmax(-1)
    n, m, _ = p_all.shape
    parents = repeat_parents(m, tree.tokens) if tree.parents is None else tree.parents
    u, depth = noise.uniforms(m), rows.depths(parents)
    every = torch.arange(n, device=p_all.device)
    # depth d's children come from probs[:, d]; the deepest nodes have none
    q_all = p_all.new_zeros(n, 1, p_all.shape[-1]) if tree.probs is None else tree.probs
    p, q = p_all[:, 0], q_all[:, 0]
    at, count = torch.zeros_like(every), torch.ones_like(every)
    chosen = torch.zeros_like(parents)  # rows of the path, filled as it grows
    for node in range(1, m):
        token = tree.tokens[:, node]
        tried = (parents[:, node] == at) & (token >= 0)
        token = token.clamp(min=0)
        yes = tried & (u[:, node] <= accept(p, q, token))
        left_p, left_q = refused(p, q, token)
        below = depth[:, node].clamp(max=q_all.shape[1] - 1)
        p = torch.where(yes[:, None], p_all[:, node], torch.where(tried[:, None], left_p, p))
        q = torch.where(yes[:, None], q_all[every, below], torch.where(tried[:, None], left_q, q))
        at = torch.where(yes, node, at)
        chosen = chosen.scatter(1, count[:, None].clamp(max=m - 1), at[:, None])
        count = count + yes
    last = torch.arange(m, device=at.device) >= count[:, None]
    chosen = torch.where(last, at[:, None], chosen)
    after = torch.cat([tree.tokens.gather(1, chosen)[:, 1:], tree.tokens[:, :1]], 1)
    return Accepted(chosen, count, after.scatter(1, count[:, None] - 1, noise.residual(p)[:, None]))
