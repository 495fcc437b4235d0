"""Drafts that are accepted alike, and what an adapter tells of each kind before any has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import log2
from typing import NamedTuple

import numpy as np

from selfspec.plan import BLOCKS, Plan

DEPTH = 15  # drafts of the largest block; a tree is no deeper
LEAST, MOST = 1e-3, 0.999
# acceptance of tokens looked up in the text, before any were: rounded, of chat answers of a small instruct model. Most
# texts have not said before what comes next; where one has, it mostly goes on as it did
COPIED = (0.16, 0.73, 0.79, 0.84, 0.84, 0.87, 0.87, 0.89, 0.9)
ODDS = {"hidden": 1.6, "branch": 1.2, "loop": 0.9}  # of failing, over those of a chain with a known bonus
CATCH = 0.04  # of a chain's failures, for each doubling of a tree's nodes: what further candidates catch


class Family(NamedTuple):
    """Drafts that are accepted alike.

    Some adapters lose little by blocks smaller than the one that they were trained for, others a sixth of their tokens.

    Attributes:
        source: "known" (the bonus in slot 0), "hidden" (a mask there), "branch" (either, of branches), "loop" or
            "lookup"; "ar" in traces only.
        adapter: index.
        nodes: of a tree, 0 for a chain; "accepted at position j" then means by any branch.
        block: of a chain that is drafted in one pass in a smaller block than the largest; 0 stands for whole ones.
    """

    source: str
    adapter: int = 0
    nodes: int = 0
    block: int = 0


@cache
def families(plan: Plan) -> tuple[Family, Family]:
    """The families of a plan's rounds: with a draft made for the round, and with one saved by an overlapped round."""
    if plan.lookup:
        return Family("lookup"), Family("lookup")
    nodes = plan.tree_nodes if plan.tree else 0
    chain = plan.drafts and not (plan.tree or plan.loop)
    cut = plan.block_size if chain and plan.block_size < BLOCKS[-1] else 0
    made = Family("loop" if plan.loop else "known", plan.adapter, nodes, cut)
    return made, Family("branch" if plan.branches else "hidden", plan.adapter, nodes) if plan.overlap else made


def name_of(family: Family) -> str:
    """What an adapter calls a family that it tells the acceptance of: "chain", "block=4", "tree=31", "hidden", ..."""
    words = [] if family.source == "known" else [family.source]
    words += [f"tree={family.nodes}"] if family.nodes else [f"block={family.block}"] if family.block else []
    return "+".join(words) or "chain"


def told(family: Family, known: Mapping[str, Sequence[float]]) -> tuple[np.ndarray, bool]:
    """The conditional acceptance of a family by what its adapter tells, and whether it tells it of this very family.

    Args:
        family: with drafts of an adapter.
        known: name -> conditional acceptance of drafts 1, 2, ..., see `name_of`; "chain" among them.

    Returns:
        [DEPTH]
    """
    if family.source == "lookup":
        return curve_of(COPIED), False
    if (name := name_of(family)) in known:
        return curve_of(known[name]), True
    if family.nodes:
        trees = sorted(int(n.removeprefix("tree=")) for n in known if n.startswith("tree=")) or [1]
        near = min(trees, key=lambda nodes: abs(log2(nodes / family.nodes)))
        base = told(family._replace(nodes=near if near > 1 else 0), known)[0]
        share = CATCH * log2(family.nodes / near)
        return np.clip(base + (1 - base) * share if share > 0 else 1 - (1 - base) / (1 + share), LEAST, MOST), False
    if family == Family("known", family.adapter):
        names = ", ".join(known)
        raise ValueError(f"an adapter has to tell the acceptance of its chains; this one tells that of {names}")
    chain = told(family._replace(source="known", block=0), known)[0]
    return harder(chain, ODDS.get(family.source, 1.0)), False


def harder(curve: np.ndarray, odds: np.ndarray | float) -> np.ndarray:
    """A curve whose odds of failing are multiplied."""
    return curve / (curve + (1 - curve) * odds)


def curve_of(value: float | Sequence[float]) -> np.ndarray:
    """[DEPTH], the last value going on."""
    given = np.atleast_1d(np.asarray(value, float))[:DEPTH]
    return np.clip(np.concatenate([given, np.full(DEPTH - len(given), given[-1])]), LEAST, MOST)
