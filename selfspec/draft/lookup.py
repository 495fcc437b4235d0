"""Prompt lookup: the text itself is the draft model (Prompt Lookup Decoding, github.com/apoorvumang).

What followed the last tokens when they stood in the context before is guessed to follow again. It needs no adapter and
no forward, and pays where answers quote their prompt or repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec import kernels
from selfspec.draft import DraftTree
from selfspec.plan import BLOCKS

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
    if kernels.serve(text) and text.numel():
        from selfspec.kernels.copies import copies

        return DraftTree(copies(text, start, size, LONGEST, SHORTEST))
    return DraftTree(by_torch(text, start, size))


def by_torch(text: Tensor, start: Tensor, size: int) -> Tensor:
    """`lookup` by torch. Returns long [N, size]."""
    width = text.shape[1]
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
    return torch.cat([text.gather(1, start[:, None]), guesses], 1)


class Copied:
    """Decodes by `lookup` along a text, whoever writes it, so that no round has to try what lookup would do.

    A round of it begins at an anchor, the last token, and ends behind the first token that is not as guessed, or that
    comes when all guesses are used up. Verification would have emitted that token too, and the next round begins at it:
    as decoding is lossless, these are the rounds that lookup itself would have run on this text.

    Args:
        text: so far; of a long one the end.
    """

    def __init__(self, text: Sequence[int]):
        self.text: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}  # n-gram -> place of what followed its last occurrence
        self._guesses: list[int] | None = None  # of the round on its way; None where the next token begins one
        self._right = 0  # of them, so far
        self.write(text[-MEMORY:])

    def write(self, tokens: Sequence[int]) -> None:
        """Append what no round emitted; the next one begins behind it."""
        for token in tokens:
            self._append(token)
        self._guesses = None

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Append what rounds of any kind emitted. Returns what each round of lookup that ends in it has accepted."""
        done = []
        for token in tokens:
            if self._guesses is None:
                self._guesses, self._right = self._guessed(), 0
            if self._guesses[self._right : self._right + 1] == [token]:
                self._right += 1
            else:
                done.append(self._right)
                self._guesses = None
            self._append(token)
        return done

    def _append(self, token: int) -> None:
        text = self.text
        for length in range(SHORTEST, min(LONGEST, len(text)) + 1):
            self.behind[tuple(text[-length:])] = len(text)
        text.append(token)

    def _guessed(self) -> list[int]:
        """What `lookup` guesses behind the text's last token, in blocks of the largest size."""
        text = self.text
        for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            at = self.behind.get(tuple(text[-length:]))
            if at is not None:
                return text[at : at + BLOCKS[-1] - 1]
        return []
