"""`selfspec profile`: what forwards cost on this machine, measured and kept for the planner."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
import transformers

from selfspec import shapes
from selfspec.adapters import MaskPathConfig, MaskPathModel, io
from selfspec.attention import best
from selfspec.backbone import Backbone
from selfspec.hub import load_model
from selfspec.plan.latency import Latency
from selfspec.plan.table import LatencyTable, stored_at
from selfspec.plan.tabulate import Sizes, stored, tabulate
from selfspec.terminal import refusing, say, show_table


def bodies(
    model: str,
    shape: str | None,
    adapter: str,
    entries: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    block_size: int = 16,
    backend: str | None = None,
) -> list[Backbone]:
    """The model, once for every mask path whose drafts are to be timed.

    Args:
        model: as for `selfspec.hub.load_model`.
        shape: a random model instead, see `selfspec.shapes`.
        adapter: a folder, a shipped name, "auto" or "none".
        entries: time untrained mask paths that enter at these layers, instead of an adapter.
        dtype: of the weights.
        device: where they go.
        block_size: of untrained mask paths.
        backend: attention backend; by default the decoder's.
    """
    hf = load_model(model, dtype, device) if shape is None else shapes.random_model(shape, dtype, device)
    if entries or shape is not None:
        made = [MaskPathModel(hf, MaskPathConfig(block_size, e, layouts=("known", "hidden"))) for e in entries or (0,)]
        paths: list[MaskPathModel | None] = [p.requires_grad_(False).eval() for p in made]
    else:
        found = io.shipped_for(hf) if adapter == "auto" else None if adapter == "none" else adapter
        paths = [None if found is None else io.load(found, hf)]
    out = [Backbone(hf, p, backend or best(hf.device, hf.dtype)) for p in paths]
    for body in out:
        if backend is None:
            body.hasten()
    return out


def run(
    model: str,
    shape: str | None,
    adapter: str,
    entries: tuple[int, ...],
    dtype: str,
    device: str,
    threads: int | None,
    sizes: dict[str, tuple[int, ...]],
    seconds: float | None,
    fresh: bool,
    as_json: bool,
) -> int:
    """`selfspec profile`. `sizes` are fields of `selfspec.plan.tabulate.Sizes`; what is missing is the usual."""
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    with refusing():
        found = bodies(model, shape, adapter, entries, getattr(torch, dtype), device)
    tables = [measured(body, Sizes(**sizes), seconds and seconds / len(found), fresh) for body in found]
    if as_json:
        print(json.dumps([data(t) for t in tables], indent=1))
    else:
        for table in tables:
            show(table)
    return 0


def measured(body: Backbone, sizes: Sizes, seconds: float | None, fresh: bool) -> LatencyTable:
    """One backbone's table, completed and stored."""

    def note(p: Latency) -> None:
        say(f"{p.kind} {p.requests} x {p.rows}{f' + {p.drafts}' if p.drafts else ''} at {p.context}: {p.ms:.3f} ms")

    table = tabulate(body, sizes, seconds, known=None if fresh else stored(body), note=note)
    table.save(stored_at(table.setting))
    return table


def data(table: LatencyTable) -> dict[str, Any]:
    """A table in plain JSON types."""
    points = [asdict(p) for p in table.points]
    return {
        "setting": table.setting,
        "n_layers": table.n_layers,
        "file": str(stored_at(table.setting)),
        "points": points,
    }


def show(table: LatencyTable) -> None:
    """Print the measured points, one line a shape, contexts side by side."""
    s = table.setting
    launch = "CUDA graphs" if s["graph"] else "eager"
    print(f"{s['model']}, {table.n_layers} layers, {s['dtype']} on {s['device']}, {launch}, attention {s['backend']}")
    contexts = sorted({p.context for p in table.points})
    lines: dict[tuple, dict[int, float]] = {}
    for p in table.points:
        lines.setdefault((p.kind, p.entry, p.requests, p.rows, p.drafts), {})[p.context] = p.ms
    rows = []
    for (kind, entry, n, r, drafts), ms in sorted(lines.items()):
        told = [f"{ms[c]:.3f}" if c in ms else "" for c in contexts]
        rows.append(
            [kind, "" if kind == "clean" else str(entry), str(n), f"{r}{f' + {drafts}' if drafts else ''}", *told]
        )
    show_table(["kind", "entry", "requests", "rows", *(f"ms at {c}" for c in contexts)], rows)
    print(f"kept in {stored_at(s)}")
