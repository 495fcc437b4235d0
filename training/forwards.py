"""Measured forward times, and what a token costs by them: what rows of a sweep are compared by."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Forwards:
    """Measured forward times at batch 1.

    Attributes:
        clean: rows -> milliseconds.
        draft: entry layer -> rows -> milliseconds.
    """

    clean: dict[int, float]
    draft: dict[int, dict[int, float]]

    @classmethod
    def load(cls, file: str | Path) -> Forwards:
        """From the JSON of `benchmarks/forward_times.py`; of several kernels, those with most draft points.

        Raises:
            ValueError: it holds no draft times.
        """
        data = json.loads(Path(file).read_text())
        parts = []
        for part in data if isinstance(data, list) else [data]:
            points = [p for p in part["points"] if p["requests"] == 1]
            graph = any(p["graph"] for p in points)  # what decodes is a graph where there is one
            parts.append([p for p in points if p["graph"] == graph])
        best = max(parts, key=lambda points: sum(p["kind"] == "draft" for p in points), default=[])
        clean = {p["rows"]: p["ms"] for p in best if p["kind"] == "clean"}
        draft: dict[int, dict[int, float]] = {}
        for p in best:
            if p["kind"] == "draft":
                draft.setdefault(p["entry"], {})[p["rows"]] = p["ms"]
        if not clean or not draft:
            raise ValueError(f"{file} holds no clean and draft times of one request")
        return cls(clean, draft)

    def ms(self, kind: str, rows: int, entry: int = 0) -> float | None:
        """Time of a forward, interpolated between measured points; None outside of them."""
        if kind == "clean":
            return between(self.clean, rows)
        at = {e: t for e, points in self.draft.items() if (t := between(points, rows)) is not None}
        return between(at, entry)

    def per_token(self, block: int, entry: int, tau: float | None) -> float | None:
        """Milliseconds per token of sequential rounds: draft a block, verify it as a chain."""
        draft, verify = self.ms("draft", block, entry), self.ms("clean", block)
        return round((draft + verify) / tau, 4) if draft and verify and tau else None


def between(points: dict[int, float], x: int) -> float | None:
    """Linear interpolation; None outside the points."""
    below, above = max((p for p in points if p <= x), default=None), min((p for p in points if p >= x), default=None)
    if below is None or above is None:
        return None
    share = 0.0 if above == below else (x - below) / (above - below)
    return (1 - share) * points[below] + share * points[above]
