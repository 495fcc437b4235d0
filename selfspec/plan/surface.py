"""T(requests, rows, context) of one kind of forward, from the points that were measured."""

from __future__ import annotations

from itertools import product

import numpy as np

Cell = tuple[int, int, int]  # requests, rows per request, committed positions


class Surface:
    """Monotone interpolation between measured cells, and an honest guess beyond them.

    Inside the measured ranges: the measured value at a measured cell, linear interpolation between cells. With `steps`
    requests are padded to the next power of two first, as CUDA graphs are. A cell that nobody measured is completed
    from F(requests * rows) + K * requests * context: F rises with the rows that a forward multiplies, K is what reading
    one cached position costs.

    Monotone: a smaller forward could be padded to a larger one, so it costs no more than the cheapest larger one that
    was measured; what a measurement shows beyond that is noise, which only ever adds time.

    Beyond the ranges: as F and K go on from the last measured cell, and K below the first context, too. In proportion
    to requests alone, 32 requests of one row would cost 32 forwards, and drafts that lose would seem to win as they do
    for one request. Where F ends too, in proportion to rows: an upper bound as long as a forward has fixed costs, so
    that nothing wins by hope.

    Args:
        cells: measured milliseconds.
        steps: requests are padded to powers of two.
        like: what F goes on as where it ends; by default it rises in proportion to rows.
    """

    def __init__(self, cells: dict[Cell, float], steps: bool = False, like: Surface | None = None):
        if not cells:
            raise ValueError("a surface needs at least one measured point")
        self.cells, self.steps, self.like = dict(cells), steps, like
        self.axes = [np.array(sorted({c[i] for c in cells}), float) for i in range(3)]
        self.per_position = _per_position(cells)
        work: dict[float, float] = {}  # rows of a forward -> ms without its reading of the cache
        for (n, r, c), ms in cells.items():
            rest = max(ms - self.per_position * n * c, 0.0)
            work[n * r] = min(rest, work.get(n * r, np.inf))
        self.width = np.array(sorted(work), float)
        self.of_width = np.minimum.accumulate(np.array([work[w] for w in self.width])[::-1])[::-1]
        self.grid = self._completed()

    def _work(self, rows: np.ndarray | float) -> np.ndarray:
        """F: milliseconds of a forward of so many rows in all, the reading of the cache apart."""
        known, most = np.interp(rows, self.width, self.of_width), self.width[-1]
        if self.like is None:
            return known * np.maximum(1.0, rows / most)
        return known * np.maximum(1.0, self.like._work(rows) / self.like._work(most))

    def _completed(self) -> np.ndarray:
        """Milliseconds of every cell. [requests, rows, contexts]"""
        grid = np.empty([len(a) for a in self.axes])
        for at in product(*(range(len(a)) for a in self.axes)):
            n, r, c = (int(a[i]) for a, i in zip(self.axes, at, strict=True))
            known = self.cells.get((n, r, c))
            if known is None:
                below = [t for cell, t in self.cells.items() if cell[0] <= n and cell[1] <= r and cell[2] <= c]
                known = max([float(self._work(n * r)) + self.per_position * n * c, *below])
            grid[at] = known
        for axis in range(3):
            grid = np.flip(np.minimum.accumulate(np.flip(grid, axis), axis), axis)
        return grid

    def __call__(self, requests: np.ndarray | float, rows: float, context: float) -> np.ndarray:
        """Milliseconds. `requests` may be an array; the result has its shape."""
        n, r = np.asarray(requests, float), float(rows)
        if self.steps:
            n = 2.0 ** np.ceil(np.log2(np.maximum(n, 1.0)))
        inside, within = np.minimum(n, self.axes[0][-1]), min(r, self.axes[1][-1])
        slab = _along(self.grid, 2, self.axes[2], np.asarray(context, float))  # [requests, rows]
        line = _along(slab, 1, self.axes[1], np.asarray(within))  # [requests]
        ms = _along(line, 0, self.axes[0], inside)
        reading = self.per_position * inside * np.clip(float(context), self.axes[2][0], self.axes[2][-1])
        growth = self._work(n * r) / self._work(inside * within)
        return np.maximum(ms - reading, 0.0) * growth + self.per_position * n * float(context)

    def how(self, requests: float, rows: float, context: float) -> str:
        """ "measured", "between" measured points (interpolated or padded) or "beyond" them (extrapolated)."""
        if (requests, rows, context) in self.cells:
            return "measured"
        asked = requests, rows, context
        return "beyond" if any(x > a[-1] for x, a in zip(asked, self.axes, strict=True)) else "between"


def _per_position(cells: dict[Cell, float]) -> float:
    """Milliseconds that one cached position of one request adds, from cells that differ in nothing else."""
    slopes = []
    shapes = {(n, r) for n, r, _ in cells}
    for n, r in shapes:
        contexts = sorted(c for m, s, c in cells if (m, s) == (n, r))
        if len(contexts) > 1:
            rise = cells[n, r, contexts[-1]] - cells[n, r, contexts[0]]
            slopes.append((max(rise, 0.0) / (n * (contexts[-1] - contexts[0])), n))
    # the largest batch shows it best: alone, a request's reading hides behind what a forward costs anyway
    return max(slopes, key=lambda s: s[1])[0] if slopes else 0.0


def _along(grid: np.ndarray, axis: int, knots: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Linear interpolation along one axis, constant outside; a scalar `at` drops the axis."""
    high = np.clip(np.searchsorted(knots, at), 1, max(len(knots) - 1, 1))
    if len(knots) == 1:
        return np.take(grid, np.zeros_like(at, dtype=int), axis)
    low = high - 1
    share = np.clip((at - knots[low]) / (knots[high] - knots[low]), 0.0, 1.0)
    return np.take(grid, low, axis) * (1 - share) + np.take(grid, high, axis) * share
