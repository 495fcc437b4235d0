"""Rounds that have run and of which the estimator has not been told: told together, they take as long as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from selfspec.plan import BLOCKS, Plan
from selfspec.plan.estimate import Estimator, families
from selfspec.plan.views import Views

LOOKUP = Plan("lookup", BLOCKS[-1])  # what is heard of
POOL = ("all requests",)  # the key of a batch that is taken as one


class Heard:
    """Keeps rounds until somebody asks what they teach.

    Args:
        estimator: is told.
    """

    def __init__(self, estimator: Estimator):
        self.estimator = estimator
        self._rounds: dict[tuple[Plan, bool], list[tuple[Views, Sequence[int], Sequence[bool] | None]]] = {}
        self._copied: dict[tuple[Hashable, int], list[int]] = {}  # of a key that stands for so many requests

    def add(
        self, plan: Plan, views: Views, emitted: Sequence[int], ended: Sequence[bool] | None = None, pool: bool = False
    ) -> None:
        """Keep a round.

        Args:
            plan: that ran; of plain decoding only what it shows of copies is kept.
            views: of its requests.
            emitted: tokens of each.
            ended: whether each ended.
            pool: book all requests as one.
        """
        if views.copied is not None:
            self._overhear(views.keys, views.copied, pool)
        # rounds of small blocks begin inside a passage more often than those of the largest, which the estimator knows
        if plan.nodes == 1 or (plan.lookup and views.copied is not None):
            return
        if pool:  # requests that have left are not held in memory
            views = views.of_keys([*POOL] * len(views))
        self._rounds.setdefault((plan, pool), []).append((views, emitted, ended))

    def _overhear(self, keys: Sequence[Hashable], copied: Sequence[Sequence[int] | None], pool: bool) -> None:
        """Keep what rounds of lookup would have accepted; the texts' end cuts none of them, as it is never told."""
        if not any(self.estimator.copied):
            return
        for key, accepted in zip([*POOL] * len(keys) if pool else keys, copied, strict=True):
            if accepted:
                self._copied.setdefault((key, len(keys) if pool else 1), []).extend(accepted)

    def _tell_copied(self) -> None:
        copied, self._copied = self._copied, {}
        for (key, texts), right in copied.items():
            offered = [LOOKUP.block_size - 1] * len(right)
            self.estimator.observe([key] * len(right), families(LOOKUP)[0], offered, right, None, texts)

    @property
    def copies(self) -> bool:
        """Whether anything was heard of copies."""
        return bool(self._copied)

    def holds(self, key: Hashable) -> bool:
        """Whether something of it is still to be told."""
        rounds = (v for (_, pool), kept in self._rounds.items() if not pool for v, *_ in kept)
        return any(k == key for k, _ in self._copied) or any(key in v.keys for v in rounds)

    def rename(self, key: Hashable, other: Hashable) -> None:
        """What is kept of a key is another's from now on."""
        self._copied = {(other if k == key else k, n): right for (k, n), right in self._copied.items()}
        for (_, pool), kept in self._rounds.items():
            if not pool:
                kept[:] = [(v.of_keys([other if k == key else k for k in v.keys]), e, out) for v, e, out in kept]

    def tell(self, drafts: bool = True, copies: bool = True) -> None:
        """Tell the estimator which drafts were accepted, and what was heard of copies."""
        if copies:
            self._tell_copied()
        if not drafts:
            return
        kept, self._rounds = self._rounds, {}
        for (plan, pool), rounds in kept.items():
            views = Views.together([v for v, *_ in rounds])
            texts = round(len(views) / len(rounds)) if pool else 1
            offered = views.offered(plan)
            accepted = np.maximum(np.concatenate([e for _, e, _ in rounds]) - 1, 0)
            ended = np.concatenate([[False] * len(e) if out is None else out for _, e, out in rounds])
            offered = np.where(ended, np.minimum(offered, accepted), offered)
            made, saved = families(plan)
            for family, want in ((made, False), (saved, True)) if plan.overlap else ((made, None),):
                who = np.flatnonzero(offered > 0)
                if want is not None:
                    who = who[np.array(views.saved or [False] * len(views))[who] == want]
                if len(who):
                    keys: Sequence[Hashable] = POOL if pool else [views.keys[i] for i in who]
                    features = None if views.features is None else views.features[who]
                    self.estimator.observe(keys, family, offered[who], accepted[who], features, texts)
