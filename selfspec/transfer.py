"""Numbers on their way from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def onto(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor on the device, made without waiting for what the device still works on.

    `torch.tensor(values, device="cuda")` copies from memory that may be freed at once, and so waits for every kernel
    started before: each would let the device run dry. Pinned memory is kept until the copy has read it.
    """
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
