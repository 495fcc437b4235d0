"""Timed decoding, ours and Hugging Face's, under one definition of what is measured.

The clock of *decode* starts when the first token of every prompt of the batch is chosen and stops when the last answer
is whole; *prefill* is everything before, the cache's allocation included. For `generate` of transformers the moment
comes from a stopping criterion, which the loop calls after every token: it notes the time once and never stops
anything, so that no separately timed prefill has to be subtracted and no streamer copies tokens to the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from selfspec.model import SelfSpecModel
from selfspec.reference import answers, eos_ids
from selfspec.session import Request
from selfspec.stats import Stats

Prompts = list[list[int]]


@dataclass
class Timed:
    """One batch, decoded once.

    Attributes:
        outputs: new tokens of each prompt.
        prefill: seconds until every prompt had its first token.
        decode: seconds from there on.
        stats: one a prompt; empty for Hugging Face.
        memory: bytes allocated on the GPU at the peak beyond what was there before; 0 on the CPU.
    """

    outputs: Prompts
    prefill: float
    decode: float
    stats: list[Stats] = field(default_factory=list)
    memory: int = 0


@dataclass(frozen=True)
class Runner:
    """A way to decode.

    Attributes:
        name: for tables.
        device: synchronised around the clock.
        run: prompts and cap -> outputs, stats; calls its third argument when the first tokens are there.
        block_size: the most tokens that one round can emit; None where there are no rounds.
    """

    name: str
    device: torch.device
    run: Callable[[Prompts, int, Callable[[], None]], tuple[Prompts, list[Stats]]]
    block_size: int | None = None


def engine_runner(
    model: SelfSpecModel, mode: str, block_size: int | None = None, tree_nodes: int = 16, name: str | None = None
) -> Runner:
    """This package's decoder in one mode."""
    plan, eos = model.plan(mode, block_size, tree_nodes), eos_ids(model.model)

    def run(prompts: Prompts, cap: int, first: Callable[[], None]) -> tuple[Prompts, list[Stats]]:
        requests = [Request(p, cap, eos) for p in prompts]
        rounds = model.run(requests, plan)
        next(rounds)  # the prefill's tokens
        first()
        for _ in rounds:
            pass
        return [r.output for r in requests], [r.stats for r in requests]

    return Runner(name or mode, model.backbone.device, run, plan.block_size if plan.drafts else 1)


def hf_runner(model: PreTrainedModel, name: str) -> Runner:
    """Plain greedy `generate` of transformers."""

    def run(prompts: Prompts, cap: int, first: Callable[[], None]) -> tuple[Prompts, list[Stats]]:
        criteria = StoppingCriteriaList([_FirstToken(first)])
        return answers(model, model, prompts, cap, stopping_criteria=criteria), []

    return Runner(name, model.device, run)


class _FirstToken(StoppingCriteria):
    """Notes the first token; stops nothing."""

    def __init__(self, first: Callable[[], None]):
        self.first: Callable[[], None] | None = first

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first is not None:
            self.first()
            self.first = None
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def timed(runner: Runner, prompts: Prompts, cap: int) -> Timed:
    """Decode one batch under the clock."""
    cuda = runner.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(runner.device)
    held = torch.cuda.memory_allocated(runner.device) if cuda else 0
    marks = [_now(runner.device)]
    outputs, stats = runner.run(prompts, cap, lambda: marks.append(_now(runner.device)))
    marks.append(_now(runner.device))
    peak = torch.cuda.max_memory_allocated(runner.device) - held if cuda else 0
    return Timed(outputs, marks[1] - marks[0], marks[2] - marks[1], stats, peak)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Measured:
    """All repeats of one runner: `repeats[i]` holds the batches of repeat i, in order."""

    runner: Runner
    repeats: list[list[Timed]]

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
        return max(t.memory for batches in self.repeats for t in batches)

    def seconds_per_token(self, end_to_end: bool = False) -> list[float]:
        """One figure a repeat: seconds over tokens, summed over its batches.

        Args:
            end_to_end: with the prefill, over all tokens. Otherwise decode-only: the first token of each answer, which
                the prefill gives, doesn't count either.
        """
        figures = []
        for batches in self.repeats:
            seconds = sum(t.decode + (t.prefill if end_to_end else 0.0) for t in batches)
            tokens = sum(len(o) - (not end_to_end) for t in batches for o in t.outputs)
            figures.append(seconds / max(tokens, 1))
        return figures


def interleave(
    runners: list[Runner], prompts: Prompts, batch: int, cap: int, repeats: int, warm_up: int = 8
) -> Iterator[tuple[list[Measured], int, int]]:
    """Measure runners in turn, batch by batch, so that a slower minute of the machine falls on all of them.

    Args:
        runners: each begins in turn.
        prompts: token ids.
        batch: prompts decoded together.
        cap: new tokens at most.
        repeats: times that each batch is decoded by each runner.
        warm_up: tokens that each runner decodes first, off the clock.

    Yields:
        The measurements so far (the same objects, growing), and the answers and tokens written since the last time.
    """
    batches = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    done = [Measured(r, []) for r in runners]
    for runner in runners:
        runner.run(batches[0], min(cap, warm_up), lambda: None)
    for repeat in range(repeats):
        for m in done:
            m.repeats.append([])
        for i, part in enumerate(batches):
            turn = (repeat + i) % len(done)
            for m in done[turn:] + done[:turn]:
                out = timed(m.runner, part, cap)
                m.repeats[-1].append(out)
                yield done, len(part), sum(map(len, out.outputs))


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Speed-up, paired by repeat: how many times less `fast` takes than `slow`."""
    return spread([a / b if b else 0.0 for a, b in zip(slow, fast)])


def conditional_acceptance(stats: Stats) -> list[float]:
    """For j = 1, 2, ...: of the rounds whose first j - 1 drafts were accepted, the share in which the j-th was too.

    A round that emits k tokens accepted k - 1 drafts. Rounds cut short by EOS or the cap count as they were trimmed.
    """
    deepest = max(stats.accepted, default=1)
    at_least = [sum(n for k, n in stats.accepted.items() if k >= j) for j in range(1, deepest + 1)]
    return [b / a for a, b in pairwise(at_least)]


def match_rate(outputs: Prompts, reference: Prompts) -> float:
    """Share of answers that are the reference's, token for token."""
    return sum(a == b for a, b in zip(outputs, reference)) / max(len(reference), 1)
