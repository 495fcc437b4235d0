"""What a planner has in use for about so many requests, and when it looks at it again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

AWAY = 64  # rounds with other numbers of requests, after which a choice is looked at as if it were new


@dataclass
class Use:
    """Plans in use for numbers of requests up to a power of two.

    A load that goes up and down by one request crosses that bound all the time, and must not be thought about afresh.

    Attributes:
        plans: their indices.
        since: rounds since they were chosen.
        lead: what was foregone since then, in rounds.
        rate: expected tokens per millisecond.
        parts: of the last comparison: plans and who runs them.
        keys: whom it was made for.
        wait: rounds until the next comparison.
        pause: rounds between two.
        left: number of the last round.
        told: a comparison was due, and was put off until the estimator had heard of the rounds before.
    """

    plans: tuple[int, ...] = ()
    since: float = 0.0
    lead: float = 0.0
    rate: float = 0.0
    parts: list[tuple[int, list[int]]] = field(default_factory=list)
    keys: Sequence[Hashable] = ()
    wait: int = 0
    pause: int = 4
    left: int = 0
    told: bool = False

    def back(self, number: int) -> None:
        """This is the number of its next round."""
        gone = number - self.left - 1
        self.wait = max(min(self.wait, self.pause - gone), 1)  # 1: it is looked at now; nothing was foregone elsewhere
        if gone > AWAY:
            self.since = self.lead = 0.0
