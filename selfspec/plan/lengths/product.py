"""Running-product threshold (FlexDraft's selective verification, arXiv 2605.20022).

d = the number of positions i with c_1 c_2 ... c_i >= threshold. Needs no latency table: good where rows are nearly free
and only hopeless tails are to be saved. The published threshold is 0.01.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Product:
    """Verify while the whole prefix is likely enough.

    Attributes:
        threshold: on the running product.
        least: drafts verified in any case.
    """

    threshold: float = 0.01
    least: int = 1
    in_order = True

    def __call__(self, confidence: Tensor) -> Tensor:
        """[N, T] -> [N] long."""
        likely = (confidence.cumprod(1) >= self.threshold).sum(1)
        return likely.clamp(min=min(self.least, confidence.shape[1]))
