"""DBloom's block growth: a schedule of block sizes rather than a loss.

Widening a trained block hurts its early slots, so blocks grow while training: the schedule is cut into equal stages,
one for each size, and a stage's groups have just that many rows. UNO grows 2-4-6-8-12-16 in the same way. That all
groups of a stage have the stage's size, and that stages are equal, are choices. DBloom advises to look at the histogram
of accepted lengths first: growth pays where full blocks are common.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def block(progress: float, sizes: Sequence[int], largest: int) -> int:
    """Block size at a point of the schedule.

    Args:
        progress: share of the schedule that is done, 0 to 1.
        sizes: of the stages, in order; empty never grows.
        largest: the adapter's block size.

    Raises:
        ValueError: sizes that shrink, start below 2 or don't end at the adapter's block size.
    """
    if not sizes:
        return largest
    if sizes[0] < 2 or sizes[-1] != largest or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"growth={tuple(sizes)}: expected rising block sizes from 2 on that end at {largest}")
    return sizes[min(len(sizes) - 1, int(progress * len(sizes)))]
