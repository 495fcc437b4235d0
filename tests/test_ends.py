"""Where texts end and requests come and go: EOS, caps, joining and leaving, the model's limits."""

from unittest import mock

import pytest
import torch
from decoding import MODES, B, N, decoded, oracle, outputs
from tiny import (
    POSITIONS,
    PROMPT,
    RAGGED,
    VOCAB,
    build,
    model_of,
    path_of,
    reference,
    run,
)

from selfspec import SelfSpecModel
from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.session import Request, Session

pytestmark = pytest.mark.usefixtures("chains")


@pytest.mark.parametrize("mode", ["sequential", "overlap"])
@pytest.mark.parametrize("offset", range(2 * B + 1))
def test_eos_at_every_offset_of_a_block(mode, offset):
    """The token comes from the model's own run; the drafter is always right, so it lies inside an accepted block."""
    model, prompt = model_of(), RAGGED[1]
    [answer] = reference(model, [prompt], 30)
    eos = answer[offset]
    end = answer.index(eos)
    [request], _ = oracle(4, n=30, prompts=[prompt], eos=[eos], mode=mode)
    assert [request.output] == reference(model, [prompt], 30, eos) == [answer[: end + 1]]
    assert request.finish_reason == "stop" and request.stats.tokens == end


def test_eos_offsets_are_really_met():
    """The run above holds at least one new token at each residue of the block."""
    [answer] = reference(model_of(), RAGGED[1:2], 30)
    fresh = {answer.index(t) for t in answer[: 2 * B + 1]}
    assert {(i - 1) % B for i in fresh if i} == set(range(B))


@pytest.mark.parametrize("mode", MODES)
def test_lists_of_eos(mode):
    model = model_of()
    body = Backbone(model, path_of(model))
    answers = reference(model, RAGGED, N)
    eos = [VOCAB - 1, answers[0][4], answers[1][7]]
    requests = decoded(body, Plan(mode, B, 8), RAGGED, N, eos)
    assert outputs(requests) == reference(model, RAGGED, N, eos)
    assert {r.finish_reason for r in requests[:2]} == {"stop"}


@pytest.mark.parametrize("cap", range(1, B + 3))
@pytest.mark.parametrize("mode", ["sequential", "tree", "overlap"])
def test_every_cap(cap, mode):
    model = model_of()
    truth = [a[:cap] for a in reference(model, RAGGED, B + 2)]
    assert outputs(decoded(Backbone(model, path_of(model)), Plan(mode, B, 8), RAGGED, cap)) == truth
    if mode != "tree":
        assert outputs(oracle(4, n=cap, mode=mode)[0]) == truth


def test_eos_and_cap_on_the_same_token():
    [answer] = reference(model_of(), [PROMPT], N)
    end = next(i for i in range(2, N) if answer[i] not in answer[:i])
    [request], _ = oracle(4, n=end + 1, prompts=[PROMPT], eos=[answer[end]])
    assert request.output == answer[: end + 1] and request.finish_reason == "stop"


@pytest.mark.parametrize("mode", MODES)
def test_requests_join_and_leave_between_rounds(mode):
    """Six requests through two slots, with caps of their own; each answers as it does alone."""
    model = model_of("Gemma3")
    body = Backbone(model, path_of(model, entry=2))
    prompts = [PROMPT, [5, 8, 2], [13], [1] * 9, [2, 4, 6, 8], [21, 22]]
    caps = [3, 11, 1, 7, 9, 6]
    session = Session(body, Plan(mode, B, 8), 2, 24)
    requests = [Request(p, c) for p, c in zip(prompts, caps, strict=True)]
    run(session, requests[:1], requests[1:])
    truth = reference(model, prompts, max(caps))
    assert outputs(requests) == [t[:c] for t, c in zip(truth, caps, strict=True)]
    assert not session.active


@pytest.mark.parametrize("mode", ["sequential", "overlap"])
def test_a_request_that_joins_gets_drafts_of_its_own(mode):
    """With a drafter that is always right every request has the tau of a run alone."""
    prompts = [PROMPT, [5, 8, 2], [13, 3], [1] * 9]
    requests, truth = oracle(4, n=16, prompts=prompts, mode=mode, slots=2)
    for request, answer in zip(requests, truth, strict=True):
        assert request.output == answer[:16] and request.stats.tau == 5


def test_order_in_the_batch_is_irrelevant():
    model = model_of()
    body = Backbone(model, path_of(model))
    there = outputs(decoded(body, Plan("tree", B, 8), RAGGED, N))
    back = outputs(decoded(body, Plan("tree", B, 8), RAGGED[::-1], N))
    assert there == back[::-1]


