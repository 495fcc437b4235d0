"""BASTION (arXiv 2605.29727): best-first growth against a latency model that is calibrated while it is used.

Latency of r rows over c committed positions is a roofline of two analytic branches, each with a scale and an offset:

    T(r, c) = max(a_m * memory(r, c) + b_m,  a_c * compute(r, c) + b_c),   a, b >= 0.

With path probabilities p_1 >= p_2 >= ..., S(m) = 1 + p_1 + ... + p_m and C(m) the round's time at m nodes (draft and
the rest included), the tree grows while a node earns more than it costs,

    p_{m+1} * C(m) > S(m) * (C(m + 1) - C(m)),

and at least to `smallest`; sizes are rounded down to whole buckets, as graphs have it. Good where clocks or neighbours
change the machine's speed while it serves: rounds calibrate what a latency table has only begun (`selfspec.growth`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

DECAY = 0.9  # of a point's old mean when it is measured again
ROUNDS = 20  # of assigning points to branches and refitting both
MOST = 512  # points; those that were not measured for longest are forgotten

Point = tuple[int, int, int]
"""Rows and context of a request, and the number of requests."""


@dataclass
class Roofline:
    """The latency model. Scales are fitted, so that units of the ideal times do not matter.

    Attributes:
        weight_bytes: read by every forward.
        kv_bytes: of one position's keys and values, all layers.
        flops_per_row: of one row outside attention, about twice the parameters.
        bandwidth: bytes per ms.
        throughput: floating point operations per ms.
        width: query width of all layers together, L * H * D.
        fit: a_m, b_m, a_c, b_c.
        seen: mean ms of what was timed.
        prior: ms of what nobody has timed yet, as it is expected.
    """

    weight_bytes: float
    kv_bytes: float
    flops_per_row: float
    bandwidth: float
    throughput: float
    width: float = 0.0
    fit: tuple[float, float, float, float] = (1.0, 0.0, 1.0, 0.0)
    seen: dict[Point, float] = field(default_factory=dict)
    prior: dict[Point, float] = field(default_factory=dict)

    def branches(
        self, rows: np.ndarray, context: np.ndarray, requests: np.ndarray | float = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ideal ms of moving the data and of the arithmetic."""
        memory = (self.weight_bytes + requests * self.kv_bytes * (context + rows)) / self.bandwidth
        compute = requests * rows * (self.flops_per_row + 4 * self.width * (context + rows)) / self.throughput
        return memory, compute

    def observe(self, rows: int, context: int, ms: float, requests: int = 1) -> None:
        """Note one verification's time."""
        old = self.seen.pop((rows, context, requests), None)
        if len(self.seen) >= MOST:
            self.seen.pop(next(iter(self.seen)))
        self.seen[rows, context, requests] = ms if old is None else DECAY * old + (1 - DECAY) * ms

    def calibrate(self) -> None:
        """Refit scales and offsets to all that is known: alternate between assigning points and least squares."""
        known = self.prior | self.seen
        if len(known) < 2:
            return
        points, ms = np.array(list(known), dtype=float), np.array(list(known.values()))
        memory, compute = self.branches(*points.T)
        bound = compute > np.median(compute)  # a first guess: many rows are bound by arithmetic
        best, least = self.fit, np.inf
        for _ in range(ROUNDS):
            fit = (*_line(memory[~bound], ms[~bound]), *_line(compute[bound], ms[bound]))
            low, high = fit[0] * memory + fit[1], fit[2] * compute + fit[3]
            error = float(((np.maximum(low, high) - ms) ** 2).sum())
            if error < least:
                best, least = fit, error
            if np.array_equal(high > low, bound):
                break
            bound = high > low
        self.fit = best

    def __call__(self, rows: np.ndarray | int, context: int = 0, requests: int = 1) -> np.ndarray:
        """Estimated ms of a verification."""
        memory, compute = self.branches(np.asarray(rows, dtype=float), np.asarray(context, dtype=float), requests)
        a_m, b_m, a_c, b_c = self.fit
        return np.maximum(a_m * memory + b_m, a_c * compute + b_c)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least squares y = a x + b with a, b >= 0; nothing to fit leaves a branch that never binds."""
    if not len(x):
        return 0.0, 0.0
    spread = ((x - x.mean()) ** 2).sum()
    a = max(0.0, float(((x - x.mean()) * (y - y.mean())).sum() / spread)) if spread > 0 else 0.0
    b = float(y.mean() - a * x.mean())
    return (a, b) if b >= 0 else (float((x * y).sum() / (x * x).sum()), 0.0)


@dataclass(frozen=True)
class Bastion:
    """Ends a tree where the next node does not pay.

    Attributes:
        smallest: nodes, the anchor included, that a tree has in any case.
        bucket: sizes are rounded down to its multiples (or to `smallest`).
    """

    smallest: int = 8
    bucket: int = 8

    def __call__(self, scores: Tensor, costs: Tensor) -> Tensor:
        """See `draft.trees`."""
        c, p = costs, scores.exp()
        pays = p[:, 1:] * c[:-1] > p.cumsum(1)[:, :-1] * (c[1:] - c[:-1])  # [N, M - 1]
        pays |= torch.arange(2, p.shape[1] + 1, device=pays.device) <= self.smallest
        size = 1 + pays.long().cumprod(1).sum(1)
        return torch.maximum(size // self.bucket * self.bucket, size.clamp(max=self.smallest))
