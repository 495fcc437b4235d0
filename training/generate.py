"""Plain decoding of very many prompts: one static batch whose slots are refilled as answers end.

A step is one graph replay. The host looks at the batch once in `SYNC` steps: it takes out what has ended, closes the
gaps (running requests stand in slots 0..n-1) and prefills new prompts behind them. A graph is made for K keys a slot, K
being the longest running request's, so prompts should come sorted by length.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from selfspec import rows
from selfspec.backbone import Backbone
from selfspec.graphs import Graphs, capturable
from selfspec.sampling import uniform

SYNC = 16  # steps between two looks of the host
KEYS = 64  # K is a multiple of this: few graphs, and the alignment that fused attention wants of its mask
PREFILL_TOKENS = 1 << 15  # rows of one prefill forward
FEWEST = 64  # requests of the smallest graph


@dataclass(frozen=True, eq=False)
class Job:
    """One prompt to be answered.

    Attributes:
        id: the caller's name for it.
        prompt: token ids, not empty.
        max_new_tokens: cap, at least 1.
        temperature: 0 is greedy.
        seed: with the position, all that the draw of a token depends on.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Done:
    """An answer: its tokens (EOS included, if it came) and "stop" or "length"."""

    job: Job
    tokens: list[int]
    finish_reason: str


