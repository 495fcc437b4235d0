"""What speculation did: rounds, accepted lengths, forwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Stats:
    """Counts of one request, or summed over requests.

    Attributes:
        accepted: how many rounds emitted k tokens, bonus included, the prefill's token excluded, cut at EOS and cap.
        drafts: draft forwards, in units of a full-depth forward (a draft from layer e of L costs (L - e) / L).
        hung: overlapped rounds, whose verification drafted.
        saved: those of them that drafted for the outcome that came, so that the next needs no draft pass.
        reused: those of them that themselves began with a draft that was saved.
        prompt_tokens: tokens prefilled.
        seconds: time spent in "prefill", "draft", "verify" and "rest", or in a "round" that one graph holds; requests
            that share a forward share its time.

    What is the same for all requests of a round, its time and drafts and the one token of plain rounds, is booked as
    the request leaves its slot.
    """

    accepted: Counter[int] = field(default_factory=Counter)
    drafts: float = 0.0
    hung: int = 0
    saved: int = 0
    reused: int = 0
    prompt_tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def rounds(self) -> int:
        """Verify forwards."""
        return sum(self.accepted.values())

    @property
    def tokens(self) -> int:
        """Tokens emitted by verification."""
        return sum(k * n for k, n in self.accepted.items())

    @property
    def tau(self) -> float:
        """Tokens emitted per round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tpf(self) -> float:
        """Tokens per backbone forward, prefill apart."""
        forwards = self.rounds + self.drafts
        return self.tokens / forwards if forwards else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Per position j = 0, 1, ...: the share of rounds that took draft j among those that took all before it."""
        reached = [sum(n for k, n in self.accepted.items() if k > j) for j in range(max(self.accepted, default=1))]
        return [after / before for before, after in pairwise(reached)]

    @property
    def overlap(self) -> dict[str, float]:
        """Rates of overlapped rounds; empty where none ran.

        "hit" is the share of them that left a draft, "reuse" the share that began with one, and "saved" the share of
        all rounds, of whatever mode, that did.
        """
        if not self.hung:
            return {}
        return {
            "hit": self.saved / self.hung,
            "reuse": self.reused / self.hung,
            "saved": self.reused / max(self.rounds, 1),  # plain rounds are booked as a request leaves
        }

    def count(self, emitted: int) -> None:
        """Book one round that emitted so many tokens."""
        self.accepted[emitted] += 1

    def hang(self, left: bool, began: bool) -> None:
        """Book of an overlapped round whether it left a draft, and whether it began with one."""
        self.hung += 1
        self.saved += left
        self.reused += began

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            _sum(self.accepted, other.accepted),
            self.drafts + other.drafts,
            self.hung + other.hung,
            self.saved + other.saved,
            self.reused + other.reused,
            self.prompt_tokens + other.prompt_tokens,
            _sum(self.seconds, other.seconds),
        )


class Shares:
    """What all requests of a round have an equal share in: its time, its drafting, the one token of a plain round.

    It is added up once a round, and a request is given what came together since its first round when it leaves: that
    costs the same for one request and for hundreds.
    """

    def __init__(self) -> None:
        self._plain, self._drafts, self._seconds = 0, 0.0, Counter[str]()
        self._since: dict[int, tuple[int, float, Counter[str]]] = {}  # what there was as each came, by its id

    def enter(self, stats: Stats) -> None:
        """A request shares in what is added from now on."""
        self._since[id(stats)] = self._plain, self._drafts, self._seconds.copy()

    def add(self, plain: bool, drafts: float, seconds: dict[str, float], requests: int) -> None:
        """Book a round: whether all emit one token, forwards that drafted, and its time, of so many requests."""
        self._plain += plain
        self._drafts += drafts
        for name, spent in seconds.items():
            self._seconds[name] += spent / requests  # type: ignore[assignment]

    def leave(self, stats: Stats) -> None:
        """Give a request what it has shared in; nothing to one that never entered."""
        before = self._since.pop(id(stats), None)
        if before is None:
            return
        plain, drafts, seconds = before
        if self._plain > plain:
            stats.accepted[1] += self._plain - plain
        stats.drafts += self._drafts - drafts
        for name, spent in self._seconds.items():
            if spent > seconds[name]:
                stats.seconds[name] += spent - seconds[name]


def total(stats: list[Stats]) -> Stats:
    """Sum over requests."""
    return sum(stats, Stats())


def mean_tau(stats: list[Stats]) -> float:
    """Mean over responses of each one's tau, leaving out those that never reached a round."""
    taus = [s.tau for s in stats if s.rounds]
    return sum(taus) / len(taus) if taus else 0.0


def rates(overlap: dict[str, float]) -> str:
    """`Stats.overlap` as it follows tau in a line for a person; nothing where no round overlapped."""
    return "".join(f", {name} {rate:.2f}" for name, rate in overlap.items())


def _sum(a: Counter, b: Counter) -> Counter:
    """The counts of both; Counter's own sum takes several times as long."""
    out = Counter(a)
    for key, n in b.items():
        out[key] += n
    return out
