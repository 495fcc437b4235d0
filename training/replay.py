"""Draft-OPD's replay: train again from the positions where verification failed (arXiv 2605.29343).

A group is drafted without gradient and verified greedily against its answer; where it is first rejected, the verifier
puts its own token, and the next draft starts there. Those positions become anchors: hard ones, and the ones that
decoding visits. On-policy terms (`objectives.on_policy`) then judge what is drafted from them. One clean and one draft
forward more; which share of the groups is replayed is a choice, the paper's mix is not known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.backbone import Backbone
from selfspec.training import anchors as anchoring
from selfspec.training import noise
from selfspec.training.head import Head
from selfspec.training.objectives.slots import missed
from selfspec.training.pack import Pack
from selfspec.training.step import draft_states, run_clean


@torch.no_grad()
def failures(backbone: Backbone, head: Head, pack: Pack, anchors: Tensor) -> Tensor:
    """Where drafts from these anchors are first rejected.

    Args:
        backbone: with a mask path.
        head: of the backbone.
        pack: the documents.
        anchors: [N, A] long, -1 pads.

    Returns:
        [N, A] long: slot of the token that the verifier put right; the anchor itself where nothing is rejected or
        nothing follows the position.
    """
    config = backbone.path.config  # type: ignore[union-attr]
    groups = anchoring.path_groups(config, pack, anchors)
    groups = noise.fill(groups, pack, config.noise, backbone.vocab_size, config.mask_id, None)
    cache, clean, taps = run_clean(backbone, pack)
    hidden = draft_states(backbone, groups, cache, clean, taps)  # [N, A, B - 1, d]
    steps = torch.arange(1, config.block_size, device=anchors.device)
    labels = anchoring.following(pack, anchors, steps).flatten(0, 1)
    guess = head.argmax(hidden.flatten(0, 2), config.mask_id).view(labels.shape)
    drafts = labels >= 0
    first = drafts & (guess != labels) & (missed(guess == labels, drafts) == 0)
    at = anchors + (first * steps).sum(1).view(anchors.shape)
    able = anchoring.eligible(pack).gather(1, at.clamp(min=0)) & (anchors >= 0)
    return torch.where(able, at, anchors)
