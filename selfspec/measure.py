"""Timed decoding, ours and Hugging Face's, under one definition of what is measured.

A *run* decodes a queue of prompts, so many at a time, from the first to the last answer's end; the device is
synchronised at both ends. *Prefill* is what of it passes until prompts have their first tokens, set-up and the cache's
allocation included; *decode* is the rest. How each way to decode tells the two apart is in `selfspec.runners`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from selfspec.plan.latency import sync
from selfspec.stats import Stats, total

Prompts = list[list[int]]


class Watch:
    """What a runner notes while it decodes: who emitted how many tokens, and when.

    Args:
        device: synchronised at the ends of the run.

    Attributes:
        first: request -> the moment of its first tokens, and how many they were.
        last: request -> the moment of its latest token.
        steps: rounds of the whole batch.
        prefill: seconds; the runner says.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.first: dict[int, tuple[float, int]] = {}
        self.last: dict[int, float] = {}
        self.steps = 0
        self.prefill = 0.0
        self.begin = self.now()

    def now(self) -> float:
        """The moment at which all work given to the device is done."""
        sync(self.device)
        return time.perf_counter()

    def step(self, emitted: Iterable[tuple[int, int]]) -> None:
        """Book what has just come: (request's index in the queue, tokens). They are on the host, so nothing waits."""
        now, decoded = time.perf_counter(), False
        for i, tokens in emitted:
            decoded |= i in self.first
            self.first.setdefault(i, (now, tokens))
            self.last[i] = now
        self.steps += decoded


@dataclass
class Timed:
    """One run.

    Attributes:
        outputs: new tokens of each prompt.
        prefill: seconds.
        decode: seconds.
        firsts: tokens that the prefill gave, over all prompts.
        speeds: tokens a second of each request, from its first tokens to its end; none where it had no more.
        stats: one a prompt; empty for Hugging Face.
        steps: rounds of the whole batch; 0 for Hugging Face.
        memory: bytes allocated on the GPU at the peak; 0 on the CPU.
    """

    outputs: Prompts
    prefill: float
    decode: float
    firsts: int
    speeds: list[float] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    steps: int = 0
    memory: int = 0


@dataclass(frozen=True)
class Runner:
    """A way to decode.

    Attributes:
        name: for tables.
        device: where it runs.
        run: prompts, cap, prompts at a time, watch -> outputs, stats.
        block_size: the most tokens that one round can emit; None where there are no rounds.
    """

    name: str
    device: torch.device
    run: Callable[[Prompts, int, int, Watch], tuple[Prompts, list[Stats]]]
    block_size: int | None = None


