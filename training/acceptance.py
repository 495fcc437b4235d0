"""How much of a draft is accepted at T = 1, from distributions alone."""

from __future__ import annotations

from collections.abc import Sequence


def expected_rounds(chances: Sequence[Sequence[float]], first: Sequence[float] | None = None) -> float:
    """Rounds that an answer takes on average when every draft is accepted with a chance of its own.

    A round at token t of n accepts its drafts one after another up to the first refusal, adds a token of the verifier's
    own, and the next one starts there: N(t) = 1 + sum_j P(j accepted) N(t + j + 1), N(n) = 0. What a draft is accepted
    for is taken along the given answer, whichever tokens stand there.

    Args:
        chances: for each of the n tokens where a round may start, the chance of every draft that has a token to match.
        first: the same for the first round, when that is drafted in another layout.
    """
    n = len(chances)
    rounds = [0.0] * (n + 1)
    for t in range(n - 1, -1, -1):
        reach, after = 1.0, 0.0
        row = chances[t] if t or first is None else first
        for j, chance in enumerate(row):
            after += reach * (1 - chance) * rounds[min(t + j + 1, n)]
            reach *= chance
        rounds[t] = 1 + after + reach * rounds[min(t + len(row) + 1, n)]
    return rounds[0]
