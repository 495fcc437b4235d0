"""What rounds of one plan take, by a roofline that they calibrate while they run (BASTION).

It begins with what a latency table foretells. Of sizes that no round has had the table still says how they compare, and
the rounds nearest in size how far it is off there.
"""

from __future__ import annotations

import numpy as np

from selfspec.draft.trees.bastion import DECAY, Roofline

RECENT = 32  # numbers of requests with their contexts, of which the table's points count
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
        self._met: set[tuple[int, int]] = set()  # requests and rows
        self._heard: set[tuple[int, bool]] = set()
        self._foretold: dict[tuple[int, int], np.ndarray] = {}  # [M] by requests and context
        self._pace: dict[int, float] = {}  # by rows of a forward, log of what they take over what was foretold

    def begin(self, n: int, context: int, drafted: bool, verify: np.ndarray, rest: float) -> None:
        """Take what a table foretells of such rounds for a beginning.

        Args:
            n: requests.
            context: committed positions.
            drafted: the draft is there already.
            verify: [M] ms of verifying 1..M rows of each request.
            rest: ms of all else.
        """
        self._foretold.setdefault((n, context), verify)
        if len(self._foretold) > RECENT:
            self._foretold.pop(next(iter(self._foretold)))
        self.rest.setdefault((n, drafted), rest)
        self._calibrate()

    def observe(self, n: int, rows: int, context: int, drafted: bool, verify: float, rest: float) -> bool:
        """Note one round's ms, unless it is the first of its shape, which sets up. Returns whether the roofline was
        calibrated anew."""
        if (n, rows) not in self._met:
            self._met.add((n, rows))
            return False
        self.roofline.observe(rows, context, verify, n)
        if (n, context) in self._foretold:
            off = float(np.log(verify / self._foretold[n, context][rows - 1]))
            self._pace[n * rows] = DECAY * self._pace.get(n * rows, off) + (1 - DECAY) * off
        key = n, drafted
        self.rest[key] = DECAY * self.rest[key] + (1 - DECAY) * rest if key in self._heard else rest
        self._heard.add(key)
        self.rounds += 1
        due = self.rounds % APART == 0 or (self.rounds < APART and self.rounds & (self.rounds - 1) == 0)
        if due:
            self._calibrate()
        return due

    def times(self, n: int, context: int, drafted: bool, rows: int) -> np.ndarray:
        """Ms of rounds that verify 1..rows rows. [rows]"""
        return self.rest[n, drafted] + self.roofline(np.arange(1, rows + 1), context, n)

    def _calibrate(self) -> None:
        timed = sorted(self._pace.items()) or [(1, 0.0)]
        sizes, off = np.log([rows for rows, _ in timed]), [pace for _, pace in timed]
        self.roofline.prior = {}
        for (n, context), verify in self._foretold.items():
            some = np.array(sorted({len(verify), *(1 << i for i in range(len(verify).bit_length()))}))
            ms = verify[some - 1] * np.exp(np.interp(np.log(n * some), sizes, off))
            self.roofline.prior |= {(r, context, n): t for r, t in zip(some.tolist(), ms.tolist(), strict=True)}
        self.roofline.calibrate()
