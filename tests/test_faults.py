"""Faults that users of other speculative decoders reported, each named after what went wrong there."""

import pytest
import torch
from test_stops import After, oracle, words
from tiny import PROMPT, VOCAB, OraclePath, build, model_of, path_of, reference, run

from selfspec import SelfSpecModel
from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.request import Request
from selfspec.serving.params import Builder
from selfspec.session import Session

pytestmark = pytest.mark.usefixtures("chains")

ONE = torch.tensor([PROMPT])
N = 14


def own(model, ids, **kwargs):
    with torch.no_grad():
        return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs})


@pytest.mark.parametrize("gap", range(1, 6))
def test_a_lookup_that_copies_an_eos_from_the_prompt_ends_there(gap):
    """Prompt lookup drafted past an end that stood in the copied text."""
    model = model_of()
    cycle = [5, 9, 12, 3, 8, 17][: gap + 1]
    decoder = SelfSpecModel(model)
    follow = lambda i, text: [cycle[(cycle.index(int(text[-1])) + 1) % len(cycle)]]  # noqa: E731
    bias = {(a, b): 99.0 for a, b in zip(cycle, cycle[1:] + cycle[:1])}  # the same law, in batched form
    ids = torch.tensor([cycle * 3])
    eos = cycle[gap]
    for law in (dict(prefix_allowed_tokens_fn=follow), dict(sequence_bias=bias)):
        out = decoder.generate(ids, max_new_tokens=20, eos_token_id=eos, mode="lookup", block_size=12, **law)
        assert out[0].tolist() == cycle * 4
    assert decoder.stats.rounds <= 2  # drafts were right and long


@pytest.mark.parametrize("lazy", [False, True])
def test_a_cap_in_the_same_block_does_not_hide_an_earlier_stop(lazy, monkeypatch):
    """The length was checked first, and what stood between stop and cap leaked out."""
    model = model_of()
    decoder, answer = oracle(model, PROMPT, N, monkeypatch)
    seen = []
    monkeypatch.setattr(SelfSpecModel, "run", lambda self, requests, *a, real=SelfSpecModel.run: (
        seen.extend(requests), real(self, requests, *a))[1])  # fmt: skip
    extra = dict(logits_processor=[lambda ids, scores: scores]) if lazy else {}
    stop = words().decode(answer[3:5])
    for end in (dict(eos_token_id=answer[4]), dict(stop_strings=stop, tokenizer=words()),
                dict(stopping_criteria=[After(answer[4], len(PROMPT) + 4)])):  # fmt: skip
        out = decoder.generate(ONE, max_new_tokens=6, **end, **extra)
        assert out[0, len(PROMPT) :].tolist() == answer[: answer.index(answer[4], 3) + 1] or "eos_token_id" in end
        assert seen[-1].finish_reason == "stop" and len(seen[-1].output) <= 5


@pytest.mark.parametrize("right", [1, 4])
def test_scores_and_logits_end_with_the_stop_string(right, monkeypatch):
    """Token ids and log-probabilities went on past the stop."""
    model, tokenizer = model_of(), words()
    decoder, answer = oracle(model, PROMPT, N, monkeypatch, right)
    for i in range(1, 9):
        arguments = dict(
            max_new_tokens=N, stop_strings=[tokenizer.decode(answer[i : i + 3])], tokenizer=tokenizer,
            return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.0001,
        )  # fmt: skip
        got, wanted = decoder.generate(ONE, **arguments), own(model, ONE, **arguments)
        emitted = got.sequences.shape[1] - len(PROMPT)
        assert torch.equal(got.sequences, wanted.sequences)
        assert len(got.scores) == len(got.logits) == emitted == len(wanted.scores) == decoder.stats.tokens + 1


def test_the_eos_is_the_generation_configs_not_the_tokenizers():
    """A hard-coded end was another token than the model's."""
    model = build()
    answer = reference(model, [PROMPT], N)[0]
    model.config.eos_token_id, model.generation_config.eos_token_id = answer[1], [answer[4]]
    tokenizer = words()
    tokenizer.eos_token = tokenizer.decode([answer[2]])
    out = SelfSpecModel(model, path_of(model), tokenizer).generate(ONE, max_new_tokens=N)
    assert out[0, len(PROMPT) :].tolist() == answer[: answer.index(answer[4]) + 1]


