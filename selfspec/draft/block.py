"""Block draft: one group of mask rows after the anchor, all positions guessed at once (DFlash, arXiv 2602.06036).

Same-position prediction: slot 0 holds the anchor, slot j predicts the token at the anchor's position + j. A shifted
path (Orthrus, arXiv 2605.12825) predicts one ahead of each row instead. With a seed row (UNO, arXiv 2609.04010) the
anchor rides as a clean row, whose output is the base model's own next token and the first draft, and the group stands
behind it; there random tokens take the masks' place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from selfspec import sampling
from selfspec.backbone import MASK, Backbone, DraftRows
from selfspec.cache import KVCache
from selfspec.rows import block as block_layout
from selfspec.rows import chain, filled, overlapped, steps


def draft_inputs(
    anchor: Tensor | None, n: int, size: int, groups: int, device: torch.device, features=None
) -> DraftRows:
    """Inputs of `groups` groups of `size` rows per request.

    Args:
        anchor: [N] or [N, groups] long, the known token in slot 0; `MASK` or None leaves a mask there (bonus hidden).
        n: requests.
        size: rows of a group.
        groups: groups per request.
        device: of the rows.
        features: [N, 1, F] or None.
    """
    masks = filled(MASK, groups * size, device).expand(n, -1).view(n, groups, size)
    if anchor is not None and size:
        anchor = anchor.view(n, -1, 1)
        masks = torch.cat([anchor.expand(n, groups, 1), masks[:, :, 1:]], 2)
    slots = steps(size, device) if groups == 1 else steps(size, device).repeat(groups)
    return DraftRows(masks.flatten(1), slots.expand(n, -1), features)


def guesses(backbone: Backbone, states: Tensor, path) -> Tensor:
    """Marginals of drafts by their hidden states. [N, T, d] -> [N, T, V] logits, the mask's own id banned"""
    return ban_mask(backbone.logits(states), path.mask_id)


def states(
    backbone: Backbone,
    cache: KVCache,
    anchor: Tensor,
    start: Tensor,
    size: int,
    path,
    features: Tensor | None = None,
    n_keys: int | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Hidden states of the drafts of the size - 1 positions after the anchor: what the head and a path's heads read.

    Args:
        backbone: with a mask path.
        cache: committed up to `start`; the draft's rows stay uncommitted.
        anchor: [N] long, the bonus token, whose position is `start`.
        start: [N] long, committed lengths.
        size: nodes that the resulting chain will have, the anchor included.
        path: the mask path's configuration.
        features: [N, F] of the last committed position, for a path that wants them.
        n_keys: K of `KVCache.bind`, where the caller fixes it.
        known: [N, size - 1] long, draft tokens that stand in slots 1, 2, ... instead of masks; `MASK` where none does.

    Returns:
        [N, size - 1, d]
    """
    n_rows = path.rows(size)  # a shifted group's last row would predict past the block
    features = None if features is None else features[:, None]
    if path.seed_row:
        clean = chain(start, 1)
        rows = overlapped(clean, torch.zeros_like(anchor)[:, None], n_rows, path.causal) if n_rows else clean
    else:
        rows = block_layout(start, n_rows, path.causal)
    inputs = draft_inputs(None if path.seed_row else anchor, len(anchor), n_rows, 1, anchor.device, features)
    if known is not None:
        inputs = replace(inputs, tokens=torch.cat([anchor[:, None], known[:, : n_rows - 1]], 1))
    if path.noise == "uniform":
        drawn = noise(anchor, rows.positions[:, rows.n_clean :], backbone.vocab_size, path.mask_id)
        inputs = replace(inputs, tokens=torch.where(inputs.tokens == MASK, drawn, inputs.tokens))
    # the seed's keys and values are not committed here: verification writes the same ones again
    tokens = anchor[:, None] if path.seed_row else None
    hidden = backbone(rows, cache, tokens, inputs if n_rows else None, n_keys=n_keys)
    if path.seed_row:
        return torch.cat([hidden.clean, hidden.draft], 1)
    return hidden.draft if path.shift else hidden.draft[:, 1:]


def noise(anchor: Tensor, positions: Tensor, vocab_size: int, mask_id: int | None = None) -> Tensor:
    """Random tokens in the place of masks, a function of the anchor's token and the position; never the mask's own id.

    Args:
        anchor: [N] long.
        positions: [N, D] long.
        vocab_size: V.
        mask_id: a vocabulary id that is left out.

    Returns:
        [N, D] long
    """
    return uniform_tokens(sampling.hashed(anchor[:, None], sampling.NOISE, positions), vocab_size, mask_id)


def uniform_tokens(bits: Tensor, vocab_size: int, mask_id: int | None = None) -> Tensor:
    """Vocabulary ids from well-mixed integers, all equally likely but for the mask's own. [...] -> [...]"""
    tokens = bits.remainder(vocab_size - (mask_id is not None))
    return tokens if mask_id is None else tokens + (tokens >= mask_id)


def ban_mask(logits: Tensor, mask_id: int | None) -> Tensor:
    """A mask is an input, never a guess."""
    if mask_id is not None:
        logits[..., mask_id] = float("-inf")
    return logits
