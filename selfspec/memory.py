"""How much memory decoding takes, and how many requests fit."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from selfspec.backbone import Backbone
from selfspec.joining import CHUNK
from selfspec.plan import Plan

SHARE = 0.7  # of the free memory: activations, logits and graphs want some too


def tail_rows(plans: Sequence[Plan], capacity: int) -> int:
    """Rows of the largest forward of a session, which stand behind the positions of each of its slots."""
    return max(*(p.rows for p in plans), min(CHUNK, capacity))


def position_bytes(backbone: Backbone) -> int:
    """Bytes of one position's keys and values in all layers."""
    size = torch.empty(0, dtype=backbone.dtype).element_size()
    return size * sum(h * (d + dv) for h, d, dv in backbone.kv_shapes)


def slot_bytes(backbone: Backbone, plans: Sequence[Plan], capacity: int) -> int:
    """Bytes of one slot of a session: its positions, and the rows of a running forward behind them."""
    return position_bytes(backbone) * (capacity + tail_rows(plans, capacity))


def free_memory(backbone: Backbone, share: float = SHARE) -> int:
    """A share of the device's free memory, in bytes."""
    if backbone.device.type == "cuda":
        torch.cuda.empty_cache()
        return int(share * torch.cuda.mem_get_info(backbone.device)[0])
    return int(share * psutil.virtual_memory().available)


def fitting(backbone: Backbone, capacity: int, plans: Sequence[Plan] = (Plan("ar", 1),)) -> int:
    """Requests of some length whose slots fit into the free memory, at least 1."""
    return max(1, free_memory(backbone) // slot_bytes(backbone, plans, capacity))
