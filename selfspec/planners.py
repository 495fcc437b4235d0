"""The planner of a backbone: its latency table, a menu of what its mask path and a verifier can do, length rules."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from selfspec.backbone import Backbone
from selfspec.choose import Chooser
from selfspec.growth import Growth
from selfspec.growth import weighs as compares
from selfspec.plan import RULES, Plan, menu
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import Estimator, families
from selfspec.plan.planner import Planner
from selfspec.plan.policy import Fixed
from selfspec.plan.table import LatencyTable
from selfspec.plan.tabulate import graphs_run, table_for
from selfspec.pruning import Pruning, weighs

log = logging.getLogger(__name__)
MODES = ("lookup", "sequential", "loop", "tree", "overlap")  # combined ones have not won anywhere yet
UNKNOWN = 0.7  # acceptance to begin with, where an adapter does not say
MOST_REQUESTS = 256  # at a time, that a table measured at load covers where rounds replay graphs
GRAPHED, EAGER = 10.0, 5.0  # seconds of that measurement, with and without graphs
MOST_NODES = 64  # of a tree; wider ones cost more than they bring at every measured size


def default_mode(
    drafts: bool,
    verify: str = "coupled",
    block_size: int | None = None,
    tree_nodes: int | None = None,
    lengths: str | None = None,
) -> str:
    """The mode where nobody names one: "auto" where an adapter drafts, but for what would be ignored by it or undone.

    Args:
        drafts: whether an adapter is loaded; without one drafts are looked up.
        verify: with all but "coupled" the text of a seed follows from how its rounds were cut, which a planner does by
            the clock: chains, so that the same seed gives the same text again.
        block_size: given, chains of that size.
        tree_nodes: given, a tree.
        lengths: given, chains that the rule prunes.
    """
    if tree_nodes is not None:
        return "tree"
    if not drafts:
        return "lookup"
    return "auto" if verify == "coupled" and block_size is None and lengths is None else "sequential"


def planner_for(
    bodies: Sequence[Backbone],
    verify: str = "coupled",
    table: LatencyTable | None = None,
    seconds: float | None = None,
    slots: int | None = None,
) -> Planner:
    """A planner over what can be done.

    Args:
        bodies: a backbone for each adapter, all of one model.
        verify: how drawn tokens are verified.
        table: the latency table; by default the stored one, or one measured now.
        seconds: time budget of that measurement, see `table_of`.
        slots: requests at a time that it must cover, see `table_of`.
    """
    paths = [c for b in bodies if (c := getattr(b.path, "config", None)) is not None]
    plans = [p for p in menu(paths, MODES) if p.tree_nodes <= MOST_NODES and _takes(verify, p)]
    for i in set(range(len(paths))) - {p.adapter for p in plans if p.drafts}:
        log.warning("adapter %d drafts in no mode (layouts %s): it stands idle", i, ", ".join(paths[i].layouts))
    if table is None:
        table = table_of(bodies, seconds, slots)
    costs = costs_of(bodies, table)
    priors = [{"chain": p.acceptance, **p.acceptance_of} if p.acceptance else UNKNOWN for p in paths] or [UNKNOWN]
    kinds = [f for p in plans for f in families(p)]
    return Planner(costs, plans, Estimator(kinds, priors))


def costs_of(bodies: Sequence[Backbone], table: LatencyTable) -> Costs:
    """Costs of rounds by that table."""
    paths = [c for b in bodies if (c := getattr(b.path, "config", None)) is not None]
    return Costs(table, tuple(p.entry for p in paths) or (0,))


def pruning_for(bodies: Sequence[Backbone], text: str, slots: int | None = None) -> Pruning:
    """A length rule for some adapters, with the latency table where it asks for one.

    Args:
        bodies: a backbone for each adapter, all of one model.
        text: the rule, as in `selfspec.plan.lengths.named`.
        slots: requests at a time that the table must cover, see `table_of`.

    Raises:
        ValueError: there is no such rule.
    """
    costs = costs_of(bodies, table_of(bodies, slots=slots)) if weighs(text) else None
    return Pruning(text, bodies, costs)


def growth_for(bodies: Sequence[Backbone], rule: str, slots: int | None = None) -> Growth:
    """A tree rule for some adapters, likewise.

    Args:
        bodies: a backbone for each adapter, all of one model.
        rule: of `selfspec.plan.RULES`.
        slots: requests at a time that the table must cover, see `table_of`.
    """
    costs = costs_of(bodies, table_of(bodies, slots=slots)) if compares(rule) else None
    return Growth(rule, bodies, costs)


def fixed_for(
    bodies: Sequence[Backbone],
    plan: Plan,
    lengths: str | None,
    known: dict[str, Pruning | Growth],
    slots: int | None = None,
) -> Fixed:
    """Always that plan, by the rules that go with it.

    Args:
        bodies: a backbone for each adapter, all of one model.
        plan: what rounds do, with the rule of its trees.
        lengths: a length rule for its chains.
        known: rules by name, with what they have learnt; those that are missing are added.
        slots: requests at a time that a latency table must cover, where a rule asks for one; see `table_of`.

    Raises:
        ValueError: there is no such length rule, or it cannot be used for this plan or adapter.
    """
    if lengths is not None:
        pruning = known.get(key := f"lengths={lengths}") or known.setdefault(key, pruning_for(bodies, lengths, slots))
        assert isinstance(pruning, Pruning)
        return pruning.policy(plan, bodies[plan.adapter].path)
    if plan.rule == RULES[0]:
        return Fixed(plan)
    growth = known.get(key := f"rule={plan.rule}") or known.setdefault(key, growth_for(bodies, plan.rule, slots))
    assert isinstance(growth, Growth)
    return Fixed(plan, growth=growth)


def table_of(bodies: Sequence[Backbone], seconds: float | None = None, slots: int | None = None) -> LatencyTable:
    """One latency table for a model and all its mask paths: what is stored, or measured now within `seconds`.

    Args:
        bodies: a backbone for each adapter, all of one model.
        seconds: time budget, by default 10 where graphs are captured and 5 elsewhere, as somebody waits for it; what an
            adapter leaves of its share goes to the next.
        slots: requests at a time that it must cover; by default many where graphs run, as no batch is known at load,
            and one elsewhere, where a forward takes long.
    """
    graphs = graphs_run(bodies[0])
    slots = slots or (MOST_REQUESTS if graphs else 1)
    seconds = seconds or (GRAPHED if graphs else EAGER)
    end, table = time.perf_counter() + seconds, None
    for i, body in enumerate(bodies):
        budget = (end - time.perf_counter()) / (len(bodies) - i)
        shared = () if table is None else tuple(p for p in table.points if p.kind in ("clean", "tree", "head"))
        found = table_for(body, slots, seconds=budget, shared=shared)
        table = found if table is None else table.merged(found.points)
    assert table is not None
    return table


def _takes(verify: str, plan: Plan) -> bool:
    try:
        Chooser(verify).require(plan)
    except ValueError:
        return False
    return True
