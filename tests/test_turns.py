"""Threads that share a backbone take turns."""

import threading
import time

import pytest
import torch
from tiny import PROMPT, RAGGED, build, model_of, path_of, reference, run

from selfspec import SelfSpecModel
from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.rounds import Rounds
from selfspec.session import Request, Session
from selfspec.turns import Turn, turns

N = 12


def at_once(*calls):
    """Run functions in a thread each; what one of them raises is raised here. Returns what they return."""
    out, errors = [None] * len(calls), []

    def guarded(i, call):
        try:
            out[i] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=c, daemon=True) for c in enumerate(calls)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    if errors:
        raise errors[0]
    assert not any(t.is_alive() for t in threads)
    return out


@pytest.fixture
def crowd(monkeypatch):
    """How many rounds ran at a time, at most."""
    inside, seen, play = [], [], Rounds.play

    def slow(self, *args, **kwargs):
        inside.append(1)
        seen.append(len(inside))
        time.sleep(0.002)
        out = play(self, *args, **kwargs)
        inside.pop()
        return out

    monkeypatch.setattr(Rounds, "play", slow)
    return seen


def test_two_sessions_of_one_backbone_in_two_threads_take_turns(crowd):
    """On a GPU their split products counted on the same counters."""
    model = model_of()
    truth = reference(model, RAGGED, N)
    bodies = [Backbone(model, path_of(model, 0.2)), Backbone(model, path_of(model, 0.1))]
    both = Session(bodies, Plan("sequential", 5, adapter=1), 3, 64)
    back = Session(bodies[::-1], Plan("sequential", 5, adapter=1), 3, 64)  # takes them in another order
    one = Session(bodies[0], Plan("ar", 1), 3, 64)
    answers = at_once(*(lambda s=s: run(s, [Request(p, N) for p in RAGGED]) for s in (both, one, back)))
    assert all([r.output for r in requests] == truth for requests in answers)
    assert max(crowd) == 1 and len(crowd) > N


def test_one_model_in_two_threads_answers_each_its_own(crowd):
    model = build()
    decoder = SelfSpecModel(model, path_of(model, 0.2))
    truth = reference(model, RAGGED, N)
    calls = [lambda p=p, m=m: decoder.generate([p], max_new_tokens=N, mode=m) for p in RAGGED for m in ("ar", "tree")]
    found = [out[0, -N:].tolist() for out in at_once(*calls)]
    assert found == [t for t in truth for _ in range(2)] and max(crowd) == 1


def test_one_session_in_several_threads(crowd):
    model = model_of()
    session = Session(Backbone(model), Plan("ar", 1), 3, 64)
    requests = [Request(p, N) for p in RAGGED]

    def step():
        while any(r.finish_reason is None for r in requests):
            session.step()

    at_once(step, step, *(lambda r=r: session.add([r]) for r in requests))
    assert [r.output for r in requests] == reference(model, RAGGED, N) and max(crowd) == 1


def test_whoever_waits_for_a_turn_comes_next():
    """A thread that steps on and on took the lock again before another one woke."""
    turn, order = Turn(), []

    def hog():
        while len(order) < 400 and "other" not in order:
            with turn, turn:  # as a forward within a round
                order.append("hog")
                time.sleep(0.001)

    def other():
        while not order:
            time.sleep(0.001)
        with turn:
            order.append("other")

    at_once(hog, other)
    assert "other" in order and len(order) < 100


@pytest.mark.gpu
def test_two_streams_do_not_share_counters_at_one_time():
    """Split products of two threads, each on a stream of its own, counted each other's parts."""
    shape = dict(num_hidden_layers=6, hidden_size=576, intermediate_size=1536, head_dim=64)  # whose down product splits
    heads = dict(num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=1024, initializer_range=0.04)
    base = build("Llama", torch.bfloat16, **shape, **heads).cuda()
    body = SelfSpecModel(base, exact=True).backbone

    def answer(stream):
        session = Session(body, Plan("ar", 1), 1, 512)
        with torch.cuda.stream(stream):
            (request,) = run(session, [Request(PROMPT, 200)])
        torch.cuda.synchronize()
        return request.output

    truth = answer(torch.cuda.current_stream())
    for _ in range(3):
        streams = [torch.cuda.Stream() for _ in range(3)]
        assert at_once(*(lambda s=s: answer(s) for s in streams)) == [truth] * 3


@pytest.mark.gpu
def test_a_stream_waits_for_what_the_last_holder_of_the_turn_has_started():
    class Body:
        turn, device = Turn(), torch.device("cuda", torch.cuda.current_device())

    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(slow), turns([Body]):
        torch.cuda._sleep(200_000_000)
        x += 1
    with torch.cuda.stream(fast), turns([Body]):
        seen = x.clone()
    torch.cuda.synchronize()
    assert seen.item() == 1
