"""The planner of a backbone: its latency table, and a menu of what its mask path and a verifier can do."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.backbone import Backbone
from selfspec.choose import Chooser
from selfspec.plan import Plan, menu
from selfspec.plan.cost import Costs
from selfspec.plan.estimate import Estimator, families
from selfspec.plan.planner import Planner
from selfspec.plan.table import LatencyTable
from selfspec.plan.tabulate import table_for

MODES = ("lookup", "sequential", "loop", "tree", "overlap")  # combined ones have not won anywhere yet
UNKNOWN = 0.7  # acceptance to begin with, where an adapter does not say
MOST_NODES = 64  # of a tree; wider ones cost more than they bring at every measured size


def planner_for(
    bodies: Sequence[Backbone], verify: str = "coupled", table: LatencyTable | None = None, seconds: float = 10.0
) -> Planner:
    """A planner over what can be done.

    Args:
        bodies: a backbone for each adapter, all of one model.
        verify: how drawn tokens are verified.
        table: the latency table; by default the stored one, or one measured now.
        seconds: time budget of that measurement.
    """
    paths = [c for b in bodies if (c := getattr(b.path, "config", None)) is not None]
    plans = [p for p in menu(paths, MODES) if p.tree_nodes <= MOST_NODES and _takes(verify, p)]
    if table is None:
        table = table_of(bodies, seconds)
    costs = Costs(table, tuple(p.entry for p in paths) or (0,))
    priors = [p.acceptance or UNKNOWN for p in paths] or [UNKNOWN]
    kinds = [f for p in plans for f in families(p)]
    return Planner(costs, plans, Estimator(kinds, priors))


def table_of(bodies: Sequence[Backbone], seconds: float = 10.0) -> LatencyTable:
    """One latency table for a model and all its mask paths: what is stored, or measured now within `seconds`."""
    table, *others = (table_for(body, seconds=seconds / len(bodies)) for body in bodies)
    for other in others:
        table = table.merged(other.points)
    return table


def _takes(verify: str, plan: Plan) -> bool:
    try:
        Chooser(verify).require(plan)
    except ValueError:
        return False
    return True
