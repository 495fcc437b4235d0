"""Heads on a mask path: small corrections of its drafts, and what it knows about their fate.

A correction is a bias in hidden space, read through the frozen lm_head, so that no head is as large as a vocabulary:
the Markov head's follows from the token chosen just before a slot (DSpark, arXiv 2607.05147), the sampler head's from
that token and the slot's own state (after Samragh et al. 2025, "Your LLM knows the future", arXiv 2507.11851), the
calibrator's from the bonus token that a group drafted beside the verification had to do without (FlexDraft, arXiv
2605.20022). A path has a Markov or a sampler head, not both; what is said of the one below holds for the other. The
confidence head gives the probability that a slot survives verification once the slots before it have (DSpark), the
length head the probability of every accepted length (AdaFlash). All read the draft rows' hidden states after the final
norm, start neutral, and know nothing of the slot's own token, so that planning by them keeps sampling lossless.

Decoding conditions chains and trees by the Markov head (`selfspec.draft.condition`), those saved by an overlapped round
as well; where a calibrator has told the first draft of its bonus, the Markov head leaves that one alone, and it does
so with a seed row's. Two kinds of drafts are plain marginals, head or not: a loop's, whose later passes know what the
marginals chose, and drawn ones (verify="rejection", "multi" or "block"), which are weighed by the law that they are
drawn from.

Modules are `MaskPathModel.heads`; the functions below are what drafting code calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from selfspec.adapters.config import CONDITIONERS
from selfspec.backbone import Backbone
from selfspec.tops import best


class Markov(nn.Module):
    """`h_k + U V e(x_{k-1})`, of rank r.

    Args:
        d: width of the hidden states.
        rank: r.
        make: `device` and `dtype` of the parameters.
    """

    def __init__(self, d: int, rank: int, **make):
        super().__init__()
        self.down, self.up = _linear(d, rank, **make), _zeros(rank, d, **make)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """hidden [..., d], before [..., d] embeddings of the tokens before the slots. Returns [..., d]."""
        return hidden + _apply(self.up, _apply(self.down, before.to(hidden.dtype)))


class Calibrator(nn.Module):
    """`h_j + U silu(V [e(x); h_j])`, r hidden units: x is the bonus for a calibrator, the token before slot j for a
    sampler head.

    Args:
        d: width of the hidden states.
        rank: r.
        make: `device` and `dtype` of the parameters.
    """

    def __init__(self, d: int, rank: int, **make):
        super().__init__()
        self.down, self.up = _linear(2 * d, rank, **make), _zeros(rank, d, **make)

    def forward(self, hidden: Tensor, given: Tensor) -> Tensor:
        """hidden [..., d], given [..., d] embeddings of the known tokens. Returns [..., d]."""
        both = torch.cat([given.to(hidden.dtype), hidden], -1)
        return hidden + _apply(self.up, silu(_apply(self.down, both)))


class Confidence(nn.Module):
    """`u . silu(V h_k) + b_k`, the logit of a slot's survival.

    Args:
        d: width of the hidden states.
        rank: hidden units.
        block_size: B; drafts 1..B-1 have a bias each.
        make: `device` and `dtype` of the parameters.
    """

    def __init__(self, d: int, rank: int, block_size: int, **make):
        super().__init__()
        self.down, self.up = _linear(d, rank, **make), _zeros(rank, 1, **make)
        self.bias = nn.Parameter(torch.zeros(block_size, **make))

    def forward(self, hidden: Tensor, steps: Tensor) -> Tensor:
        """hidden [..., T, d], steps [T] long (how many tokens after the anchor). Returns logits [..., T]."""
        raw = _apply(self.up, silu(_apply(self.down, hidden)))[..., 0]
        return raw + self.bias.to(raw.dtype)[steps.clamp(0, len(self.bias) - 1)]


class Length(nn.Module):
    """Logits of the accepted lengths 0..B-1, `U mean_k silu(V h_k) + b`.

    Args:
        d: width of the hidden states.
        rank: hidden units.
        block_size: B.
        make: `device` and `dtype` of the parameters.
    """

    def __init__(self, d: int, rank: int, block_size: int, **make):
        super().__init__()
        self.down, self.up = _linear(d, rank, **make), _zeros(rank, block_size, **make)
        self.bias = nn.Parameter(torch.zeros(block_size, **make))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., T, d] of the drafts. Returns [..., B]."""
        raw = _apply(self.up, silu(_apply(self.down, hidden)).mean(-2))
        return raw + self.bias.to(raw.dtype)


def build(names: tuple[str, ...], d: int, rank: int, block_size: int, **make) -> nn.ModuleDict:
    """The heads of a path, by name.

    Args:
        names: of `adapters.config.HEADS`.
        d: width of the hidden states.
        rank: hidden units of each.
        block_size: B.
        make: `device` and `dtype` of the parameters.
    """
    makers = {
        "calibrator": lambda: Calibrator(d, rank, **make),
        "confidence": lambda: Confidence(d, rank, block_size, **make),
        "length": lambda: Length(d, rank, block_size, **make),
        "markov": lambda: Markov(d, rank, **make),
        "sampler": lambda: Calibrator(d, rank, **make),
    }
    return nn.ModuleDict({name: makers[name]() for name in names})


# what drafting code calls; `heads` is `MaskPathModel.heads`, hidden states are those of the drafts alone


