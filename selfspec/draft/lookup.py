"""Prompt lookup: the text itself is the draft model (Prompt Lookup Decoding, github.com/apoorvumang).

What followed the last tokens when they stood in the context before is guessed to follow again. It needs no adapter and
no forward, and pays where answers quote their prompt or repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.draft import DraftTree

LONGEST, SHORTEST = 3, 2  # n-grams looked up; single tokens match too much


class Index:
    """Where each n-gram of a growing text was last followed by something."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            end = len(self.tokens)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def guess(self, n: int) -> list[int]:
        """Up to n tokens that followed the longest known ending of the text."""
        for size in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            at = self._after.get(tuple(self.tokens[-size:]))
            if at is not None:
                return self.tokens[at : at + n]
        return []


def lookup(anchor: Tensor, guesses: list[list[int]]) -> DraftTree:
    """A chain for every request, ragged ones padded with tokens that never match.

    Args:
        anchor: [N] long.
        guesses: the tokens guessed to follow each anchor.
    """
    longest = max(map(len, guesses))
    rows = torch.tensor([g + [-1] * (longest - len(g)) for g in guesses], dtype=torch.long, device=anchor.device)
    return DraftTree(torch.cat([anchor[:, None], rows.reshape(len(guesses), longest)], 1))
