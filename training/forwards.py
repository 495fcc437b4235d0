"""Measured forward times, and what a token costs by them: what rows of a sweep are compared by."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

from selfspec import hub
from selfspec.plan import GROUPS, Plan


@dataclass(frozen=True)
class Forwards:
    """Measured forward times at batch 1.

    Attributes:
        clean: rows -> milliseconds.
        draft: entry layer -> rows -> milliseconds.
        n_layers: of the model that was measured; None where the file does not say.
    """

    clean: dict[int, float]
    draft: dict[int, dict[int, float]]
    n_layers: int | None = None

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
            parts.append(([p for p in points if p["graph"] == graph], part.get("n_layers")))
        best, layers = max(parts, key=lambda part: sum(p["kind"] == "draft" for p in part[0]), default=([], None))
        clean = {p["rows"]: p["ms"] for p in best if p["kind"] == "clean"}
        draft: dict[int, dict[int, float]] = {}
        for p in best:
            if p["kind"] == "draft":
                draft.setdefault(p["entry"], {})[p["rows"]] = p["ms"]
        if not clean or not draft:
            raise ValueError(f"{file} holds no clean and draft times of one request")
        return cls(clean, draft, layers)

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

    def overlap(self, plan: Plan, entry: int) -> float | None:
        """Time of a verification with draft rows beside it; None where the times do not reach so many rows.

        Clean rows run alone below the entry layer and all rows from there on, each layer costing alike; what a mask
        of groups costs beyond its rows is not in it. Where the number of layers is not known all rows are taken to
        run through all of them.
        """
        alone, together = self.ms("clean", plan.nodes), self.ms("clean", plan.nodes + plan.group_rows)
        if alone is None or together is None:
            return None
        below = entry / self.n_layers if self.n_layers else 0.0
        return below * alone + (1 - below) * together

    def per_overlapped(
        self, block: int, entry: int, drafts: Iterable[tuple[float, Sequence[float | None]]]
    ) -> float | None:
        """Milliseconds per token of overlapped rounds, with as many groups as make it least.

        A group on every node always has the next draft ready, and is more rows than a table often holds. With fewer a
        round may end where none hangs: the next one has the anchor alone to verify, whose group cannot miss. So, of
        rounds whose draft is followed by a saved one with chance c, 1 / (2 - c) have a draft.

        Args:
            block: B, nodes of a chain and rows of a group.
            entry: first layer of the draft rows.
            drafts: of each set of texts tau of hidden groups, and the acceptance of each slot given those before it.

        Returns:
            None where the times tell of no number of `GROUPS`.
        """
        sets, prices = list(drafts), []
        for plan in (Plan("overlap", block, groups=groups) for groups in GROUPS):
            if sets and (ms := self.overlap(plan, entry)) is not None:
                tokens = [1 + (tau - 1) / (2 - kept(acceptance, plan.kept)) for tau, acceptance in sets]
                prices.append(ms / statistics.fmean(tokens))
        return round(min(prices), 4) if prices else None


def find(name: str, file: Path, model: str) -> Forwards:
    """The forward times that a sweep names.

    Args:
        name: a path from the sweep's folder or, if there is none, from the working directory.
        file: the sweep.
        model: that the sweep trains for.

    Raises:
        ValueError: there is no such file, or its times are those of a model of another depth.
    """
    found = next((path for path in (file.parent / name, Path(name)) if path.is_file()), None)
    if found is None:
        raise ValueError(f"{file}: latency names {name}, which is neither in {file.parent} nor in {Path.cwd()}")
    times = Forwards.load(found)
    if times.n_layers:
        layers = getattr(hub.load_config(model).get_text_config(decoder=True), "num_hidden_layers", None)
        if layers != times.n_layers:
            raise ValueError(
                f"{file}: {found} was measured for {times.n_layers} layers, and {model} has {layers}; measure its own "
                f"with benchmarks/forward_times.py --model {model} --json FILE and name that, or leave latency out"
            )
    return times


def kept(acceptance: Sequence[float | None], groups: int | None) -> float:
    """The chance that a verification ends where a group hangs, the groups on its likeliest ends.

    P(exactly k) = survival(k) - survival(k + 1), as planners have it; a request that picks ends by its own draft does
    no worse.

    Args:
        acceptance: of each slot given those before it; None where no round got there.
        groups: None is one on every node.
    """
    survival = [*accumulate([1.0, *(share or 0.0 for share in acceptance)], mul), 0.0]
    return sum(sorted((upto - beyond for upto, beyond in pairwise(survival)), reverse=True)[:groups])


def between(points: dict[int, float], x: int) -> float | None:
    """Linear interpolation; None outside the points."""
    below, above = max((p for p in points if p <= x), default=None), min((p for p in points if p >= x), default=None)
    if below is None or above is None:
        return None
    share = 0.0 if above == below else (x - below) / (above - below)
    return (1 - share) * points[below] + share * points[above]