def confidence(heads: nn.ModuleDict, hidden: Tensor, seeded: bool = False) -> Tensor:
    """Probability that each draft survives, given that those before it do; the running product is the run's.

    Args:
        heads: with "confidence".
        hidden: [N, T, d] of drafts 1..T.
        seeded: draft 1 is a seed row's, the base model's own and so always right; the head was not trained on it.

    Returns:
        [N, T] float32, between 0 and 1.
    """
    steps = torch.arange(1, hidden.shape[-2] + 1, device=hidden.device)
    sure = heads["confidence"](hidden, steps).float().sigmoid()
    return torch.where(steps == 1, 1.0, sure) if seeded else sure


def lengths(heads: nn.ModuleDict, hidden: Tensor, seeded: bool = False) -> Tensor:
    """Probability of every accepted length.

    Args:
        heads: with "length".
        hidden: [N, T, d] of drafts 1..T; T may be less than the trained block holds.
        seeded: as in `confidence`; the head knows of the drafts behind the seed row's.

    Returns:
        [N, T + 1] float32, of 0..T accepted drafts; sums to 1.
    """
    if seeded:
        behind = hidden[..., 1:, :]
        first = torch.ones_like(hidden[..., :1, 0], dtype=torch.float32)
        return torch.cat([0 * first, lengths(heads, behind) if behind.shape[-2] else first], -1)
    t = hidden.shape[-2]
    full = heads["length"](hidden).float().softmax(-1)
    return torch.cat([full[..., :t], full[..., t:].sum(-1, keepdim=True)], -1)  # longer runs would be T


def calibrated(heads: nn.ModuleDict, backbone: Backbone, hidden: Tensor, bonus: Tensor) -> Tensor:
    """A hidden group's drafts, corrected once its bonus is known.

    Args:
        heads: with "calibrator".
        backbone: whose embeddings are read.
        hidden: [N, T, d] of the chosen group's drafts.
        bonus: [N] long.

    Returns:
        [N, T, d], for the lm_head.
    """
    return heads["calibrator"](hidden, backbone.embed(bonus)[:, None].expand_as(hidden))


def conditioner(heads: nn.ModuleDict) -> nn.Module | None:
    """The head that knows the token before a slot, Markov or sampler; None without one."""
    return next((heads[name] for name in CONDITIONERS if name in heads), None)


def conditioned(heads: nn.ModuleDict, backbone: Backbone, hidden: Tensor, before: Tensor) -> Tensor:
    """Logits of slots given the token chosen before each: for tree nodes, given each node's parent token.

    Args:
        heads: with a conditioner.
        backbone: whose embeddings and head are read.
        hidden: [..., d] of the slots.
        before: [...] long, below 0 where a slot is to stay as it is.

    Returns:
        [..., V]
    """
    return read(backbone, corrected(heads, backbone, hidden, before))


def corrected(heads: nn.ModuleDict, backbone: Backbone, hidden: Tensor, before: Tensor) -> Tensor:
    """The hidden states that `conditioned` reads. [..., d]"""
    head = conditioner(heads)
    assert head is not None
    return torch.where((before < 0)[..., None], hidden, head(hidden, backbone.embed(before.clamp(min=0))))


def read(backbone: Backbone, states: Tensor) -> Tensor:
    """Logits of hidden states of any shape, which heads want as [N, T, d]. [..., d] -> [..., V]"""
    return backbone.logits(states.reshape(1, -1, states.shape[-1])).view(*states.shape[:-1], -1)


def biases(heads: nn.ModuleDict, backbone: Backbone, hidden: Tensor) -> Callable[[Tensor, int], Tensor]:
    """The head's corrections of the drafts' plain logits, as `draft.trees.domino.DominoTree` asks for them.

    Args:
        heads: with a conditioner.
        backbone: whose embeddings and head are read.
        hidden: [N, T, d] of drafts 1..T.

    Returns:
        From parent tokens [N, W] long and the depth of their children, from 0, to [N, W, V].
    """

    def bias(tokens: Tensor, depth: int) -> Tensor:
        states = hidden[:, depth, None].expand(-1, tokens.shape[1], -1)  # [N, W, d]
        return conditioned(heads, backbone, states, tokens) - backbone.logits(hidden[:, depth, None])

    return bias


def walk(
    heads: nn.ModuleDict,
    backbone: Backbone,
    hidden: Tensor,
    anchor: Tensor,
    choose: Callable[[Tensor, int], Tensor] | None = None,
    banned: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose a block's tokens one after another, each with the bias of the one before it. No host reads.

    Args:
        heads: with a conditioner.
        backbone: whose embeddings and head are read.
        hidden: [N, T, d] of drafts 1..T.
        anchor: [N] long, the token before draft 1.
        choose: from [N, V] logits and the draft's index 0..T-1 to [N] tokens; None takes the most probable ones.
        banned: a vocabulary id that is never chosen (the mask's).

    Returns:
        tokens [N, T] long, and the logits [N, T, V] that each was chosen from.
    """
    token, tokens, logits = anchor, [], []
    for k in range(hidden.shape[1]):
        scores = conditioned(heads, backbone, hidden[:, k], token)  # [N, V]
        if banned is not None:
            scores[..., banned] = float("-inf")
        token = best(scores) if choose is None else choose(scores, k)
        tokens.append(token)
        logits.append(scores)
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def _linear(n_in: int, n_out: int, **make) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False, **make)


def _zeros(n_in: int, n_out: int, **make) -> nn.Linear:
    """The layer that a head ends in: zero, so that a new head changes nothing."""
    layer = _linear(n_in, n_out, **make)
    nn.init.zeros_(layer.weight)
    return layer


def _apply(layer: nn.Linear, x: Tensor) -> Tensor:
    """In the rows' precision, whatever the head is kept in."""
    return linear(x, layer.weight.to(x.dtype))