class Batch:
    """A static batch of requests.

    Args:
        backbone: the model.
        eos: token ids that end an answer.
        slots: requests at a time.
        capacity: tokens per request, prompt and answer.
        max_new_tokens: the largest cap of any job.
        sample: False leaves sampling out of the step; then all temperatures must be 0.
        graphs: False runs step by step.
    """

    def __init__(
        self,
        backbone: Backbone,
        eos: Iterable[int],
        slots: int,
        capacity: int,
        max_new_tokens: int,
        sample: bool = False,
        graphs: bool = True,
    ):
        device = backbone.device
        self.backbone, self.slots, self.sample = backbone, slots, sample
        self.capacity = -(-capacity // KEYS) * KEYS
        self.cache = backbone.new_cache(slots, self.capacity, 0)
        self.graphs = Graphs(device, graphs and capturable(backbone.config))
        self.ends = frozenset(eos)
        self.eos = torch.tensor(sorted(self.ends) or [-1], device=device)
        zeros = partial(torch.zeros, slots, dtype=torch.long, device=device)
        self.token, self.start, self.made, self.cap, self.seed = zeros(), zeros(), zeros(), zeros(), zeros()
        self.alive = torch.zeros(slots, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(slots, device=device)
        self.out = torch.zeros(slots, max_new_tokens + 1, dtype=torch.long, device=device)  # last column: a dustbin
        self.jobs: list[Job | None] = []  # of slots 0..n-1; None has ended
        self.left: list[int] = []  # most tokens that each may still emit
        self.finished_tokens = self.running_tokens = 0

    @property
    def _state(self) -> tuple[Tensor, ...]:
        """All that a step changes, one row a slot."""
        return self.token, self.start, self.made, self.cap, self.seed, self.alive, self.temperature, self.out

    @property
    def tokens(self) -> int:
        """Tokens emitted up to the last look at the batch."""
        return self.finished_tokens + self.running_tokens

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> Iterator[list[Done]]:
        """Answer all jobs, in about their order. Yields what has ended since the last time (perhaps nothing)."""
        queue = deque(jobs)
        while queue or self.jobs:
            done = self._collect()
            self._refill(queue)
            self._decode()
            yield done  # the device is busy with the next steps meanwhile

    def _collect(self) -> list[Done]:
        """The one transfer: who has ended, with what."""
        n = len(self.jobs)
        if not n:
            return []
        alive, made, start = torch.stack([self.alive[:n].long(), self.made[:n], self.start[:n]]).tolist()
        ended = [i for i, job in enumerate(self.jobs) if job is not None and not alive[i]]
        index = torch.tensor(ended, dtype=torch.long, device=self.out.device)
        done = []
        for i, tokens in zip(ended, self.out[index].tolist(), strict=True):
            job = self.jobs[i]
            assert job is not None
            tokens = tokens[: made[i]]
            done.append(Done(job, tokens, "stop" if tokens[-1] in self.ends else "length"))
            self.jobs[i] = None
            self.finished_tokens += len(tokens)
        self.cache.lengths[:n] = start
        self.left = [0 if j is None else j.max_new_tokens - m for j, m in zip(self.jobs, made, strict=True)]
        self.running_tokens = sum(m for j, m in zip(self.jobs, made, strict=True) if j is not None)
        return done

    def _refill(self, queue: deque[Job]) -> None:
        """Close the gaps and admit jobs when that pays: a sixteenth of the batch is free, or a smaller graph does."""
        live = sum(j is not None for j in self.jobs)
        free = self.slots - live
        if queue and free >= max(1, self.slots // 16):
            self._compact()
            self._admit([queue.popleft() for _ in range(min(free, len(queue)))])
        elif not live or (not queue and self._bucket(live) < self._bucket(len(self.jobs))):
            self._compact()

    def _compact(self) -> None:
        """Move the last running requests into the gaps."""
        live = [i for i, j in enumerate(self.jobs) if j is not None]
        n = len(live)
        gaps = [i for i in range(n) if self.jobs[i] is None]
        movers = [i for i in live if i >= n]
        if gaps:
            self.cache.move(movers, gaps)
            old, new = torch.tensor([movers, gaps], device=self.out.device)
            for state in self._state:
                state[new] = state[old]
            for source, target in zip(movers, gaps, strict=True):
                self.jobs[target], self.left[target] = self.jobs[source], self.left[source]
        self.alive[n:] = False
        del self.jobs[n:], self.left[n:]

    def _admit(self, jobs: list[Job]) -> None:
        """Prefill jobs into the slots behind the running ones, a bounded number of rows at a time."""
        while jobs:
            count, width = 0, 0
            for job in jobs:
                wider = min(-(-max(width, len(job.prompt)) // 16) * 16, self.capacity)
                if count and (count + 1) * wider > PREFILL_TOKENS:
                    break
                count, width = count + 1, wider
            self._prefill(jobs[:count], width)
            jobs = jobs[count:]

    def _prefill(self, jobs: list[Job], width: int) -> None:
        """Commit the prompts of some jobs and emit their first tokens."""
        device, first, n = self.out.device, len(self.jobs), len(jobs)
        ids = torch.tensor([j.prompt + [0] * (width - len(j.prompt)) for j in jobs], device=device)
        slot = slice(first, first + n)
        self.start[slot] = torch.tensor([len(j.prompt) for j in jobs], device=device)
        self.cap[slot] = torch.tensor([j.max_new_tokens for j in jobs], device=device)
        self.seed[slot] = torch.tensor([j.seed for j in jobs], device=device)
        self.temperature[slot] = torch.tensor([j.temperature for j in jobs], device=device)
        self.token[slot], self.made[slot], self.alive[slot] = 0, 0, True
        layout = rows.chain(torch.zeros(n, dtype=torch.long, device=device), width)
        with self._kernels():
            hidden = self.backbone(layout, self.cache, ids, first=first, n_keys=width).clean
        last = hidden[torch.arange(n, device=device), self.start[slot] - 1]  # [n, d]
        self._emit(slot, self.backbone.logits(last[:, None])[:, 0])
        self.cache.lengths[slot] = [len(j.prompt) for j in jobs]
        self.jobs += jobs
        self.left += [j.max_new_tokens - 1 for j in jobs]

    def _decode(self) -> None:
        """Start the next few steps; returns before they have run."""
        live = [i for i, j in enumerate(self.jobs) if j is not None]
        if not live:
            return
        steps = min(SYNC, max(self.left[i] for i in live))
        longest = max(self.cache.lengths[i] for i in live) + steps
        n, n_keys = self._bucket(len(self.jobs)), min(-(-longest // KEYS) * KEYS, self.capacity)
        with self._kernels():
            for _ in range(steps):
                self.graphs((n, n_keys), partial(self._step, n, n_keys))

    def _step(self, n: int, n_keys: int) -> None:
        """One token for each of the first n slots. Ended and empty ones run along and write where nobody reads."""
        hidden = self.backbone(rows.chain(self.start[:n], 1), self.cache, self.token[:n, None], n_keys=n_keys).clean
        logits = self.backbone.logits(hidden)[:, 0]  # [n, V]
        self.start[:n].add_(self.alive[:n])
        self._emit(slice(0, n), logits)

    def _emit(self, slot: slice, logits: Tensor) -> None:
        """Choose the next token of running requests and note who ends with it. logits: [n, V]"""
        token, made, alive, out = self.token[slot], self.made[slot], self.alive[slot], self.out[slot]  # views
        new = choose(logits, self.temperature[slot], self.seed[slot], made) if self.sample else logits.argmax(-1)
        new = torch.where(alive, new, token)
        out.scatter_(1, made.masked_fill(~alive, out.shape[1] - 1)[:, None], new[:, None])
        token.copy_(new)
        made += alive
        alive &= (made < self.cap[slot]) & ~(new[:, None] == self.eos).any(-1)

    def _bucket(self, n: int) -> int:
        """Requests of the smallest graph that holds n: all slots, half of them, a quarter, ..."""
        size = self.slots
        while size // 2 >= max(n, FEWEST):
            size //= 2
        return size

    def _kernels(self) -> contextlib.AbstractContextManager:
        """On CUDA only attention kernels that plan nothing per shape, and of these the one that takes a dense mask."""
        if self.out.device.type != "cuda":
            return contextlib.nullcontext()
        return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def choose(logits: Tensor, temperature: Tensor, seed: Tensor, count: Tensor) -> Tensor:
    """Draw a token from each row's softmax(logits / T); the most likely one where T is 0.

    The draw depends on the row's seed and count alone, not on its place in a batch.

    Args:
        logits: [n, V]
        temperature: [n] float
        seed: [n] long
        count: [n] long, tokens drawn before this one with the same seed.

    Returns:
        [n] long
    """
    scaled = logits.float() / temperature.masked_fill(temperature <= 0, 1)[:, None]
    # float64 sums: a draw below the total then always lands on a token of positive probability
    mass = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    drawn = (mass <= uniform(seed, count)[:, None] * mass[:, -1:]).sum(-1)
    return torch.where(temperature > 0, drawn, logits.argmax(-1))
