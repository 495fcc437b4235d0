"""Noise of a block: what its unknown slots hold in training (`MaskPathConfig.noise`).

- "mask": masks, all of them: what a one-step drafter meets (TiDAR, DFlash, Orthrus). The default.
- "masked": BD3LM's schedule (arXiv 2503.09573; PEFT-BD's choice): every slot of a group stays masked with the group's
  own probability t, uniform in (0, 1), and otherwise holds its true token and predicts nothing; the loss `nelbo` then
  weighs a group 1/t. One draft stays masked in any case. It drafts from masks, as "mask" does.
- "uniform": random tokens of the vocabulary (UNO, arXiv 2609.04010), which need no embedding of their own, so that a
  plain LoRA is the whole adapter.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from selfspec import sampling
from selfspec.backbone import MASK
from selfspec.draft import block
from selfspec.training.anchors import IGNORE, Groups
from selfspec.training.pack import Pack

LOWEST = 1e-3  # of t; the bound's weight is 1/t


def fill(groups: Groups, pack: Pack, noise: str, vocab_size: int, mask_id: int | None, seeds: Tensor | None) -> Groups:
    """Put a path's noise where its groups hold masks.

    Args:
        groups: with masks.
        pack: that they stand in.
        noise: "mask", "masked" or "uniform".
        vocab_size: V.
        mask_id: the mask's own vocabulary id, which no noise may be.
        seeds: [N, A] long, a random number for every group; None puts what decoding will (evaluation).
    """
    unknown = groups.rows.tokens.view(groups.labels.shape) == MASK  # [N, A, B]
    if noise == "mask" or (noise == "masked" and seeds is None):
        return groups
    if noise == "masked":
        assert seeds is not None
        return _masked(groups, seeds)
    positions = groups.layout.positions.view(unknown.shape)
    if seeds is None:
        anchor = pack.tokens.gather(1, groups.anchors)  # [N, A]
        drawn = block.noise(anchor.flatten(), positions.flatten(0, 1), vocab_size, mask_id).view(unknown.shape)
    else:
        drawn = block.uniform_tokens(sampling.hashed(seeds[:, :, None], positions), vocab_size, mask_id)
    tokens = torch.where(unknown, drawn, groups.rows.tokens.view(unknown.shape))
    return replace(groups, rows=replace(groups.rows, tokens=tokens.flatten(1)))


def _masked(groups: Groups, seeds: Tensor) -> Groups:
    """Show drafts their own tokens with probability 1 - t. A hidden bonus stays hidden."""
    slots = torch.arange(groups.labels.shape[2], device=seeds.device)
    level = sampling.uniform(seeds, 0).clamp(min=LOWEST)  # t, [N, A]
    drafts = (groups.labels >= 0) & (groups.steps >= 1)
    draws = sampling.uniform(seeds[:, :, None], 1, slots).masked_fill(~drafts, 2.0)
    shown = drafts & (draws >= level[:, :, None]) & (draws > draws.amin(-1, keepdim=True))
    tokens = torch.where(shown, groups.labels, groups.rows.tokens.view(shown.shape))
    labels = groups.labels.masked_fill(shown, IGNORE)
    return replace(groups, rows=replace(groups.rows, tokens=tokens.flatten(1)), labels=labels, level=level)