def timed(runner: Runner, prompts: Prompts, cap: int, concurrency: int = 1) -> Timed:
    """Decode a queue of prompts under the clock, `concurrency` at a time."""
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runner.device)
    watch = Watch(runner.device)
    outputs, stats = runner.run(prompts, cap, concurrency, watch)
    seconds = watch.now() - watch.begin
    peak = torch.cuda.max_memory_allocated(runner.device) if runner.device.type == "cuda" else 0
    firsts = sum(min(n, len(outputs[i])) for i, (_, n) in watch.first.items())
    speeds = []
    for i, (moment, n) in watch.first.items():
        if len(outputs[i]) > n and watch.last[i] > moment:
            speeds.append((len(outputs[i]) - n) / (watch.last[i] - moment))
    return Timed(outputs, watch.prefill, seconds - watch.prefill, firsts, speeds, stats, watch.steps, peak)


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on a GPU; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@dataclass
class Measured:
    """All repeats of one runner: `repeats[i]` holds the runs of repeat i, in order.

    Attributes:
        before: bytes on the GPU before any runner ran.
        error: why it was given up; it has no figures then.
    """

    runner: Runner
    repeats: list[list[Timed]]
    before: int = 0
    error: str | None = None

    @property
    def outputs(self) -> Prompts:
        """Answers of the first repeat."""
        return [o for t in self.repeats[0] for o in t.outputs]

    @property
    def stats(self) -> list[Stats]:
        """Stats of the first repeat; greedy decoding repeats itself."""
        return [s for t in self.repeats[0] for s in t.stats]

    @property
    def memory(self) -> int:
        """Bytes on the GPU at the peak beyond the weights: with what this runner and the others keep from run to run,
        such as caches and graphs."""
        return max(0, max(t.memory for runs in self.repeats for t in runs) - self.before)

    def seconds_per_token(self, end_to_end: bool = False) -> list[float]:
        """One figure a repeat: seconds over tokens, summed over its runs.

        Args:
            end_to_end: with the prefill, over all tokens. Otherwise decode-only: the tokens that the prefill gives, the
                first of each answer, don't count either.
        """
        figures = []
        for runs in self.repeats:
            seconds = sum(t.decode + (t.prefill if end_to_end else 0.0) for t in runs)
            tokens = sum(sum(map(len, t.outputs)) - (0 if end_to_end else t.firsts) for t in runs)
            figures.append(seconds / max(tokens, 1))
        return figures

    def tokens_per_second_request(self) -> list[float]:
        """One figure a repeat: what one request sees while it decodes, the median over requests."""
        speeds = [[s for t in runs for s in t.speeds] for runs in self.repeats]
        return [statistics.median(s) if s else 0.0 for s in speeds]

    def round_ms(self) -> dict[str, list[float]]:
        """Milliseconds of the batch's mean round, one figure a repeat: draft, verify, rest, and what the clock of the
        rounds doesn't see ("between": the host between two of them)."""
        figures: dict[str, list[float]] = {}
        for runs in self.repeats:
            steps, seconds = sum(t.steps for t in runs), total([s for t in runs for s in t.stats]).seconds
            parts = {k: float(v) for k, v in seconds.items() if k != "prefill"}
            parts["between"] = max(0.0, sum(t.decode for t in runs) - sum(parts.values()))
            for name, value in parts.items() if steps else ():
                figures.setdefault(name, []).append(1e3 * value / steps)
        return figures


def interleave(
    runners: list[Runner], prompts: Prompts, concurrency: int, cap: int, repeats: int, warm_up: int | None = 8
) -> Iterator[tuple[list[Measured], int, int]]:
    """Measure runners in turn, so that a slower minute of the machine falls on all of them.

    One at a time, they take turns at every prompt; more at a time, at every queue of all prompts. A runner that fails
    is given up, and the others go on.

    Args:
        runners: each begins in turn.
        prompts: token ids.
        concurrency: prompts decoded at a time.
        cap: new tokens at most.
        repeats: times that each prompt is decoded by each runner.
        warm_up: tokens of the first prompts that each runner decodes first, off the clock; None is two whole repeats,
            as what is compiled or captured at its first use needs them.

    Yields:
        The measurements so far (the same objects, growing), and the answers and tokens written since the last time.
    """
    queues = [[p] for p in prompts] if concurrency == 1 else [prompts]
    done = [Measured(r, [], allocated(r.device)) for r in runners]
    # In the first of two whole passes what the runners share grows to its final size, in the second it is captured.
    for _ in range(2 if warm_up is None else 1):
        for m in done:
            for queue in queues if warm_up is None else [queues[0][:concurrency]]:
                _attempt(m, queue, cap if warm_up is None else min(cap, warm_up), concurrency)
    for repeat in range(repeats):
        for m in done:
            m.repeats.append([])
        for i, queue in enumerate(queues):
            turn = (repeat + i) % len(done)
            for m in done[turn:] + done[:turn]:
                out = _attempt(m, queue, cap, concurrency)
                if out is not None:
                    m.repeats[-1].append(out)
                yield done, len(queue), sum(map(len, out.outputs)) if out else 0


def _attempt(m: Measured, prompts: Prompts, cap: int, concurrency: int) -> Timed | None:
    """One run, unless the runner has failed before or does so now: any failure is one row's, not the whole table's."""
    if m.error is None:
        try:
            return timed(m.runner, prompts, cap, concurrency)
        except Exception as error:
            m.error = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return None


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Speed-up, paired by repeat: how many times less `fast` takes than `slow`."""
    return spread([a / b if b else 0.0 for a, b in zip(slow, fast)])


def match_rate(outputs: Prompts, reference: Prompts) -> float:
    """Share of answers that are the reference's, token for token."""
    return sum(a == b for a, b in zip(outputs, reference)) / max(len(reference), 1)
