"""Overlap: the next draft comes out of the verify forward itself, from groups of masks hung on the likely outcomes.

A group stands for one way the verification can end: at its node, and, where slot 0 holds a token, with that token as
the bonus. One group for every node is FlexDraft's parallel mode (arXiv 2605.20022), TiDAR's (arXiv 2511.08923) and
NLD's quadratic layout (arXiv 2607.05722). Rows cost, so `keep` prunes them to the most probable ends, and `branches`
takes RecGuide's few (github.com/linyewei526/Nemotron-Labs-Diffusion): the second candidate at the first risky
positions, and a continuation. A verification that ends elsewhere is a miss, after which a sequential draft follows: a
pass for the batch, from which those take their drafts that have none (`selfspec.saved`). Rounds that graphs replay are
started before a miss is read; there it costs a round that verifies the anchor alone, whose groups draft again.
Which groups are kept decides no token and no q, so any estimate will do, at every temperature. Static shapes, no host
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfspec import rows, tops
from selfspec.backbone import MASK, Backbone, DraftRows
from selfspec.draft import DraftTree, repeat_parents
from selfspec.draft.block import ban_mask, draft_inputs, guesses
from selfspec.rows import RowLayout

Calibrate = Callable[[Tensor, Tensor], Tensor]
"""(hidden [N, T, d] of a group's drafts, bonus [N]) -> [N, T, d]: a hidden group corrected once its bonus is known."""

RISKY = 0.5  # a margin below it makes a position risky (RecGuide's delta)


@dataclass(frozen=True)
class Groups:
    """The outcomes that have a group.

    Attributes:
        nodes: [N, G] long, the node that the verification ends at; -1 pads.
        tokens: [N, G] long, the bonus in slot 0, or `MASK` where any bonus will do.
    """

    nodes: Tensor
    tokens: Tensor


def survival(tree: DraftTree, accept: Tensor) -> Tensor:
    """Probability that each node is accepted; where the tree has `scores`, their exponential is an estimate of it.

    Args:
        tree: N trees or chains of M nodes.
        accept: [N, M], of each node given its parent; the anchor's is 1.

    Returns:
        [N, M], 0 at padding.
    """
    accept = accept.masked_fill(_padding(tree), 0.0)
    if tree.parents is None:
        return accept.cumprod(1)
    return torch.where(tree.ancestors, accept[:, None], 1.0).prod(-1)


def ends(tree: DraftTree, survival: Tensor) -> Tensor:
    """Probability that exactly this node is the accepted end: it survives, and none of its children does.

    On a chain `survival[i] * (1 - accept[i + 1])`. Siblings exclude one another, so what they take adds up.

    Args:
        tree: N trees or chains of M nodes.
        survival: [N, M] of each node.

    Returns:
        [N, M]; sums to 1 where survivals agree with one another, and is never below 0.
    """
    parents = repeat_parents(tree.n_nodes, tree.tokens) if tree.parents is None else tree.parents
    child = survival.masked_fill((parents < 0) | _padding(tree), 0.0)
    below = torch.zeros_like(survival).scatter_add(1, parents.clamp(min=0), child)
    return (survival - below).clamp(min=0).masked_fill(_padding(tree), 0.0)


def keep(end_probs: Tensor, budget: int) -> Tensor:
    """The most probable ends, the lower node first where they are equal.

    Args:
        end_probs: [N, M] of `ends`.
        budget: G, groups.

    Returns:
        [N, G] long; -1 where fewer ends are possible.
    """
    probs, nodes = end_probs.sort(dim=1, descending=True, stable=True)
    nodes = torch.where(probs > 0, nodes, -1)[:, :budget]
    return torch.nn.functional.pad(nodes, (0, budget - nodes.shape[1]), value=-1)


def hidden(nodes: Tensor) -> Groups:
    """Groups that wait for any bonus. nodes: [N, G]"""
    return Groups(nodes, torch.full_like(nodes, MASK))


def corrections(tree: DraftTree, logits: Tensor) -> Tensor:
    """What each draft of a chain would be corrected to: the drafter's second candidate, where it is unsure (RecGuide).

    With P1 and P2 the two largest probabilities at a position, it is risky where P1 - P2 < RISKY.

    Args:
        tree: chains of T + 1 nodes.
        logits: [N, T, V] that they were drafted from; the mask's id is banned already.

    Returns:
        [N, T] long; `MASK` at positions that are not risky.

    Raises:
        ValueError: trees.
    """
    if tree.parents is not None:
        raise ValueError("branches are for chains; on trees keep groups by their end probabilities")
    first = tree.tokens[:, 1:]  # of a ragged chain -1 past its end
    top = tops.ranked(logits, min(2, logits.shape[-1]))[0].exp()
    risky = (top[..., 0] - top[..., -1] < RISKY) & (first >= 0)
    second = tops.best(logits.scatter(2, first.clamp(min=0)[..., None], -torch.inf))
    return torch.where(risky, second, MASK)


def branches(tree: DraftTree, second: Tensor, most: int) -> Groups:
    """RecGuide's branches of a chain: corrections where the draft is unsure, then a continuation after its last node.

    The earliest risky positions p get a group on node p - 1 whose slot 0 is the second candidate. The token stands
    there itself: an all-mask group whose first guess happens to be that token is not conditioned on it.

    Args:
        tree: chains of T + 1 nodes.
        second: [N, T] long of `corrections`.
        most: positions that are corrected.

    Returns:
        G = most + 1 groups, the continuation last.
    """
    n, t = second.shape
    place = torch.arange(t, device=second.device).expand(n, t)
    order = torch.where(second >= 0, place, t).sort(1).values[:, :most]
    order = torch.nn.functional.pad(order, (0, most - order.shape[1]), value=t)
    padded = torch.nn.functional.pad(second, (0, 1), value=MASK)
    last = (tree.tokens[:, 1:] >= 0).sum(1, keepdim=True)
    nodes = torch.cat([torch.where(order < t, order, -1), last], 1)
    return Groups(nodes, torch.cat([padded.gather(1, order), torch.full_like(last, MASK)], 1))


def attach(
    clean: RowLayout, groups: Groups, size: int, causal: bool = False, reads: bool = False
) -> tuple[RowLayout, DraftRows]:
    """The verify forward with its groups.

    Args:
        clean: the layout of the tree.
        groups: G a request.
        size: B, rows of a group.
        causal: groups are causal.
        reads: every group reads the features of its node, which this very forward computes.

    Returns:
        The layout, and the inputs of its G * B draft rows.
    """
    n, g = groups.nodes.shape
    inputs = draft_inputs(groups.tokens, n, size, g, groups.nodes.device)
    if reads:
        inputs = replace(inputs, after=groups.nodes.clamp(min=0).repeat_interleave(size, 1))
    return rows.overlapped(clean, groups.nodes, size, causal), inputs


def find(groups: Groups, last: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
    """The group of the outcome that came; one that holds the bonus goes before one that had to do without.

    Args:
        groups: of the round.
        last: [N] long, the accepted end.
        bonus: [N] long.

    Returns:
        [N] long, the group (0 on a miss), and [N] bool, whether there is one.
    """
    here = groups.nodes == last[:, None]
    known = here & (groups.tokens == bonus[:, None])
    rank = 2 * known.long() + (here & (groups.tokens == MASK)).long()
    return rank.argmax(1), rank.amax(1) > 0


def saved(
    backbone: Backbone,
    draft: Tensor,
    groups: Groups,
    last: Tensor,
    bonus: Tensor,
    path,
    calibrate: Calibrate | None = None,
    strict: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The draft that waits for the outcome that came.

    Args:
        backbone: whose head is read; only the found group's rows pass through it.
        draft: [N, G * B, d] hidden states of the draft rows.
        groups: of the round.
        last: [N] long, the accepted end.
        bonus: [N] long.
        path: the mask path's configuration.
        calibrate: corrects a group that had to do without the bonus.
        strict: such a group only counts where its own guess of the bonus was right, as RecGuide has it; for paths
            without calibrator, whose guesses lean on that one.

    Returns:
        [N, B - 1, V] logits of the positions after the bonus, the mask's id banned (without meaning on a miss); [N]
        bool, where there is one; the hidden states that the logits were read from, [N, B - 1, d]; and those states as
        the layers left them, before the calibrator.

    Raises:
        ValueError: `strict` for a shifted path, whose slot 0 guesses the position after the bonus.
    """
    if strict and path.shift:
        raise ValueError("a shifted path does not guess the bonus of a hidden group; strict must be False")
    n, g = groups.nodes.shape
    at, hit = find(groups, last, bonus)
    every = torch.arange(n, device=draft.device)
    rows_of = draft.unflatten(1, (g, -1))[every, at]  # [N, B, d]
    states = rows_of[:, :-1] if path.shift else rows_of[:, 1:]
    known = groups.tokens[every, at] != MASK
    if strict:
        guess = tops.best(ban_mask(backbone.logits(rows_of[:, :1]), path.mask_id))[:, 0]
        hit = hit & (known | (guess == bonus))
    corrected = states
    if calibrate is not None:
        corrected = torch.where(known[:, None, None], states, calibrate(states, bonus))
    return guesses(backbone, corrected, path), hit, corrected, states


def _padding(tree: DraftTree) -> Tensor:
    """[N, M] bool; the anchor is none, whatever its token."""
    out = tree.tokens < 0
    return out & (torch.arange(tree.n_nodes, device=out.device) > 0)
