"""Plans and planners in turn on the same prompts, in one session whose graphs stay: what concurrency and ablation
benchmarks measure with.

A run keeps a number of slots full from a queue and lasts for a number of tokens, so that all entrants decode the same
texts; its clock starts once every slot has its first token. Answers end at caps of their own and the first ones early,
at places spread over the slots: otherwise a run whose length is the common cap ends, in plain decoding, just before all
answers do, and speculation alone pays for the prompts of those that join.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from selfspec.explain import Watched
from selfspec.joining import Door
from selfspec.model import SelfSpecModel
from selfspec.plan import RULES, Plan
from selfspec.plan.latency import sync
from selfspec.plan.named import read
from selfspec.plan.policy import Fixed, Policy
from selfspec.plan.record import Record, length, order
from selfspec.plan.simulate import Recorder
from selfspec.planners import planner_for, table_of
from selfspec.session import Request, Session
from selfspec.settings import eos_ids

AUTO = "auto"
RECORDED = 5000  # tokens of a recording beyond a run's, at most


def policy_of(model: SelfSpecModel, name: str, slots: int | None = None) -> Policy:
    """What an entrant decodes by: a planner for "auto", else a plan, perhaps with a rule, as
    `selfspec.plan.named` reads it. Latency tables cover so many slots.

    Raises:
        ValueError: it names no plan, or one that cannot run, or a rule that cannot be used.
    """
    if name == AUTO:
        return planner_for(model.bodies, slots=slots)
    return model.pruned(model.plan(name), read(name).lengths, slots)


class Menu(Fixed):
    """Stands for several plans while a session makes room for them."""

    def __init__(self, plans: Sequence[Plan]):
        super().__init__(plans[0])
        self.plans = list(dict.fromkeys(replace(p, rule=RULES[0]) for p in plans))


@dataclass
class Run:
    """What one entrant did in one turn.

    Attributes:
        name: of the entrant.
        slots: requests at a time.
        tokens: emitted within the clock.
        seconds: that it ran.
        prefill: seconds of it that went into prompts.
        joined: requests whose prompts went through within the clock.
        rounds: forwards that verified.
        each: tokens a second that a request sees, the median.
        cold: rounds that were compiled or captured.
        plans: rounds per plan.
        start: place of the queue at which it began.
    """

    name: str
    slots: int
    tokens: int = 0
    seconds: float = 0.0
    prefill: float = 0.0
    joined: int = 0
    rounds: int = 0
    each: float = 0.0
    cold: int = 0
    plans: Counter[str] = field(default_factory=Counter)
    start: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second, prompts included in the time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second of decoding alone."""
        return self.tokens / max(self.seconds - self.prefill, 1e-9)


class Arena:
    """Holds the session, the queue and what was recorded.

    Args:
        model: with its adapters.
        names: of entrants, see `policy_of`; "auto" is a planner over everything that can run.
        prompts: token ids; every run begins at a place of its own.
        slots: the most requests at a time.
        cap: new tokens of a request; or the least and the most, between which each prompt's is drawn, the same for all
            entrants.
        calibrated: False leaves out the adapters' calibrators.

    Attributes:
        recorder: acceptance of the warm rounds.
        spent: plan and requests -> seconds of rounds.
    """

    def __init__(
        self,
        model: SelfSpecModel,
        names: Sequence[str],
        prompts: Sequence[Sequence[int]],
        slots: int,
        cap: int | tuple[int, int],
        calibrated: bool = True,
    ):
        low, high = (cap, cap) if isinstance(cap, int) else cap
        draws = random.Random(0)
        self.model, self.prompts = model, [(list(p), draws.randint(low, high)) for p in prompts]
        self.eos, self.calibrated = frozenset(eos_ids(model.model.generation_config)), calibrated
        self.policies: dict[str, Policy] = {name: policy_of(model, name, slots) for name in names}
        plans = list(dict.fromkeys(p for policy in self.policies.values() for p in policy.plans))
        longest = max(len(p) for p, _ in self.prompts)
        self.session = Session(model.bodies, Menu(plans), slots, longest + high)
        self.recorder = Recorder()
        self.spent: dict[tuple[Plan, int], list[float]] = defaultdict(list)

    def run(self, name: str, slots: int, tokens: int, start: int = 0, record: bool = False) -> Run:
        """One turn.

        Args:
            name: of the entrant.
            slots: requests at a time.
            tokens: after so many it ends.
            start: of the queue.
            record: note acceptance and the time of rounds; not of those with rules, which no plan stands for.
        """
        record &= all(getattr(self.policies[name], rule, None) is None for rule in ("pruning", "growth"))
        watched, session = Watched(self.policies[name]), self.session
        out, queue = Run(name, slots, start=start), order(len(self.prompts), slots, start)
        device, seen, begun = self.model.backbone.device, dict[Request, list[tuple[float, int]]](), 0.0
        first = set[Request]()  # whose prompts went through before the clock, though the host may read of it later
        with _calibration(self.model, self.calibrated):
            session.use(watched)
            session.limit, session.door = slots, Door()  # how long requests of other plans lived says nothing
            try:
                while out.tokens < tokens:
                    if n := session.room(slots + 1):  # the queue has no end
                        session.add([self._request(*next(queue)) for _ in range(n)])
                    emitted = session.step()
                    now = time.perf_counter()
                    if begun:
                        out.tokens += sum(len(new) - (r in first and r not in seen) for r, new in emitted)
                    for r, new in emitted:
                        seen.setdefault(r, []).append((now, len(new)))
                    if not begun and not session.joining:
                        sync(device)
                        begun = time.perf_counter()
                        watched.seen.clear()
                        first = {*seen, *session.active}
                    if record:
                        self._note(watched)
                    self._count(out, watched)
                sync(device)
                out.seconds = time.perf_counter() - begun
                joined = [r for r in seen if r not in first]
                out.joined, out.prefill = len(joined), sum(r.stats.seconds["prefill"] for r in joined)
            finally:
                session.clear()
        speeds = [sum(n for _, n in s[1:]) / (s[-1][0] - s[0][0]) for s in seen.values() if len(s) > 1]
        out.each = statistics.median(speeds) if speeds else 0.0
        return out

    def recorded(self) -> Record:
        """What the simulator needs to foretell these runs."""
        bodies = self.model.bodies
        entries = tuple(b.path.entry for b in bodies if b.path is not None) or (0,)
        context = statistics.mean(len(p) + cap / 2 for p, cap in self.prompts)
        rounds = [(p, n, context, 1e3 * statistics.median(s)) for (p, n), s in self.spent.items() if len(s) > 2]
        traces = self.recorder.traces(lambda r: tuple(r.prompt))
        index = {t.text: i for i, t in enumerate(traces)}
        queue = [(index.get(tuple(p), -1), cap) for p, cap in self.prompts]
        return Record(table_of(bodies, slots=len(self.session.requests)), entries, traces, rounds, queue)

    def _request(self, place: int, share: float) -> Request:
        prompt, cap = self.prompts[place]
        return Request(prompt, length(cap, share), self.eos)

    def _note(self, watched: Watched) -> None:
        for assignment, emitted, seconds in watched.seen:
            requests: list[Any] = [v.key for v in assignment.views]
            before = [len(r.output) - e - 1 for r, e in zip(requests, emitted, strict=True)]
            views = [
                replace(v, context=len(r.prompt) + b)  # a view is older than the round by what was on its way
                for v, r, b in zip(assignment.views, requests, before, strict=True)
            ]
            good = [i for i, b in enumerate(before) if b >= 0 and emitted[i] and not views[i].missed]
            if good:
                told = replace(assignment, views=tuple(views[i] for i in good))
                self.recorder.note(told, [before[i] for i in good], [emitted[i] for i in good])
            fresh = assignment.plan.overlap and not all(v.saved or v.missed for v in views)  # with a draft pass
            if seconds is not None and not fresh:
                self.spent[assignment.plan, len(views)].append(seconds)

    @staticmethod
    def _count(out: Run, watched: Watched) -> None:
        for assignment, _, seconds in watched.seen:
            out.rounds += 1
            out.cold += seconds is None
            out.plans[str(assignment.plan)] += 1
        watched.seen.clear()


