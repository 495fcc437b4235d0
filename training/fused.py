"""Label log-probabilities by liger-kernel's fused linear cross-entropy (arXiv 2410.10989).

It makes logits one chunk of rows at a time and forgets them: memory does not grow with rows x vocabulary, and the
backward pass multiplies with the head once more. Every call waits for the device, so no CUDA graph can hold one.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version
from torch import Tensor


def label_logp(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log softmax(h W^T + b)[label] of every row, and whether the label is the most probable token.

    Args:
        hidden: [M, d]
        weight: [V, d], no gradient.
        bias: [V], likewise, or None.
        labels: [M] long, not negative.

    Returns:
        [M] float32 with a gradient for `hidden`, and [M] bool.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    no = None, -100, 0.0, 0.0  # weights of classes, an ignored label, penalties, smoothing
    loss, _, right, _ = Fused.apply(hidden, weight, labels, bias, *no, "none", None, False, None, False, True)
    return -loss, right > 0


def require() -> None:
    """Refuse where it is not installed, or so old that every row gets the first one's gradient (before 0.8.2).

    Raises:
        ValueError: says how to install it.
    """
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or Version(found) < Version("0.8.2"):
        raise ValueError(f"logits=forget needs liger-kernel 0.8.2 or later, found {found}: pip install 'selfspec[gpu]'")
