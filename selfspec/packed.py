"""bfloat16 linears on a CPU with their weights laid out once as oneDNN wants them, instead of at every call.

The products are the same, only sooner: for a few rows, laying out the weights costs as much as multiplying by them.
"""

from __future__ import annotations

from functools import cache

import psutil
import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A Linear over a copy of its weight in oneDNN's own layout; for inference alone.

    Args:
        weight: [out, in] bfloat16
        bias: [out] or None
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor, base: nn.Module | None = None) -> Tensor:
        """[..., in] -> [..., out]; `base` is what a mask path's delta is handed, and not needed."""
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.packed, self.bias, "none", [], "")


def packable(device: torch.device, dtype: torch.dtype, nbytes: int) -> bool:
    """Whether packing works here, pays, and leaves room.

    Args:
        device: of the weights.
        dtype: of the weights.
        nbytes: of all that would be copied.
    """
    fits = 2 * nbytes < psutil.virtual_memory().available
    return device.type == "cpu" and dtype == torch.bfloat16 and fits and _packs()


@cache
def _packs() -> bool:
    """Whether this build and this processor do it: oneDNN refuses bfloat16 without AVX-512 or its like."""
    try:
        PackedLinear(torch.zeros(16, 16, dtype=torch.bfloat16), None)(torch.zeros(1, 16, dtype=torch.bfloat16))
    except (AttributeError, RuntimeError):
        return False
    return True


def pack(module: nn.Module, done: dict[int, nn.Module] | None = None) -> None:
    """Put a `PackedLinear` in the place of every Linear, and of every whole copy of one, below a shadow module.

    Args:
        module: changed in place.
        done: what was packed already, by the place of its weight: backbones of one model share it.
    """
    done = {} if done is None else done
    for name, child in module._modules.items():
        if child is None:
            continue
        weight = getattr(child, "weight", None)
        # a mask path's whole copy (`CopyDelta`) stands in for a Linear, and says so
        if (type(child) is nn.Linear or getattr(child, "is_linear", False)) and isinstance(weight, Tensor):
            bias, key = child.bias, weight.data_ptr()
            packed = done.get(key) or PackedLinear(weight, bias if isinstance(bias, Tensor) else None)
            if type(child) is nn.Linear:  # the model's own stay where they are; a copy's place may be used again
                done[key] = packed
            module._modules[name] = packed
        else:
            pack(child, done)