def test_a_full_session_refuses_more_and_keeps_what_it_has():
    model = model_of()
    session = Session(Backbone(model), Plan("ar", 1), 1, 30)
    [first] = requests = [Request(PROMPT, 4)]
    session.add(requests)
    with pytest.raises(ValueError, match="1 of 1 slots"):
        session.add([Request(PROMPT, 4)])
    run(session, [])
    assert [first.output] == reference(model, [PROMPT], 4)


BAD_REQUESTS = {
    "empty": (Request([], 4), "empty"),
    "nothing asked for": (Request(PROMPT, 0), "max_new_tokens=0"),
    "longer than the slots": (Request(PROMPT, 11), "20 positions"),
    "longer than the context": (Request(PROMPT * 6, 5), f"{POSITIONS} positions"),
    "no such token": (Request([1, VOCAB], 2), f"0..{VOCAB - 1}"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_running_ones_go_on(name):
    bad, message = BAD_REQUESTS[name]
    model = model_of()
    capacity = 100 if "context" in name else 20
    session = Session(Backbone(model, path_of(model)), Plan("sequential", B), 3, capacity)
    first, second = Request(PROMPT, 9), Request([5, 6], 7)
    session.add([first])
    session.step()
    with pytest.raises(ValueError, match=message):
        session.add([second, bad])
    assert session.active == [first] and not bad.output and not second.output
    session.add([])
    run(session, [second])
    truth = reference(model, [first.prompt, second.prompt], 9)
    assert first.output == truth[0] and second.output == truth[1][:7]


def test_a_bad_request_is_found_before_any_is_run():
    decoder = SelfSpecModel(model_of())
    requests = [Request(PROMPT, 4), Request([5, 6], 4), Request(PROMPT * 6, 5)]
    with pytest.raises(ValueError, match=f"{POSITIONS} positions"):
        list(decoder.run(requests, decoder.plan("ar"), slots=1))
    assert not any(r.output for r in requests)


def test_long_prompts_are_prefilled_in_chunks():
    model, prompts = model_of("Gemma3"), [(PROMPT * 4)[:37], PROMPT, (PROMPT * 3)[:24], [4]]
    body, truth = Backbone(model), reference(model, prompts, 3)
    for chunk in (1, 8, 36, 64):
        with mock.patch("selfspec.joining.CHUNK", chunk):
            requests = [Request(p, 3) for p in prompts]
            session = Session(body, Plan("ar", 1), 4, 40)
            run(session, requests)
        assert outputs(requests) == truth and not session.active


# ---- the model's limits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scaling", [None, dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)])
def test_context_up_to_exactly_the_models_maximum(mode, scaling):
    """Rows past the end are drafted, never emitted, and rescale no rotary embedding."""
    model = build(rope_parameters=scaling) if scaling else model_of()
    full = [(PROMPT * 7)[: POSITIONS - 8], [5, 8, 2]]
    requests = decoded(Backbone(model, path_of(model)), Plan(mode, B, 8), full, 8)
    assert outputs(requests) == reference(model, full, 8)


LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    factor=2.0,
    short_factor=[1.0] * 4,
    long_factor=[3.0] * 4,
    original_max_position_embeddings=POSITIONS // 2,
)


@pytest.mark.parametrize("family", ["Phi3", "Llama"])
def test_longrope_is_exact_up_to_its_switch_and_refuses_to_cross_it(family):
    """HF's rescales all positions, past keys included, at a length; a cache cannot follow."""
    extra = dict(original_max_position_embeddings=POSITIONS // 2) if family == "Phi3" else {}
    model = build(family, rope_parameters=LONGROPE, **extra)
    decoder = SelfSpecModel(model, path_of(model))
    prompt = (PROMPT * 3)[:22]
    out = decoder.generate(torch.tensor([prompt]), max_new_tokens=10)
    assert out[0, 22:].tolist() == reference(model, [prompt], 10)[0]
    with pytest.raises(ValueError, match=r"32 positions.*max_new_tokens=10"):
        decoder.generate(torch.tensor([prompt]), max_new_tokens=11)


def test_dynamic_scaling_refuses_to_grow():
    model = build(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0))
    with pytest.raises(ValueError, match=f"{POSITIONS} positions"):
        SelfSpecModel(model).generate(torch.tensor([PROMPT]), max_new_tokens=POSITIONS)


@torch.no_grad()
def test_a_longer_text_before_leaves_no_trace():
    """Rotary modules with state of their own: a run near the end does not change the next short one."""
    model = build(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0))
    decoder = SelfSpecModel(model, path_of(model))
    first = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=6)
    decoder.generate(torch.tensor([(PROMPT * 7)[: POSITIONS - 4]]), max_new_tokens=4)
    model(input_ids=torch.arange(POSITIONS + 20)[None] % VOCAB)  # the user crosses it on his own model
    assert torch.equal(decoder.generate(torch.tensor([PROMPT]), max_new_tokens=6), first)
