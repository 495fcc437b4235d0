"""Whole texts decoded in one session, by adapters and by drafters of known quality."""

from tiny import (
    RAGGED,
    OraclePath,
    model_of,
    reference,
    run,
)

from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.session import Request, Session

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
