"""Prompt lookup: the text itself is the draft model (Prompt Lookup Decoding, github.com/apoorvumang).

What followed the last tokens when they stood in the context before is guessed to follow again. It needs no adapter and
no forward, and pays where answers quote their prompt or repeat themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft import DraftTree

LONGEST, SHORTEST = 3, 2  # n-grams looked up; single tokens match too much


def lookup(text: Tensor, start: Tensor, size: int) -> DraftTree:
    """A chain for every request: what followed the last occurrence of the longest known ending of its text.

    Args:
        text: [N, W] long, the token of position p at p.
        start: [N] long, position of the anchor, the text's last token.
        size: nodes of the chain, the anchor included.

    Returns:
        Chains of `size` nodes; -1 where nothing is guessed.
    """
    n, width = text.shape
    place = torch.arange(width, device=text.device)
    hit = place < start[:, None]  # an n-gram that ends here is followed by a known token
    end = torch.full_like(start, -1)
    for length in range(1, LONGEST + 1):
        back = length - 1
        want = text.gather(1, (start - back).clamp(min=0)[:, None])  # [N, 1]
        hit = hit & (text.roll(back, 1) == want) & (place >= back) & (start >= back)[:, None]
        if length >= SHORTEST:
            last = torch.where(hit, place, -1).amax(1)  # [N]
            end = torch.where(last >= 0, last, end)
    at = end[:, None] + 1 + torch.arange(size - 1, device=text.device)  # [N, size - 1]
    known = (end >= 0)[:, None] & (at <= start[:, None])
    guesses = torch.where(known, text.gather(1, at.clamp(max=width - 1)), -1)
    return DraftTree(torch.cat([text.gather(1, start[:, None]), guesses], 1))
