"""The latency table: T(kind, rows, requests, context, entry), and where it is kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import statistics
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfspec import hub
from selfspec.backbone import Backbone
from selfspec.machine import device_name, versions
from selfspec.plan.latency import Latency
from selfspec.plan.surface import Surface

FORMAT = 6  # part of the cache key: raise it when what is stored or measured changes


@dataclass(frozen=True)
class LatencyTable:
    """Measured forward times, and what they say about shapes in between.

    Attributes:
        points: measured; at least one of kind "clean".
        n_layers: of the model.
        setting: where and how they were measured; also what a stored table is found by.
        asked: the most requests at a time that a measurement within a time budget was to cover.
    """

    points: tuple[Latency, ...]
    n_layers: int
    setting: dict[str, Any] = field(default_factory=dict)
    asked: int = 0

    @cached_property
    def graphs(self) -> bool:
        """Whether rounds are CUDA graphs there: of powers of two requests, and started before the last one is read."""
        return any(p.graph for p in self.points)

    @cached_property
    def _surfaces(self) -> dict[tuple[str, int], Surface]:
        cells: dict[tuple[str, int], dict[tuple[int, int, int], float]] = {}
        for p in self.points:
            if p.kind != "overlap":
                cells.setdefault((p.kind, p.entry), {})[p.requests, p.rows, p.context] = p.ms
        steps = self.graphs
        clean = Surface(cells.pop(("clean", 0)), steps)
        like = {"draft": clean}
        return {("clean", 0): clean, **{k: Surface(c, steps, like.get(k[0])) for k, c in cells.items()}}

    def time(
        self,
        kind: str,
        rows: float,
        requests: np.ndarray | float = 1,
        context: float = 512,
        entry: int = 0,
        drafts: float = 0,
    ) -> np.ndarray:
        """Milliseconds of one forward with its head.

        An entry layer that was not measured is taken from its neighbours, each layer costing alike. An overlap is the
        clean rows below the entry layer and all rows from there on, times what measured overlaps took beyond that.

        Args:
            kind: "clean", "draft", "head", "overlap" or "tree"; heads and trees that were never measured cost
                nothing.
            rows: per request; of an overlap its clean rows, of a tree its nodes.
            requests: N, or an array of such.
            context: committed positions.
            entry: first layer of the draft rows.
            drafts: of an overlap, draft rows per request.

        Returns:
            In the shape of `requests`.
        """
        if kind == "clean":
            return self._surfaces["clean", 0](requests, rows, context)
        if kind in ("tree", "head"):
            known = self._surfaces.get((kind, 0))
            return known(requests, rows, context) if known else np.zeros(np.shape(requests))
        if kind == "draft":
            return self._draft(rows, requests, context, entry)
        plain = self._surfaces["clean", 0](requests, rows, context)
        return np.maximum(self._overlap(rows, requests, context, entry, drafts) * self._friction(entry), plain)

    def how(self, kind: str, rows: float, requests: float, context: float, entry: int = 0, drafts: float = 0) -> str:
        """Whether that time is "measured", "between" measured points, "beyond" them or "derived" from other kinds."""
        if kind == "overlap":
            known = {(p.rows, p.requests, p.context, p.entry, p.drafts) for p in self.points if p.kind == "overlap"}
            return "measured" if (rows, requests, context, entry, drafts) in known else "derived"
        surface = self._surfaces.get((kind, entry))
        return "derived" if surface is None else surface.how(requests, rows, context)

    def _draft(self, rows: float, requests: np.ndarray | float, context: float, entry: int) -> np.ndarray:
        left = self.n_layers - entry
        entries = sorted(e for k, e in self._surfaces if k == "draft")
        if entry in entries:
            return self._surfaces["draft", entry](requests, rows, context)
        if not entries:
            return self._surfaces["clean", 0](requests, rows, context) * left / self.n_layers
        low = max((e for e in entries if e < entry), default=None)
        high = min((e for e in entries if e > entry), default=None)
        if low is None or high is None:
            near = entries[0] if low is None else entries[-1]
            return self._surfaces["draft", near](requests, rows, context) * left / (self.n_layers - near)
        share = (entry - low) / (high - low)
        ends = [self._surfaces["draft", e](requests, rows, context) for e in (low, high)]
        return ends[0] * (1 - share) + ends[1] * share

    def _overlap(
        self, rows: float, requests: np.ndarray | float, context: float, entry: int, drafts: float
    ) -> np.ndarray:
        clean, below = self._surfaces["clean", 0], entry / self.n_layers
        alone, together = clean(requests, rows, context), clean(requests, rows + drafts, context)
        return alone * below + together * (1 - below)

    def _friction(self, entry: int) -> float:
        """What measured overlaps took, over what their rows alone would."""
        return self._frictions.get(entry, self._frictions.get(-1, 1.0))

    @cached_property
    def _frictions(self) -> dict[int, float]:
        found: dict[int, list[float]] = {}
        for p in self.points:
            if p.kind == "overlap":
                ratio = p.ms / float(self._overlap(p.rows, p.requests, p.context, p.entry, p.drafts))
                found.setdefault(p.entry, []).append(ratio)
                found.setdefault(-1, []).append(ratio)
        return {e: statistics.median(r) for e, r in found.items()}

    def covers(self, requests: int) -> bool:
        """Whether so many requests lie within what was measured, or a measurement ran out of time before them."""
        return requests <= max(self.reach, self.asked)

    @property
    def reach(self) -> int:
        """The most requests at a time that plain decoding was measured with; what lies beyond is extrapolated."""
        return max((p.requests for p in self.points if p.kind == "clean"), default=0)

    def merged(self, points: tuple[Latency, ...]) -> LatencyTable:
        """With further points; they replace older ones of the same shape."""
        by_shape = {(p.kind, p.requests, p.rows, p.entry, p.context, p.drafts): p for p in self.points + points}
        return LatencyTable(tuple(by_shape.values()), self.n_layers, self.setting, self.asked)

    def save(self, file: str | Path) -> None:
        """Write it as JSON, whole or not at all."""
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        head = {"format": FORMAT, "n_layers": self.n_layers, "setting": self.setting, "asked": self.asked}
        part.write_text(json.dumps(head | {"points": [asdict(p) for p in self.points]}, indent=1) + "\n")
        part.replace(file)

    @classmethod
    def load(cls, file: str | Path) -> LatencyTable:
        """The inverse of `save`.

        Raises:
            ValueError: it is no latency table of this release.
            FileNotFoundError: there is no such file.
        """
        try:
            data = json.loads(Path(file).read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            points = tuple(Latency(**p) for p in data["points"])
            if not any(p.kind == "clean" for p in points):
                raise ValueError("no clean point")
            return cls(points, data["n_layers"], data["setting"], data["asked"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no latency table of this release ({error}); measure it again") from error


def setting(backbone: Backbone, graph: bool) -> dict[str, Any]:
    """What a table depends on: machine, libraries, shapes, dtype, kernels. Weights' values do not matter."""
    path = getattr(backbone.path, "config", None)
    config, path_config = backbone.config.to_dict(), {} if path is None else path.to_dict()
    for name in ("_name_or_path", "transformers_version", "fingerprint", "mask_id", "acceptance", "acceptance_of"):
        config.pop(name, None)
        path_config.pop(name, None)
    return {
        **versions(),
        "device": device_name(backbone.device),
        "threads": None if backbone.device.type == "cuda" else torch.get_num_threads(),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "model": config.get("model_type"),
        "shape": _digest({"config": config, "keys": backbone.kv_shapes, "path": path_config}),
        "graph": graph,
        **{k: getattr(backbone, k, None) for k in ("backend", "fused", "exact")},
    }


def stored_at(key: dict[str, Any]) -> Path:
    """The file that keeps the table of a setting."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{key['device']} {key['model']} {key['dtype']}".lower()).strip("-")
    return hub.cache_root() / "latency" / f"{name}-{_digest(key)}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
