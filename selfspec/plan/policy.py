"""What a session asks before every round, and tells after it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from selfspec.plan import Plan
from selfspec.plan.views import Assignment, View, Views

if TYPE_CHECKING:
    from selfspec.growth import Growth
    from selfspec.pruning import Pruning


class Policy(Protocol):
    """What chooses plans: `Fixed`, `Planner`.

    Attributes:
        plans: all that it may choose.
    """

    plans: list[Plan]

    def round(self, active: Sequence[View]) -> list[Assignment]:
        """A plan for every running request; requests of one assignment share their forwards."""

    def prune(self, assignment: Assignment, survival: np.ndarray) -> list[int]:
        """Drafts to verify per request, once the draft's confidences are known."""

    def observe(
        self,
        assignment: Assignment,
        emitted: Sequence[int],
        seconds: float | None = None,
        ended: Sequence[bool] | None = None,
        hits: Sequence[bool] | None = None,
        cold: bool = False,
    ) -> None:
        """What came of an assignment; a cold one was compiled or captured first."""

    def forget(self, key: Hashable) -> None:
        """A request is gone."""


class Fixed:
    """Always the same plan, its chains pruned by a length rule and its trees grown by a rule where there is one."""

    def __init__(self, plan: Plan, pruning: Pruning | None = None, growth: Growth | None = None):
        self.plans, self.pruning, self.growth = [plan], pruning, growth

    def round(self, active: Sequence[View]) -> list[Assignment]:
        """All requests together."""
        return [Assignment(Views.of(active), self.plans[0])] if active else []

    def prune(self, assignment: Assignment, survival: np.ndarray) -> list[int]:
        """Everything is verified."""
        return assignment.offered

    def observe(self, assignment, emitted, seconds=None, ended=None, hits=None, cold=False) -> None:
        """Nothing is learnt."""

    def forget(self, key: Hashable) -> None:
        """Nothing was kept."""


def together(assignments: Sequence[Assignment]) -> Assignment:
    """The only one.

    Raises:
        ValueError: there are several, or none.
    """
    if len(assignments) != 1:
        raise ValueError(
            f"the policy wants {len(assignments)} rounds side by side; a session runs one at a time: make the planner "
            "with split=False"
        )
    return assignments[0]