@pytest.mark.parametrize("mode", ["lookup", "sequential", "overlap"])
def test_a_block_longer_than_the_answer_in_a_batch(mode):
    """Large blocks came back empty in batches."""
    model = model_of()
    decoder = SelfSpecModel(model, path_of(model, block_size=32))
    prompts = [PROMPT, [5, 8, 10], [13, 1]]
    out = decoder.generate(prompts, max_new_tokens=6, mode=mode, block_size=32)
    assert out[:, len(PROMPT) :].tolist() == reference(model, prompts, 6)


def test_acceptance_is_the_same_alone_and_among_sixteen():
    """It collapsed at sixteen sequences."""
    model = model_of()
    decoder = SelfSpecModel(model, path_of(model, 0.0, shift=True, causal=True))
    prompts = [[*PROMPT[i % 5 :], i] for i in range(16)]
    decoder.generate(prompts, max_new_tokens=N)
    together = [s.accepted for s in decoder.request_stats]
    for prompt, accepted in list(zip(prompts, together))[::5]:
        decoder.generate([prompt], max_new_tokens=N)
        assert decoder.stats.accepted == accepted
    assert max(max(a) for a in together) > 1


def test_one_draft_and_one_verify_forward_serve_a_whole_batch(monkeypatch):
    """Drafts were made request by request."""
    model = model_of()
    answer = reference(model, [PROMPT], N + 12)[0]
    path = OraclePath(model, {}, 4)
    session = Session(Backbone(model, path), Plan("sequential", 5), 6, 40)
    calls, real = [], Backbone.forward
    monkeypatch.setattr(Backbone, "forward", lambda self, layout, *a, **k: (
        calls.append(layout.n_requests), real(self, layout, *a, **k))[1])  # fmt: skip
    requests = [Request(PROMPT, N) for _ in range(6)]
    path.session, path.truth = session, dict.fromkeys(requests, answer)
    run(session, requests)
    rounds = requests[0].stats.rounds
    assert all(r.stats.rounds == rounds for r in requests) and calls == [6] * (1 + 2 * rounds)


@pytest.mark.parametrize("extra", [dict(repetition_penalty=1.0001), dict(min_new_tokens=3, eos_token_id=99 % VOCAB)])
def test_penalties_do_not_switch_speculation_off(extra, monkeypatch):
    """They fell back to plain decoding with no more than a line in the log."""
    model = model_of()
    decoder, _ = oracle(model, PROMPT, N, monkeypatch)
    decoder.generate(ONE, max_new_tokens=11, **extra)
    assert decoder.stats.rounds <= 3 and decoder.stats.drafts > 0


def test_a_models_own_generation_config_reaches_the_verifier():
    """Its penalties held for the draft model's steps, not for what was verified."""
    model = build()
    model.generation_config.repetition_penalty, model.generation_config.suppress_tokens = 1.5, [7]
    wanted = own(model, ONE, max_new_tokens=N)
    for mode in ("ar", "lookup", "sequential", "tree"):
        assert torch.equal(SelfSpecModel(model, path_of(model, 0.2)).generate(ONE, max_new_tokens=N, mode=mode), wanted)
    model.generation_config.repetition_penalty = None
    assert not torch.equal(own(model, ONE, max_new_tokens=N), wanted)


def test_processors_that_count_from_a_prompt_do_not_serve_another_one():
    """Rows of the same settings shared the first row's processors, and with them its prompt's length."""
    model = build(max_position_embeddings=128)
    model.generation_config.eos_token_id = [3, 7, 15]
    builder = Builder(SelfSpecModel(model), {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 6})
    first, second = (builder.request(p, {}, "row") for p in (PROMPT * 2, PROMPT[:3]))
    assert first.recipe is second.recipe  # they are chosen together
    for request in (first, second):
        ids = torch.tensor([request.prompt])
        wanted = own(model, ids, max_new_tokens=12, min_new_tokens=6)[0, len(request.prompt) :]
        run(Session(Backbone(model), Plan("ar", 1), 1, 64), [request])
        assert request.output == wanted.tolist() and len(request.output) >= 6
