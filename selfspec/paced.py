"""What rounds of one plan take, by a roofline that they calibrate while they run (BASTION)."""

from __future__ import annotations

import numpy as np

from selfspec.draft.trees.bastion import DECAY, Roofline

APART = 32  # rounds between two calibrations; the first ones come after 1, 2, 4, 8 and 16


class Paced:
    """A roofline of the verification, and the mean of what a round takes beside it.

    Args:
        roofline: not calibrated yet.
    """

    def __init__(self, roofline: Roofline):
        self.roofline = roofline
        self.rest: dict[tuple[int, bool], float] = {}  # ms by requests, and whether the draft was there
        self.rounds = 0
        self._heard: set[tuple[int, bool]] = set()

    def begin(self, n: int, context: int, drafted: bool, verify: np.ndarray, rest: float) -> None:
        """Take what a table foretells of such rounds for a beginning.

        Args:
            n: requests.
            context: committed positions.
            drafted: the draft is there already.
            verify: [M] ms of verifying 1..M rows of each request.
            rest: ms of all else.
        """
        sizes = {1, len(verify)} | {1 << i for i in range(1, len(verify).bit_length())}
        self.roofline.prior |= {(r, context, n): float(verify[r - 1]) for r in sizes if r <= len(verify)}
        self.rest.setdefault((n, drafted), rest)
        self.roofline.calibrate()

    def observe(self, n: int, rows: int, context: int, drafted: bool, verify: float, rest: float) -> bool:
        """Note one round's ms. Returns whether the roofline was calibrated anew."""
        self.roofline.observe(rows, context, verify, n)
        key = n, drafted
        self.rest[key] = DECAY * self.rest[key] + (1 - DECAY) * rest if key in self._heard else rest
        self._heard.add(key)
        self.rounds += 1
        due = self.rounds % APART == 0 or (self.rounds < APART and self.rounds & (self.rounds - 1) == 0)
        if due:
            self.roofline.calibrate()
        return due

    def times(self, n: int, context: int, drafted: bool, rows: int) -> np.ndarray:
        """Ms of rounds that verify 1..rows rows. [rows]"""
        return self.rest[n, drafted] + self.roofline(np.arange(1, rows + 1), context, n)