def contest(
    arena: Arena,
    names: Sequence[str],
    slots: int,
    tokens: int,
    repeats: int,
    warm: int,
    late: Callable[[], bool] = lambda: False,
) -> Iterator[Run]:
    """All entrants in turn, each repeat on prompts of its own, after runs off the clock that capture and record.

    Args:
        arena: where they run.
        names: entrants.
        slots: requests at a time.
        tokens: of a run.
        repeats: runs of each entrant.
        warm: runs of each before.
        late: whether time is up: no further repeat begins.

    Yields:
        The runs that count, repeat by repeat.
    """
    apart = 3 * slots  # prompts between the beginnings of two repeats
    mean = statistics.mean(cap for _, cap in arena.prompts)
    all_texts = tokens + min(int((repeats - 1) * apart * mean), RECORDED)  # what is recorded is what will be measured
    for turn in range(warm):
        for name in names:
            if late():
                return
            record = turn == warm - 1 and name != AUTO
            arena.run(name, slots, all_texts if record else tokens, record=record)
    gc.collect()
    gc.freeze()  # the interpreter looks through all that was recorded now and then: a quarter of a second of some run
    try:
        for repeat in range(repeats):
            if late():
                return
            start, at = (repeat * apart) % len(arena.prompts), repeat % len(names)
            for name in [*names[at:], *names[:at]]:
                yield arena.run(name, slots, tokens, start)
    finally:
        gc.unfreeze()


def verdict(runs: Sequence[Run], key: Callable[[Run], float] = lambda r: r.rate) -> dict[str, Any]:
    """Medians of every entrant, the best fixed one by the even repeats, and ratios on the odd ones.

    Args:
        runs: of one number of slots; "ar" among them.
        key: what is compared.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_name[run.name].append(key(run))
    most = max(map(len, by_name.values()))
    whole = {n: v for n, v in by_name.items() if len(v) == most}
    chosen = {n: statistics.median(v[::2]) for n, v in whole.items() if n != AUTO}
    best = max(chosen, key=lambda n: chosen[n])
    half = {n: v[1::2] or v for n, v in whole.items()}

    def ratio(a: str, b: str) -> float | None:
        return statistics.median(x / y for x, y in zip(half[a], half[b], strict=True)) if a in half else None

    return {
        "rates": {n: statistics.median(v) for n, v in whole.items()},
        "over_ar": {n: ratio(n, "ar") for n in whole},
        "best": best,
        "auto_over_best": ratio(AUTO, best),
        "auto_over_ar": ratio(AUTO, "ar"),
    }


def data_of(run: Run) -> dict[str, Any]:
    """In plain JSON types."""
    return {**asdict(run), "plans": dict(run.plans), "rate": run.rate, "decode_rate": run.decode_rate}


@contextmanager
def _calibration(model: SelfSpecModel, wanted: bool) -> Iterator[None]:
    """Nobody finds the calibrators of a model where they are not wanted. Graphs captured inside belong to sessions used
    inside."""
    paths = [b.path for b in model.bodies if b.path is not None and not wanted]
    for path in paths:
        path.__dict__["calibrate"] = None
    try:
        yield
    finally:
        for path in paths:
            path.__dict__.pop("calibrate", None)
