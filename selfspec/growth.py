"""Grow: a tree rule at work, from the draft to the nodes that are verified.

Some rules grow trees of their own: TAPS by what it has learnt of acceptance, OPT-Tree level by level. Both look at
marginals, so what a head would condition drafts by is left out. Others end a tree that was grown best-first, over
marginals or over what a head conditions, where a row costs more than it brings. As with chains (`selfspec.pruning`) one
size serves a whole batch, since rows of a verification stand in a rectangle: the rule sees one tree, whose nodes have
the batch's mean chances of being accepted; alone, a request is judged by its own. The host reads that size before it
starts the verification: rows are saved, not padded. Where shapes are fixed it is rounded up to a few sizes, each with a
graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfspec.backbone import Backbone
from selfspec.clock import Clock
from selfspec.draft import Builder, DraftTree
from selfspec.draft.trees import ENDS, TAPS, TREES, Bastion, DDTree
from selfspec.draft.trees.bastion import Roofline
from selfspec.memory import position_bytes
from selfspec.paced import Paced
from selfspec.plan import RULES, Plan
from selfspec.plan import TREES as SIZES
from selfspec.plan.cost import STEP, Costs
from selfspec.pruning import Cut, bucket
from selfspec.transfer import onto

BUCKETS = (1, 8, *(n + 1 for n in SIZES))  # rows of a tree that is cut, where shapes are fixed
MOST = 64  # tables of costs that are kept where no graph reads them
EVERY, APART = 32, 8  # rows: up to so many each size is asked for its cost, further on each so-manieth


class Growth:
    """One rule for the adapters that are loaded, and what it has learnt. Shared by sessions, which take turns.

    Args:
        rule: of `selfspec.plan.RULES`.
        bodies: a backbone for each adapter.
        costs: of rounds, for rules that weigh them.

    Raises:
        ValueError: there is no such rule, or it lacks the costs.
    """

    def __init__(self, rule: str, bodies: Sequence[Backbone], costs: Costs | None = None):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: expected {', '.join(RULES)}")
        if rule in ENDS and costs is None:
            raise ValueError(f"rule={rule!r} weighs what rounds cost, and no latency table was given")
        self.rule, self.costs, self.body = rule, costs, bodies[0]
        self.end: Any = ENDS[rule]() if rule in ENDS else None
        self.learnt: dict[int, TAPS] = {}  # by adapter
        for i, body in enumerate(bodies if TREES.get(rule) is TAPS else ()):
            if (path := getattr(body.path, "config", None)) is not None:
                self.learnt[i] = TAPS(max(path.block_size - 1, 1), body.device)
        self.paced: dict[Plan, Paced] = {}  # of a rule that listens
        self._times: dict[tuple, Tensor] = {}  # stay where they are: graphs read them

    def builder(self, plan: Plan) -> Builder | None:
        """What grows the trees of a plan from marginals alone; None where that is done best-first."""
        if self.end is not None or TREES[self.rule] is DDTree:
            return None
        return self.learnt[plan.adapter] if self.learnt else TREES[self.rule]()

    # ---- ends

    def cut(self, plan: Plan, tree: DraftTree, live: Tensor, times: Tensor) -> Cut:
        """How many nodes to verify beside the anchor. Static shapes, no host reads.

        Args:
            plan: of the round.
            tree: best-first.
            live: [N] bool, requests that have a draft and may emit something.
            times: of `times`.
        """
        assert tree.scores is not None
        return Cut(self.end(together(tree.scores, live), times)[0] - 1)

    def times(self, plan: Plan, n: int, context: int, drafted: bool, fixed: bool) -> Tensor:
        """Milliseconds of a round of n requests that verifies 1..M rows of each.

        Args:
            plan: of the round.
            n: requests.
            context: committed positions.
            drafted: the draft is there already; otherwise a pass for it counts.
            fixed: shapes are, see `selfspec.pruning.bucket`.

        Returns:
            [M] float32, the same tensor for the same round.
        """
        key = plan, n, -(-context // STEP) * STEP, drafted, fixed
        if key not in self._times:
            if not fixed and len(self._times) >= MOST:  # no graph reads them
                self._times.clear()
            self._times[key] = onto(self._foretold(*key).tolist(), self.body.device).float()
        return self._times[key]

    def _foretold(self, plan: Plan, n: int, context: int, drafted: bool, fixed: bool) -> np.ndarray:
        """[M] of the latency table alone, or as rounds have calibrated it: smooth then, whatever shapes are."""
        verify, rest = self._table(plan, n, context, drafted, fixed and not self.listens)
        if not self.listens:
            return verify + rest
        paced = self.paced.setdefault(plan, Paced(roofline_of(self.body)))
        paced.begin(n, context, drafted, verify, rest)
        return paced.times(n, context, drafted, len(verify))

    def _table(self, plan: Plan, n: int, context: int, drafted: bool, fixed: bool) -> tuple[np.ndarray, float]:
        """Of verifying 1..M rows, [M], and of all else. The whole tree is grown, however little of it is verified."""
        assert self.costs is not None
        m = plan.tree_nodes + 1
        rows = [bucket(r - 1, m, fixed, BUCKETS) for r in range(1, m + 1)]
        known = sorted({r for r in rows if fixed or r <= EVERY or r % APART == 0 or r == m})
        verify = np.interp(rows, known, [self._verification(plan, n, context, r) for r in known])
        draft = 0.0 if drafted else float(self.costs.parts(plan, n, context)[1][n])
        return verify, draft + self._time("tree", plan.tree_nodes, n, context)

    def _verification(self, plan: Plan, n: int, context: int, rows: int) -> float:
        """Of that forward alone: of its plan's without the growth. A plan's tree has two rows at least."""
        assert self.costs is not None
        cut = replace(plan, tree_nodes=max(rows - 1, 1))
        ms = float(self.costs.parts(cut, n, context)[0][n]) - self._time("tree", cut.tree_nodes, n, context)
        if rows == 1:
            ms -= self._time("clean", 2, n, context) - self._time("clean", 1, n, context)
        return ms

    def _time(self, kind: str, rows: int, n: int, context: int) -> float:
        assert self.costs is not None
        return float(self.costs.table.time(kind, rows, n, context))

    # ---- what rounds teach

    @property
    def listens(self) -> bool:
        """Whether it hears how long rounds take."""
        return isinstance(self.end, Bastion)

    def listen(self, clock: Clock, plan: Plan, n: int, rows: int, context: int, drafted: bool) -> None:
        """Hear what a round takes that verifies so many rows of each request, once its clock is read."""
        if self.listens:
            clock.hears = partial(self.timed, plan, n, rows, -(-context // STEP) * STEP, drafted)

    def timed(self, plan: Plan, n: int, rows: int, context: int, drafted: bool, laps: dict[str, float]) -> None:
        """Learn from the laps of a round, in seconds; `times` follow now and then, where they stand."""
        paced = self.paced[plan]
        verify = 1e3 * laps.get("verify", 0.0)
        if not paced.observe(n, rows, context, drafted, verify, 1e3 * sum(laps.values()) - verify):
            return
        for (of, size, far, saved, _), times in self._times.items():
            if of == plan:
                ms = paced.times(size, far, saved, len(times))
                times.copy_(onto(ms.tolist(), self.body.device))

    def observe(self, adapter: int, tree: DraftTree, path: Tensor, live: Tensor) -> None:
        """Learn from what came of a tree, on the device. See `TAPS.observe`."""
        if adapter in self.learnt and tree.marginals is not None:
            self.learnt[adapter].observe(tree, path, live)


def weighs(rule: str) -> bool:
    """Whether a rule asks what rounds cost."""
    return rule in ENDS


def together(scores: Tensor, live: Tensor) -> Tensor:
    """One tree that stands for a batch: its nodes' chances are the means of those at their places.

    Args:
        scores: [N, M] float32, as in `DraftTree`.
        live: [N] bool, whom to count.

    Returns:
        [1, M] float32
    """
    if len(scores) == 1:
        gone = (~live[:, None]).expand_as(scores).clone()
        gone[:, 0] = False
        return scores.masked_fill(gone, -torch.inf)
    mean = (scores.exp() * live[:, None]).sum(0) / live.sum().clamp(min=1)  # [M]
    mean[0] = 1.0  # also where nobody counts
    return mean.log()[None]


def roofline_of(body: Backbone) -> Roofline:
    """A model's. Its units of time are reading all weights, and one row: scales are fitted."""
    config, weights = body.config, [p for p in body.parameters() if p.is_floating_point()]
    moved, flops = float(sum(p.numel() * p.element_size() for p in weights)), 2.0 * sum(p.numel() for p in weights)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Roofline(moved, position_bytes(body), flops, moved, flops, body.n_layers * heads * size)
