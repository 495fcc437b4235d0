"""LoRA deltas of draft rows folded into whole weights: one product for three, at the price of the weights' memory."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor, nn

from selfspec.backbone import Backbone
from selfspec.routed import RoutedLinear


def merge(backbone: Backbone) -> int:
    """Fold every delta that can be (it has a method `whole`) into a weight of its own, if that leaves room.

    The mask path keeps its deltas; changes to them are not seen any more. Drafts may differ in the last bits, as the
    folded weight is rounded; clean rows read their base as before.

    Args:
        backbone: for decoding alone, changed in place.

    Returns:
        Bytes that the folded weights take; 0 where there is nothing to fold, or no room.
    """
    routed = [m for m in backbone.layers.modules() if isinstance(m, RoutedLinear) and hasattr(m.delta, "whole")]
    weights: list[Tensor] = [m.base.weight for m in routed]  # type: ignore[misc]
    nbytes = sum(w.numel() * w.element_size() for w in weights)
    if backbone.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(backbone.device)
    else:
        free = psutil.virtual_memory().available
    if 4 * nbytes > free:  # most of it is for keys and values
        return 0
    for module in routed:
        whole: nn.Module = module.delta.whole(module.base)  # type: ignore[operator]
        module.delta = whole.requires_grad_(False)
    return nbytes
