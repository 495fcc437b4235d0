"""`selfspec profile --tell`: what verification accepts of every kind of draft that an adapter makes.

A planner starts from it. Kinds are compared by what they promise, so all are measured on the same prompts: an adapter
that told the acceptance of its chains alone would have its trees guessed at, and a guess that is 5 % too high is chosen
until it has been found out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from selfspec import prompts
from selfspec.adapters import io
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan, menu
from selfspec.plan.family import DEPTH, families, name_of
from selfspec.stats import Stats
from selfspec.terminal import refusing, say, show_table

MODES = ("sequential", "tree")
MOST_NODES = 63  # of trees that planners choose
LEAST = 20  # rounds that have to have come to a position before its share is told


def kinds(config) -> dict[str, Plan]:
    """A plan for every kind of draft, the whole chain first."""
    found: dict[str, Plan] = {}
    for plan in menu([config], MODES):
        if plan.drafts and plan.verify_length is None and plan.tree_nodes <= MOST_NODES:
            found.setdefault(name_of(families(plan)[0]), plan)
    whole = max((p for p in found.values() if not p.tree), key=lambda p: p.block_size)
    rest = {n: p for n, p in found.items() if p != whole}
    return {"chain": whole, **rest}


def accepted(
    model: SelfSpecModel, asked: Sequence[Sequence[int]], max_new_tokens: int = 128, slots: int | None = None
) -> dict[str, tuple[float, ...]]:
    """Conditional acceptance by kind of draft, of greedy answers.

    Args:
        model: with one adapter.
        asked: token ids of prompts.
        max_new_tokens: of an answer.
        slots: prompts at a time.
    """
    assert model.path is not None
    out = {}
    for name, plan in kinds(model.path.config).items():
        how: dict[str, Any] = {"tree_nodes": plan.tree_nodes} if plan.tree else {"block_size": plan.block_size}
        how |= {"mode": plan.mode, "max_new_tokens": max_new_tokens, "do_sample": False, "slots": slots}
        model.generate([list(p) for p in asked], **how)
        out[name] = shares(model.stats, (DEPTH if plan.tree else plan.nodes) - 1)
    return out


def shares(stats: Stats, drafts: int) -> tuple[float, ...]:
    """Per position the share of rounds that took its draft among those that had taken all before; at least one."""
    found = []
    for j, share in enumerate(stats.acceptance[:drafts]):
        if j and sum(n for emitted, n in stats.accepted.items() if emitted > j) < LEAST:
            break
        found.append(round(share, 4))
    return tuple(found) or (0.0,)


def run(
    name: str,
    adapter: str,
    files: Sequence[Path],
    limit: int,
    dtype: str,
    device: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Measure, and write it into the adapter's folder."""
    if threads:
        torch.set_num_threads(threads)
    with refusing():
        model = SelfSpecModel.from_pretrained(name, adapter, dtype=getattr(torch, dtype), device=device)
        if model.path is None:
            raise ValueError(f"{name} has no adapter whose drafts could be measured; pass --adapter")
        found = io.shipped_for(model.model) if adapter == "auto" else io.find(adapter)
        assert found is not None
        folder = Path(found)
        rows = [p for rows in prompts.read_sets([str(f) for f in files], limit).values() for p in rows]
        told = accepted(model, [prompts.encode(model.tokenizer, p.messages) for p in rows])
        config = io.read_config(folder)
        rest = {k: v for k, v in told.items() if k != "chain"}
        io.write_config(folder, replace(config, acceptance=told["chain"], acceptance_of=rest))
    if as_json:
        print(json.dumps(told))
    else:
        show_table(["draft", *map(str, range(1, 8))], [[k, *(f"{c:.2f}" for c in v[:7])] for k, v in told.items()])
        say(f"kept in {folder / io.CONFIG}")
    return 0
