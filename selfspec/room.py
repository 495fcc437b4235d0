"""How many requests fit into memory."""

from __future__ import annotations

import psutil
import torch

from selfspec.backbone import Backbone
from selfspec.joining import CHUNK
from selfspec.plan import Plan
from selfspec.plan.planner import Policy


def tail_of(policy: Plan | Policy, capacity: int) -> int:
    """Rows of one forward that a session's slots have room for behind a request's positions."""
    plans = [policy] if isinstance(policy, Plan) else policy.plans
    return max(*(p.rows for p in plans), min(CHUNK, capacity))


def fitting(backbone: Backbone, positions: int, share: float = 0.7) -> int:
    """Requests of so many positions (the tail's among them) that fit into that share of the device's free memory."""
    if backbone.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(backbone.device)[0]
    else:
        free = psutil.virtual_memory().available
    size = torch.empty(0, dtype=backbone.dtype).element_size()
    per_position = size * sum(h * (d + dv) for h, d, dv in backbone.kv_shapes)
    return max(1, int(share * free / (per_position * positions)))
