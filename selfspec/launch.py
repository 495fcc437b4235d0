"""A round by as few graphs as can hold it: one, or two where a rule cuts drafts between draft and verification."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from torch import Tensor

from selfspec.clock import Clock
from selfspec.decode import Frame
from selfspec.graphs import Graphs
from selfspec.plan import RULES, Plan
from selfspec.proposal import Proposal
from selfspec.pruning import Cut
from selfspec.request import Request
from selfspec.rounds import Rounds, plainly


def launch(
    rounds: Rounds,
    graphs: Graphs,
    key: Hashable | None,
    plan: Plan,
    frame: Frame,
    size: int,
    redraft: bool,
    requests: list[Request],
    clock: Clock,
) -> tuple[Tensor, bool]:
    """Start a round.

    Args:
        rounds: how it is put together.
        graphs: hold it.
        key: what a captured choice of tokens is valid for; None where the host has to look.
        plan: what it does; see `Rounds.play`, as for the next four.
        frame: likewise.
        size: likewise.
        redraft: likewise.
        requests: likewise.
        clock: marks the parts.

    Returns:
        [n, 2 + depth] long, `decode.settle`'s, and whether nothing was compiled or captured for it.
    """
    pruned, what = rounds.pruned(plan, size), (plan, frame, size, redraft, requests)
    # drafts that were drawn come with their law, which would be kept beside every graph
    if key is None or not graphs.enabled or (pruned and rounds.chooser.draws):
        result = rounds.play(*what, graphs, clock)
        clock.lap("rest")
        return result, not graphs.enabled
    full = _name(rounds, key, plan, frame, redraft)
    if not pruned:
        warm = full in graphs
        result = graphs(full, partial(rounds.play, *what, plainly, None))
        clock.lap("round" if warm else "rest")
        return result, warm

    def first() -> tuple[Tensor | None, ...]:
        proposal = rounds.candidates(*what, plainly)
        assert proposal.cut is not None
        return *proposal.parts, *proposal.cut

    def second(*given: Tensor) -> Tensor:
        left = iter(given)
        parts = [next(left) if t is not None else None for t in some]
        return rounds.verify(plan, frame, size, Proposal.of(parts), requests, plainly)

    begun = ("proposal", *full[1:])
    warm = begun in graphs
    *parts, drafts, margins = graphs(begun, first)
    clock.lap("draft")
    proposal, _ = rounds.shortened(Proposal.of(parts)._replace(cut=Cut(drafts, margins)))
    some = proposal.parts  # which ones there are, size and plan say
    given = [t.clone() for t in some if t is not None]  # out of the graph's memory
    seen = None if margins is None else margins.clone()
    ended = (*full, given[0].shape[1])
    warm &= ended in graphs
    result = graphs(ended, second, *given)
    if plan.chain:
        rounds.learn(plan, given[0], seen, result)
    elif warm:
        rounds.listen(clock, plan, frame, given[0].shape[1], redraft)
    clock.lap("verify" if warm else "rest")
    return result, warm


def captured(rounds: Rounds, graphs: Graphs, key: Hashable | None, plan: Plan, frame: Frame) -> bool:
    """Whether a round, not cut by a rule, would only replay a graph. See `launch`."""
    redrafts = (True, False) if plan.overlap else (True,)
    return key is not None and all(_name(rounds, key, plan, frame, r) in graphs for r in redrafts)


def _name(rounds: Rounds, key: Hashable, plan: Plan, frame: Frame, redraft: bool) -> tuple[Hashable, ...]:
    """Of the graph of a round."""
    rule = rounds.pruning if plan.rule == RULES[0] else rounds.growth
    return "round", frame, plan, redraft, rounds.chooser.verify, key, rule
