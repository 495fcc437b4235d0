"""Sharing out a batch: verification rows by survival, and requests over shapes. Exact, and tested by brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np


def allot(survival: np.ndarray, cost: Callable[[int], float], rate: float) -> np.ndarray:
    """Verify lengths of requests that share one budget of rows.

    A row is worth its survival, the product of the confidences up to it: the chance that it adds a token. Rows in
    falling survival are the best use of any budget, and survival falls along a request, so a prefix of that order is a
    prefix of every request. The budget itself maximises tokens - rate * ms, which is the long-run optimum when `rate`
    is the throughput that would be had otherwise (DSpark's rule, arXiv 2607.05147; RecGuide's V - rho * T). All budgets
    are compared: where the cost is a staircase, the optimum stands at the end of a step.

    Survival may be computed from marginals; a rule that read the drafted tokens themselves would bend the law of
    rejection sampling.

    Args:
        survival: [n, D], falling along D; 0 for positions that a request does not have.
        cost: milliseconds of a forward with so many rows in all (n anchors included).
        rate: tokens per millisecond.

    Returns:
        [n] drafts to verify, 0..D.
    """
    n, depth = survival.shape
    worth = np.minimum.accumulate(survival, 1).ravel()
    order = np.argsort(-worth, kind="stable")  # stable: of equals the earlier position first
    gain = np.concatenate([[0.0], np.cumsum(worth[order])])  # [n * D + 1]
    price = np.array([cost(n + k) for k in range(len(gain))])
    budget = int(np.argmax(gain - rate * price))
    taken = np.zeros(n * depth, int)
    taken[order[:budget]] = 1
    return taken.reshape(n, depth).sum(1)


def longest(survival: np.ndarray, lengths: Sequence[int], cost: Callable[[int], float], rate: float) -> int:
    """The one verify length of a batch whose rows stand in a rectangle: every request pays for the longest.

    Args:
        survival: [n, D] as in `allot`.
        lengths: nodes per request to choose from, anchor included.
        cost: milliseconds by nodes per request.
        rate: tokens per millisecond.
    """
    return max(lengths, key=lambda v: float(survival[:, : v - 1].sum()) - rate * cost(v))


def partition(
    tokens: np.ndarray, ms: np.ndarray, shapes: Sequence[int] | None = None, split: bool = True
) -> list[tuple[int, list[int]]]:
    """Put each request into one of at most two shapes, each a forward of its own, so that tokens per time is greatest.

    For two shapes and a number m of requests in the second, the cost is fixed, so the best m are those that gain most
    by it: one sort per pair covers every split (request-specific blocks, bucketed, as in RecGuide).

    Args:
        tokens: [n, K] expected tokens of each request in each shape.
        ms: [K, n + 1] milliseconds of a round of m requests in each shape; 0 for m = 0.
        shapes: consider only these.
        split: False keeps all requests in one.

    Returns:
        (shape, requests) of each forward; every request once.
    """
    n, k = tokens.shape
    some = list(range(k) if shapes is None else shapes)
    best = max((float(tokens[:, s].sum() / ms[s, n]), s, s, 0) for s in some)
    total = tokens.sum(0)
    for a, b in combinations(some, 2) if n > 1 and split else ():
        gain = np.sort(tokens[:, b] - tokens[:, a])[::-1].cumsum()[:-1]  # of the m = 1..n-1 that gain most by b
        rate = (total[a] + gain) / (ms[a, n - 1 : 0 : -1] + ms[b, 1:n])
        m = int(rate.argmax())
        if rate[m] > best[0] * (1 + 1e-9):
            best = float(rate[m]), a, b, m + 1
    _, a, b, m = best
    if not m:
        return [(a, list(range(n)))]
    order = np.argsort(-(tokens[:, b] - tokens[:, a]), kind="stable").tolist()
    return [(a, sorted(order[m:])), (b, sorted(order[:m]))]
