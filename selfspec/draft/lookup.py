"""Prompt lookup: the text itself is the draft model (Prompt Lookup Decoding, github.com/apoorvumang).

What followed the last tokens when they stood in the context before is guessed to follow again. It needs no adapter and
no forward, and pays where answers quote their prompt or repeat themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from selfspec.draft import DraftTree

MEMORY = 1024  # tokens of a text that the host looks back on
LONGEST, SHORTEST = 3, 2  # n-grams looked up; single tokens match too much


def lookup(text: Tensor, start: Tensor, size: int) -> DraftTree:
    """A chain for every request: what followed the last occurrence of the longest known ending of its text.

    Args:
        text: [N, W] long, the token of position p at p.
        start: [N] long, position of the anchor, the text's last token.
        size: nodes of the chain, the anchor included.

    Returns:
        Chains of `size` nodes; -1 where nothing is guessed.
    """
    n, width = text.shape
    place = torch.arange(width, device=text.device)
    hit = place < start[:, None]  # an n-gram that ends here is followed by a known token
    end = torch.full_like(start, -1)
    for length in range(1, LONGEST + 1):
        back = length - 1
        want = text.gather(1, (start - back).clamp(min=0)[:, None])  # [N, 1]
        hit = hit & (text.roll(back, 1) == want) & (place >= back) & (start >= back)[:, None]
        if length >= SHORTEST:
            last = torch.where(hit, place, -1).amax(1)  # [N]
            end = torch.where(last >= 0, last, end)
    at = end[:, None] + 1 + torch.arange(size - 1, device=text.device)  # [N, size - 1]
    known = (end >= 0)[:, None] & (at <= start[:, None])
    guesses = torch.where(known, text.gather(1, at.clamp(max=width - 1)), -1)
    return DraftTree(torch.cat([text.gather(1, start[:, None]), guesses], 1))


class Copied:
    """What `lookup` would have guessed of a text, told as the text is written: no round has to try it.

    Args:
        text: so far; of a long one the end.
    """

    def __init__(self, text: Sequence[int]):
        self.text: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}  # n-gram -> place of what followed its last occurrence
        self._write(text[-MEMORY:])

    def _write(self, tokens: Iterable[int]) -> None:
        text, behind = self.text, self.behind
        for token in tokens:
            for length in range(SHORTEST, min(LONGEST, len(text)) + 1):
                behind[tuple(text[-length:])] = len(text)
            text.append(token)

    def follow(self, tokens: Sequence[int]) -> int:
        """Append what was emitted. Returns how many of its first tokens would have been guessed."""
        text, right = self.text, 0
        grams = (tuple(text[-n:]) for n in range(LONGEST, SHORTEST - 1, -1) if len(text) >= n)
        at = next((self.behind[g] for g in grams if g in self.behind), None)
        if at is not None:
            for guess, token in zip(text[at : at + len(tokens)], tokens, strict=False):
                if guess != token:
                    break
                right += 1
        self._write(tokens)
        return right
