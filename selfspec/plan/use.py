"""What a planner has in use for about so many requests, and when it looks at it again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

FADING = 1 / 512  # share of what was lost between texts that a round forgets
SOON = 3  # rounds, the first of which may tell of the drafts before, until a comparison
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
        ran: rounds of single slots; fading, as the next three.
        made: tokens.
        lost: rounds of slots whose text had ended.
        idle: rounds in which slots were free though somebody waited.
    """

    plans: tuple[int, ...] = ()
    since: float = 0.0
    lead: float = 0.0
    rate: float = 0.0
    parts: list[tuple[int, list[int]]] = field(default_factory=list)
    keys: Sequence[Hashable] = ()
    wait: int = 0
    pause: int = 6
    left: int = 0
    ran: float = 0.0
    made: float = 0.0
    lost: float = 0.0
    idle: float = 0.0

    def spent(self, emitted: Sequence[int], ended: int) -> None:
        """Book a round whose idle slots are booked already.

        Args:
            emitted: tokens of each request; 0 of one that had left.
            ended: requests that ended; their last round breaks off anywhere, and half of it is lost in the mean.
        """
        none = list(emitted).count(0)
        self.ran += len(emitted) - none - self.ran * FADING
        self.made += sum(emitted) - self.made * FADING
        self.lost += none + 0.5 * ended - self.lost * FADING
        self.idle -= self.idle * FADING

    @property
    def between(self) -> tuple[float, float]:
        """What a change of texts costs: `lost` and `held` of `Values`."""
        made = max(self.made, 1.0)
        return self.lost / made, self.idle / (made * max(self.ran, 1.0)) ** 0.5

    def back(self, number: int) -> None:
        """This is the number of its next round."""
        gone = number - self.left - 1
        self.wait = min(self.wait, max(self.pause - gone, SOON))  # drafts are told first
        if gone > AWAY:
            self.since = self.lead = 0.0

    def soon(self, now: bool) -> None:
        """Somebody else is there: what is in use is compared soon, or now."""
        cut = self.wait - (0 if now else SOON - 1)
        if cut > 0:
            self.wait, self.pause = self.wait - cut, self.pause - cut

    def turn(self, overdue: bool) -> str:
        """What a round is for, beside its tokens: a GPU should never wait for the host, which thinks of one thing.

        After each such round comes one for nothing, as rounds are launched two ahead.

        Args:
            overdue: of copies that were heard nothing was told for long.
        """
        if self.wait <= 0:
            return "compare"
        if self.wait % 2:
            return ""
        if self.wait == 2:
            return "drafts"
        return "copies" if overdue else "probe" if self.wait == 4 else ""
