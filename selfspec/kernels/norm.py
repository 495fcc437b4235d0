"""RMSNorm of rows, row-invariant (arXiv 1910.07467, rounded where transformers' LlamaRMSNorm rounds)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rmsnorm(x, weight, out, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64) * K
    squares = tl.full([BLOCK], 0.0, tl.float32)
    for low in range(0, K, BLOCK):
        k = low + tl.arange(0, BLOCK)
        v = tl.load(x + row + k, k < K, 0.0).to(tl.float32)
        squares += v * v
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    for low in range(0, K, BLOCK):
        k = low + tl.arange(0, BLOCK)
        v = tl.load(x + row + k, k < K, 0.0)
        v = (v.to(tl.float32) * factor).to(v.dtype).to(tl.float32)
        v = v * tl.load(weight + k, k < K, 0.0).to(tl.float32)
        tl.store(out + row + k, v.to(out.dtype.element_ty), k < K)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised rows.

    Args:
        x: [..., K] in bfloat16, float16 or float32.
        weight: [K] in x's dtype.
        eps: added to the mean square.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    k = x.shape[-1]
    if x.numel():
        block = min(1024, triton.next_power_of_2(k))
        _rmsnorm[(x.numel() // k,)](x, weight, out, eps, K=k, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return out


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by torch."""
    v = x.float()
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    return weight * v.to(x.dtype)
