"""Who has a draft that an overlapped round has saved, as far as the host knows without waiting for the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from selfspec.plan import Plan
from selfspec.request import Request


class Saved:
    """What a session knows of its saved drafts; the drafts themselves, and who has one, stand in `Slots`.

    A draft belongs to its request and to the plan that left it: other plans drop it, and who joins has none.

    Attributes:
        plan: the overlapped plan of the last round that was started; None where nothing was saved.
        whose: ids of the requests that the last round that was read left a draft.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.whose: set[int] = set()

    def joined(self, requests: Iterable[Request]) -> None:
        """These begin; another request may have had one's id before."""
        self.whose.difference_update(map(id, requests))

    def lacking(self, running: Iterable[Request], new: Collection[Request], ahead: bool) -> bool:
        """Whether a round that goes on with saved drafts has to draft for somebody.

        Those that have just joined surely have none. Whom the last round left none is known once it has been read. As
        graphs replay, the next round starts before that: a miss is a round of the anchor alone then, which costs less
        than the device would wait, and leaves a draft.

        Args:
            running: requests of the round.
            new: those that have not been in one.
            ahead: rounds are started before the last one is read.
        """
        return bool(new) or (not ahead and any(id(r) not in self.whose for r in running))
