"""D-Loop's complementary views (arXiv 2610.06011): a choice of groups and labels that any loss composes with.

Two groups at every anchor with one random split s: the anchor-only view holds no token behind slot 0 and is charged for
the tokens 1..s; the prefix view knows the tokens 1..s and is charged for those after them. So each view is trained only
where it is used: the first pass keeps a prefix, the second regenerates the suffix. Splits are uniform in 1..B-2, and
the prefix is the text's own (teacher forcing), which is what a prefix that verification will accept looks like; both
are choices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def views(anchors: Tensor, size: int, random: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both views of every anchor, side by side.

    Args:
        anchors: [N, A] long, -1 pads.
        size: B, rows of a group; 3 at least.
        random: [N, A] numbers in [0, 1), one for every split.

    Returns:
        anchors, splits (slots 1..s known) and ends (last token that is charged for), each [N, 2A] long.
    """
    split = 1 + (random * (size - 2)).long()
    splits = torch.stack([torch.zeros_like(split), split], -1)
    ends = torch.stack([split, torch.full_like(split, size)], -1)
    return anchors.repeat_interleave(2, 1), splits.flatten(1), ends.flatten(1)
