"""What speculation did: rounds, accepted lengths, forwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Stats:
    """Counts of one request, or summed over requests.

    Attributes:
        rounds: verify forwards.
        tokens: tokens emitted by verification, bonus included, the prefill's token excluded, trimmed at EOS and cap.
        drafts: draft forwards, in units of a full-depth forward (a draft from layer e of L costs (L - e) / L).
        accepted: how many rounds emitted k tokens.
        saved: rounds whose verification drafted for the outcome that came, so that the next needs no draft pass.
        prompt_tokens: tokens prefilled.
        seconds: time spent in "prefill", "draft", "verify" and "rest", or in a "round" that one graph holds; requests
            that share a forward share its time.
    """

    rounds: int = 0
    tokens: int = 0
    drafts: float = 0.0
    accepted: Counter[int] = field(default_factory=Counter)
    saved: int = 0
    prompt_tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter, compare=False)

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

    def count(self, emitted: int) -> None:
        """Book one round that emitted so many tokens."""
        self.rounds += 1
        self.tokens += emitted
        self.accepted[emitted] += 1

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.rounds + other.rounds,
            self.tokens + other.tokens,
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            self.saved + other.saved,
            self.prompt_tokens + other.prompt_tokens,
            self.seconds + other.seconds,
        )


def total(stats: list[Stats]) -> Stats:
    """Sum over requests."""
    return sum(stats, Stats())


def mean_tau(stats: list[Stats]) -> float:
    """Mean over responses of each one's tau, leaving out those that never reached a round."""
    taus = [s.tau for s in stats if s.rounds]
    return sum(taus) / len(taus) if taus else 0.0
