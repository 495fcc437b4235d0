"""Requests on one cache: admit, run rounds, finish. The only place where host and rounds meet."""

from __future__ import annotations

from functools import partial

import psutil
import torch
from torch import Tensor

from selfspec import decode
from selfspec.backbone import Backbone
from selfspec.choose import Chooser
from selfspec.clock import Clock
from selfspec.decode import State
from selfspec.draft import DraftTree
from selfspec.draft.block import propose
from selfspec.draft.lookup import Index, lookup
from selfspec.past import PastText
from selfspec.plan import Plan
from selfspec.request import Request
from selfspec.verify import CHAINS, Accept

__all__ = ["Request", "Session", "fitting"]

PREFILL_CHUNK = 512


class Session:
    """Running requests, always in cache slots 0..n-1.

    Args:
        backbone: with a mask path if the plan drafts.
        plan: what rounds do.
        slots: requests at a time.
        capacity: positions per request (prompt and answer).
        verify: how drawn tokens are verified, a name in `selfspec.verify.VERIFIERS`; greedy requests need "coupled".

    Raises:
        ValueError: the plan needs a layout or a block that the mask path was not trained for, or the verifier does not
            take its drafts.
    """

    def __init__(self, backbone: Backbone, plan: Plan, slots: int, capacity: int, verify: str = "coupled"):
        self.backbone, self.plan = backbone, plan
        self.chooser = Chooser(verify)
        if plan.tree and verify in CHAINS:
            raise ValueError(f"verify={verify!r} is for chains; trees take 'coupled' or 'multi'")
        if plan.lookup and self.chooser.draws:
            raise ValueError(f"verify={verify!r} needs drafts that the model draws; looked-up ones take 'coupled'")
        self.config = getattr(backbone.path, "config", None)
        plan.require(self.config)
        nodes = plan.tree_nodes + 1 if plan.tree else plan.block_size
        rows = nodes * (1 + plan.block_size) if plan.overlap else max(nodes, plan.block_size)
        self.cache = backbone.new_cache(slots, capacity, max(rows, min(PREFILL_CHUNK, capacity)))
        self.active: list[Request] = []
        self.state: State | None = None
        self.saved: Tensor | None = None  # [n, B - 1, V] marginals that the last verify forward drafted

    @torch.no_grad()
    def add(self, requests: list[Request]) -> list[list[int]]:
        """Prefill requests into free slots. Returns the first token of each, as `step` does.

        Raises:
            ValueError: a request that cannot be served, or no free slot; nothing has changed then.
        """
        for r in requests:
            self.check(r)
            r.device, r.drawn = self.backbone.device, self.chooser.draws
        if not requests:
            return []
        first = len(self.active)
        if first + len(requests) > self.cache.slots:
            raise ValueError(f"{first} of {self.cache.slots} slots are taken; {len(requests)} more do not fit")
        for slot in range(first, first + len(requests)):
            self.cache.crop(0, slot)
        clock = Clock(self.backbone.device)
        prompts, accept = [r.prompt for r in requests], self._accept(requests)
        known = [0 if r.past is None else r.past.load(self.cache, i, r.prompt) for i, r in enumerate(requests, first)]
        state = decode.prefill(self.backbone, self.cache, prompts, first, PREFILL_CHUNK, accept, known)
        self.state = state if self.state is None or not self.active else _join(self.state, state)
        self.saved = None  # the new requests have none; all redraft once
        self.active += requests
        emitted = [r.take([t]) for r, t in zip(requests, state.anchor.tolist(), strict=True)]
        clock.lap("prefill")
        for r, n in zip(requests, known, strict=True):
            r.stats.prompt_tokens = len(r.prompt) - n
        _book(requests, clock)
        self._drop_finished()
        return emitted

    def check(self, request: Request) -> None:
        """Refuse what would fail, or end in wrong positions, once it runs beside others.

        Raises:
            ValueError: the request cannot be served; the message says why.
        """
        if not request.prompt:
            raise ValueError("the prompt is empty")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={request.max_new_tokens}: expected 1 or more")
        if min(request.prompt) < 0 or max(request.prompt) >= self.backbone.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.backbone.vocab_size - 1}")
        limit = min(self.cache.capacity, self.backbone.max_positions or self.cache.capacity)
        length, new = len(request.prompt), request.max_new_tokens
        if length + new > limit:
            raise ValueError(f"a prompt of {length} tokens and {new} new ones exceed {limit} positions")
        self.chooser.check(request)

    @torch.no_grad()
    def step(self) -> list[tuple[Request, list[int]]]:
        """One round for all running requests. Returns what each emitted; those that ended leave their slots."""
        assert self.state is not None
        clock, running = Clock(self.backbone.device), self.active
        tree = self._tree(self.state)
        clock.lap("draft")
        group = self.plan.block_size if self.plan.overlap else 0
        causal = self.config.causal if self.config is not None else False
        accept = self._accept(self.active)
        accepted, hidden = decode.verify(self.backbone, self.cache, self.state, tree, group, causal, accept)
        clock.lap("verify")
        self.saved = decode.saved_draft(self.backbone, accepted, hidden, group, self.config) if group else None
        self.state, emitted = decode.commit(self.cache, self.state, tree, accepted, hidden)
        out = [(r, r.take(tokens)) for r, tokens in zip(self.active, emitted, strict=True)]
        for request, kept in out:
            request.stats.count(len(kept))
        clock.lap("rest")
        _book(running, clock)
        self._drop_finished()
        return out

    def _tree(self, state: State) -> DraftTree:
        """This round's candidates: nothing but the anchor, a chain or a tree."""
        left = max(r.max_new_tokens - len(r.output) for r in self.active)
        size = min(self.plan.block_size, left)  # nobody can take more
        if self.plan.lookup and size > 1:
            return lookup(state.anchor, [self._guess(r, size - 1) for r in self.active])
        if not self.plan.drafts or size == 1:
            self.saved = None
            return DraftTree(state.anchor[:, None])
        logits = self.saved
        if logits is None:
            logits = propose(self.backbone, self.cache, state.anchor, state.start, size, self.config, state.features)
            assert self.config is not None
            depth = 1 - self.config.entry / self.backbone.n_layers
            for r in self.active:
                r.stats.drafts += depth
        nodes = self.plan.tree_nodes if self.plan.tree else None
        return self.chooser.tree(self.active, state.anchor, state.start, logits[:, : size - 1], nodes)

    def _accept(self, requests: list[Request]) -> Accept | None:
        """How these requests' tokens are chosen; None where all are greedy on bare logits."""
        if all(r.sampling is None for r in requests) and not self.chooser.draws:
            return None
        return partial(self.chooser.accept, requests)

    def _guess(self, request: Request, n: int) -> list[int]:
        """What the request's own text suggests to come next."""
        if request.index is None:
            request.index = Index()
        known = len(request.index.tokens)
        request.index.extend((request.prompt + request.output)[known:])
        return request.index.guess(n)

    def _drop_finished(self) -> None:
        """Free the slots of ended requests; the last ones move into the gaps."""
        keep = [i for i, r in enumerate(self.active) if r.finish_reason is None]
        for i, r in enumerate(self.active):
            if r.keep_past and r.finish_reason is not None:
                r.past = PastText.of(self.cache, i, r.prompt + r.output, self.backbone.embeddings)
        if len(keep) == len(self.active):
            return
        n = len(keep)
        movers = [i for i in keep if i >= n]
        order = [i if self.active[i].finish_reason is None else movers.pop() for i in range(n)]
        for slot, source in enumerate(order):
            if slot != source:
                self.cache.move(source, slot)
        self.active = [self.active[i] for i in order]
        assert self.state is not None
        index = torch.tensor(order, dtype=torch.long, device=self.state.anchor.device)
        features = None if self.state.features is None else self.state.features[index]
        self.state = State(self.state.anchor[index], self.state.start[index], features)
        self.saved = None if self.saved is None else self.saved[index]


def _book(requests: list[Request], clock: Clock) -> None:
    """Share a round's time out among its requests."""
    for name, seconds in clock.read().items():
        for r in requests:
            r.stats.seconds[name] += seconds / len(requests)  # type: ignore[assignment]


def _join(a: State, b: State) -> State:
    features = None if a.features is None or b.features is None else torch.cat([a.features, b.features])
    return State(torch.cat([a.anchor, b.anchor]), torch.cat([a.start, b.start]), features)


def fitting(backbone: Backbone, capacity: int, share: float = 0.7) -> int:
    """Requests of some length whose keys and values fit into that share of the device's free memory."""
    if backbone.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(backbone.device)[0]
    else:
        free = psutil.virtual_memory().available
    size = torch.empty(0, dtype=backbone.dtype).element_size()
    per_position = size * sum(h * (d + dv) for h, d, dv in backbone.kv_shapes)
    return max(1, int(share * free / (per_position * capacity)))
