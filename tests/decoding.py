"""Whole texts decoded in one session, by adapters and by drafters of known quality."""

import torch
from tiny import (
    RAGGED,
    OraclePath,
    model_of,
    reference,
    run,
)

from selfspec import decode
from selfspec.backbone import Backbone
from selfspec.decode import Frame
from selfspec.draft import DraftTree
from selfspec.plan import Plan
from selfspec.session import Request, Session
from selfspec.slots import Slots
from selfspec.verify.greedy import greedy

MODES = ("ar", "sequential", "tree", "overlap", "overlap+tree")
B, N = 5, 12


def decoded(body, plan, prompts, n, eos=(), slots=None):
    """Run prompts in one session. Returns the requests."""
    slots = slots or len(prompts)
    session = Session(body, plan, slots, max(map(len, prompts)) + n)
    if isinstance(body.path, OraclePath):
        body.path.session = session
    requests = [Request(p, n, frozenset(eos)) for p in prompts]
    run(session, requests[:slots], requests[slots:])
    return requests


def outputs(requests):
    return [r.output for r in requests]


def oracle(right, n=N, prompts=RAGGED, shift=False, block=B, eos=(), mode="sequential", slots=None):
    """Requests decoded with a drafter of known quality, and the true answers."""
    model = model_of()
    truth = reference(model, prompts, n + 2 * block + 2)
    path = OraclePath(model, {}, right, block, shift)
    body = Backbone(model, path)
    slots = slots or len(prompts)
    session = Session(body, Plan(mode, block), slots, max(map(len, prompts)) + n)
    requests = [Request(p, n, frozenset(eos)) for p in prompts]
    path.session, path.truth = session, dict(zip(requests, truth, strict=True))
    run(session, requests[:slots], requests[slots:])
    return requests, truth


class Rounds:
    """Rounds by hand, without a session or a drafter, of one request."""

    def __init__(self, body, prompt, capacity=40):
        self.body, self.cache = body, body.new_cache(1, capacity, 40)
        self.slots, self.frame = Slots(1, capacity, body.device), Frame(0, 1)
        self.slots.put(0, prompt, 0, len(prompt), 0)
        self.slots.write()
        last, _ = decode.prefill(
            body, self.cache, self.slots, self.frame, torch.tensor([len(prompt)]), width=len(prompt)
        )
        self.slots.start[0] = self.cache.lengths[0] = len(prompt)
        self.slots.text[0, len(prompt)] = int(body.logits(last[:, None]).argmax())
        self.slots.left[0] = capacity - len(prompt) - 1

    @property
    def anchor(self):
        return self.slots.anchor(1)

    def __call__(self, tokens=(), parents=None):
        """One round over a tree whose root is the anchor. Returns what it emits."""
        tree = DraftTree(torch.tensor([[int(self.anchor), *tokens]]), parents and torch.tensor([parents]))
        hidden = decode.verify(self.body, self.cache, self.slots.start, tree, self.frame)
        accepted = greedy(tree, self.body.logits(hidden.clean))
        out = decode.settle(self.cache, self.slots, self.frame, tree, accepted, None, tree.n_nodes)
        [[count, *emitted]] = out.tolist()
        self.cache.lengths[0] += count
        return emitted[:count]
