"""What a planner sees of running requests, and what it tells a session to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from selfspec.plan import Plan


@dataclass(frozen=True)
class View:
    """What a planner sees of a running request before a round.

    Attributes:
        key: the request.
        context: committed positions.
        left: tokens that it may still emit.
        saved: whether an overlapped round left it a draft.
        missed: an overlapped round left it none, and none is made, as the round was started before anybody knew: it
            verifies nothing but the anchor.
        lookup: tokens that its own text suggests; None where nobody looked.
        feature: how hard its text is, see `Estimator.curves`; None where it is not known.
    """

    key: Hashable
    context: int
    left: int = 1 << 30
    saved: bool = False
    missed: bool = False
    lookup: int | None = None
    feature: float | None = None


@dataclass(eq=False)  # frozen ones take three times as long to make
class Views(Sequence[View]):
    """`View`s of a batch, column by column: to make hundreds takes longer than to plan. Nothing of it changes later.

    Attributes:
        keys: the requests; the same list as long as the same ones run, so that nobody has to compare them.
        contexts: [n] committed positions.
        ends: [n] long, positions after which each has ended.
        reach: positions that rounds on their way may have committed.
        saved: [n] bool, as in `View`.
        missed: [n] bool, likewise.
        lookups: [n], likewise; None where nobody looked.
        features: [n] float, nan where one is not known; None where none is.
        copied: [n] what each round of lookup that ends in the round's tokens would have accepted, whatever ran, None
            for whom nobody looked; once the round has been read.
        idle: slots that decode for nobody though somebody waits: free ones, and those whose prompts run.
        hurry: no round is on its way: the device waits while the host thinks.
        ready: whether a round of a plan, run now, would find all captured; None where nobody knows.
    """

    keys: list[Any]
    contexts: list[int]
    ends: np.ndarray
    reach: int = 0
    saved: list[bool] = field(default_factory=list)
    missed: list[bool] = field(default_factory=list)
    lookups: list[int | None] | None = None
    features: np.ndarray | None = None
    copied: list[Sequence[int] | None] | None = None
    idle: int = 0
    hurry: bool = False
    ready: Callable[[Plan], bool] | None = None

    @staticmethod
    def of(views: Sequence[View]) -> Views:
        """The columns of some views."""
        if isinstance(views, Views):
            return views
        contexts = [v.context for v in views]
        ends = np.array([v.context + v.left for v in views], np.int64)
        looked = any(v.lookup is not None for v in views)
        felt = any(v.feature is not None for v in views)
        features = [np.nan if v.feature is None else v.feature for v in views]
        return Views(
            [v.key for v in views], contexts, ends, 0, [v.saved for v in views], [v.missed for v in views],
            [v.lookup for v in views] if looked else None, np.array(features, float) if felt else None,
        )  # fmt: skip

    @staticmethod
    def together(rounds: Sequence[Views]) -> Views:
        """Those of several rounds in a row, as if of one."""
        if len(rounds) == 1:
            return rounds[0]
        keys = [k for v in rounds for k in v.keys]
        ends = np.concatenate([v.ends for v in rounds]) - np.repeat([v.reach for v in rounds], [len(v) for v in rounds])
        out = Views(keys, [c for v in rounds for c in v.contexts], ends)
        if any(v.saved for v in rounds):
            out.saved = [s for v in rounds for s in v.saved or [False] * len(v)]
        if any(v.missed for v in rounds):
            out.missed = [m for v in rounds for m in v.missed or [False] * len(v)]
        if any(v.lookups is not None for v in rounds):
            out.lookups = [x for v in rounds for x in v.lookups or [None] * len(v)]
        if any(v.features is not None for v in rounds):
            nothing = [np.full(len(v), np.nan) if v.features is None else v.features for v in rounds]
            out.features = np.concatenate(nothing)
        return out

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: Any) -> Any:
        return list(self)[i]

    def __iter__(self) -> Iterator[View]:
        n = len(self)
        lookups = [None] * n if self.lookups is None else self.lookups
        features = [None] * n if self.features is None else [None if np.isnan(f) else f for f in self.features.tolist()]
        saved, missed = self.saved or [False] * n, self.missed or [False] * n
        columns = self.keys, self.contexts, self.left.tolist(), saved, missed, lookups, features
        return (View(*row) for row in zip(*columns, strict=True))

    def of_keys(self, keys: list[Any]) -> Views:
        """The same, of other keys."""
        rest = self.saved, self.missed, self.lookups, self.features
        return Views(keys, self.contexts, self.ends, self.reach, *rest)

    @cached_property
    def context(self) -> float:
        """Mean committed positions."""
        return sum(self.contexts) / len(self.contexts)

    @cached_property
    def left(self) -> np.ndarray:
        """Tokens that each may still emit, at least. [n] long"""
        return np.maximum(self.ends - np.array(self.contexts) - self.reach, 1)

    def without_drafts(self) -> Views:
        """What was saved is dropped."""
        return replace(self, saved=[], missed=[])

    def found(self, drafted: Collection[int], made: bool = False) -> Views:
        """Whether a saved draft was really there nobody may have known when the round started.

        Args:
            drafted: ids of whom it was.
            made: for the others one was made.
        """
        if not any(self.saved):
            return self
        saved = [s and id(key) in drafted for s, key in zip(self.saved, self.keys, strict=True)]
        missed = [] if made else [s and not there for s, there in zip(self.saved, saved)]
        return replace(self, saved=saved, missed=missed)

    def heard(self, copied: Mapping[int, Sequence[int]]) -> Views:
        """The same, and what was heard of rounds of lookup along the texts. copied: by id of the request."""
        return replace(self, copied=[copied.get(id(key)) for key in self.keys]) if copied else self

    def offered(self, plan: Plan) -> np.ndarray:
        """Drafts that each request can accept; a tree's depth counts, not its nodes. [n] long"""
        depth = (plan.block_size if plan.tree else plan.nodes) - 1
        if depth < 1:
            return np.zeros(len(self), np.int64)
        most: Any = depth
        if plan.lookup and self.lookups is not None:
            most = np.array([depth if found is None else min(depth, found) for found in self.lookups])
        room = np.clip(self.left - 1, 0, most)
        return np.where(self.missed, 0, room) if any(self.missed) else room


@dataclass(frozen=True)
class Assignment:
    """Requests that run a round together."""

    views: Sequence[View]
    plan: Plan

    @property
    def keys(self) -> list[Hashable]:
        """The requests."""
        return Views.of(self.views).keys

    @property
    def context(self) -> float:
        """Mean committed positions."""
        return Views.of(self.views).context

    @property
    def offered(self) -> list[int]:
        """Drafts that each request can accept; a tree's depth counts, not its nodes."""
        return Views.of(self.views).offered(self.plan).tolist()
