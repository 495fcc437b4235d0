"""`custom_generate`: transformers' own `generate`, on an untouched model, gives its own text, drafted."""

import pytest
import torch
from test_processors import ARGUMENTS, MODES, Recorder, padded, trimmed
from test_stops import After, Watcher, words
from tiny import PROMPT, RAGGED, build, model_of, path_of
from transformers import DynamicCache, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, pipeline

import selfspec
from selfspec import SelfSpecModel
from selfspec.adapters import io

pytestmark = pytest.mark.usefixtures("chains")

ONE = torch.tensor([PROMPT])
N = 12


def own(model, ids=ONE, **kwargs):
    with torch.no_grad():
        return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_same_text_as_without_it(name):
    model, arguments = model_of(), ARGUMENTS[name]
    fast = selfspec.custom_generate(path_of(model), mode=MODES[list(ARGUMENTS).index(name) % 6])
    wanted = own(model, max_new_tokens=N, **arguments)
    assert torch.equal(own(model, max_new_tokens=N, custom_generate=fast, **arguments), wanted)
    assert fast.decoder.stats.tokens == wanted.shape[1] - len(PROMPT) - 1


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size 1", "a processor", "many", "bad words"])
def test_batches(name):
    """Each row answers as its prompt does alone."""
    model, arguments = model_of(), ARGUMENTS[name]
    ids, mask = padded(RAGGED)
    fast = selfspec.custom_generate(path_of(model))
    got = own(model, ids, attention_mask=mask, max_new_tokens=N, custom_generate=fast, **arguments)[:, 12:].tolist()
    for row, prompt in zip(got, RAGGED, strict=True):
        alone = own(model, torch.tensor([prompt]), max_new_tokens=N, **arguments)[0, len(prompt) :].tolist()
        assert trimmed(row, arguments.get("eos_token_id")) == alone
    allowed = own(
        model, ids, attention_mask=mask, max_new_tokens=2, custom_generate=fast,
        prefix_allowed_tokens_fn=lambda i, text: [i + 1],
    )  # fmt: skip
    assert allowed[:, 12:].tolist() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("name", ["repetition_penalty", "min_new_tokens", "exponential_decay", "forced_eos_token_id"])
def test_padding_of_a_single_prompt_is_no_text_to_its_processors(name):
    """They were transformers' own, made for the padded prompt, and skipped as many tokens of the true one."""
    model, arguments = model_of(), ARGUMENTS[name]
    ids = torch.tensor([[0, 0, 0, *PROMPT]])
    fast = selfspec.custom_generate(path_of(model))
    mask = (ids != 0).long()
    got = own(model, ids, attention_mask=mask, max_new_tokens=N, custom_generate=fast, **arguments)
    assert got[0, 3:].tolist() == own(model, max_new_tokens=N, **arguments)[0].tolist()


def test_sampling_with_a_seed_is_selfspecs_own():
    model = model_of()
    fast, decoder = selfspec.custom_generate(path_of(model), mode="tree"), SelfSpecModel(model)
    arguments = dict(do_sample=True, temperature=0.8, top_p=0.9, max_new_tokens=N)
    wanted = decoder.generate(ONE, seed=4, **arguments)
    assert torch.equal(own(model, custom_generate=fast, seed=4, **arguments), wanted)
    assert torch.equal(own(model, custom_generate=selfspec.custom_generate(None, seed=4), **arguments), wanted)
    several = own(model, custom_generate=fast, seed=[4, 9], num_return_sequences=2, **arguments)
    assert torch.equal(several[:1], wanted) and not torch.equal(several[1:], wanted)
    torch.manual_seed(0)
    first = own(model, custom_generate=fast, **arguments)
    torch.manual_seed(0)
    assert torch.equal(own(model, custom_generate=fast, **arguments), first)


def test_streamer_and_tokenizer_are_given_to_it():
    model, watcher, tokenizer = model_of(), Watcher(), words()
    fast = selfspec.custom_generate(path_of(model), streamer=watcher, tokenizer=tokenizer)
    whole = own(model, max_new_tokens=N)
    stop = tokenizer.decode(whole[0, len(PROMPT) + 4 : len(PROMPT) + 6])
    got = own(model, max_new_tokens=N, custom_generate=fast, stop_strings=[stop])
    assert torch.equal(got, own(model, max_new_tokens=N, stop_strings=[stop], tokenizer=tokenizer))
    assert watcher.shown == [*got[0].tolist(), "end"] and got.shape[1] < whole.shape[1]


def test_why_they_are(monkeypatch):
    """Pinned: transformers drops its own streamer and tokenizer before it calls a callable."""
    model, watcher, seen = model_of(), Watcher(), {}

    def spy(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.update(kwargs)
        return input_ids

    own(model, max_new_tokens=2, custom_generate=spy, streamer=watcher, tokenizer=words())
    assert "streamer" not in seen and "tokenizer" not in seen and "end" not in watcher.shown
    with pytest.raises(ValueError, match="tokenizer"):
        own(model, max_new_tokens=2, custom_generate=spy, stop_strings="a", tokenizer=words())


def test_criteria_outputs_and_eos():
    model = model_of()
    fast = selfspec.custom_generate(path_of(model))
    text = own(model, max_new_tokens=N)[0, len(PROMPT) :].tolist()
    for extra in (
        dict(stopping_criteria=[After(text[6], len(PROMPT) + 6)]),
        dict(eos_token_id=[text[5]]),
        dict(max_time=1e-9),
        dict(max_length=len(PROMPT) + 3, max_new_tokens=None),
        dict(min_length=len(PROMPT) + 9, eos_token_id=text[3]),
    ):
        arguments = {"max_new_tokens": N, **extra}
        assert torch.equal(own(model, custom_generate=fast, **arguments), own(model, **arguments)), extra
    arguments = dict(max_new_tokens=5, return_dict_in_generate=True, output_scores=True, output_logits=True)
    got, wanted = own(model, custom_generate=fast, **arguments), own(model, **arguments)
    assert torch.equal(got.sequences, wanted.sequences) and got.sequences.shape[1] == len(PROMPT) + 5
    for a, b in zip(got.scores + got.logits, wanted.scores + wanted.logits, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_processors_see_the_true_text_once():
    model, recorder = model_of(), Recorder()
    out = own(
        model, max_new_tokens=N, logits_processor=[recorder], custom_generate=selfspec.custom_generate(path_of(model))
    )
    assert [s[0].tolist() for s in recorder.seen] == [out[0, : len(PROMPT) + i].tolist() for i in range(N)]


REFUSED = {
    "output_hidden_states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "greedy": dict(seed=3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused(name):
    model = model_of()
    with pytest.raises(ValueError, match=name):
        own(model, max_new_tokens=3, custom_generate=selfspec.custom_generate(path_of(model)), **REFUSED[name])


def test_a_filled_cache_is_refused():
    model, past = model_of(), DynamicCache(config=model_of().config)
    with torch.no_grad():
        model(ONE[:, :4], past_key_values=past)
    with pytest.raises(ValueError, match="holds a text"):
        own(model, max_new_tokens=3, custom_generate=selfspec.custom_generate(path_of(model)), past_key_values=past)


def test_a_processor_that_replaces_a_setting_in_a_batch_is_refused():
    model = model_of()
    ids, mask = padded(RAGGED)
    mine = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    with pytest.raises(ValueError, match="RepetitionPenalty"):
        own(
            model, ids, attention_mask=mask, max_new_tokens=3, logits_processor=mine, repetition_penalty=1.2,
            custom_generate=selfspec.custom_generate(path_of(model)),
        )  # fmt: skip


def test_the_model_stays_as_it_was():
    model = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    names, forward = set(vars(model)), model.forward
    own(model, max_new_tokens=5, custom_generate=selfspec.custom_generate(path_of(model)))
    assert set(vars(model)) == names and model.forward == forward and not model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_adapters_by_folder_and_by_default(tmp_path):
    model = model_of()
    io.save(path_of(model), tmp_path, model)
    fast = selfspec.custom_generate(tmp_path)
    assert torch.equal(own(model, max_new_tokens=N, custom_generate=fast), own(model, max_new_tokens=N))
    assert fast.decoder.path is not None and fast.decoder.stats.drafts > 0
    plain = selfspec.custom_generate()  # no shipped adapter fits
    assert torch.equal(own(model, max_new_tokens=N, custom_generate=plain), own(model, max_new_tokens=N))
    other = build(seed=5)
    assert torch.equal(own(other, max_new_tokens=N, custom_generate=plain), own(other, max_new_tokens=N))


def test_the_text_generation_pipeline():
    model = build()
    model.generation_config.eos_token_id = None
    tokenizer = words()
    tokenizer.pad_token = "a"
    answer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    fast = selfspec.custom_generate(path_of(model))
    for extra in (dict(do_sample=False), dict(do_sample=False, repetition_penalty=1.3)):
        arguments = dict(max_new_tokens=8, **extra)
        wanted = answer("dhbjeelc", **arguments)
        assert answer("dhbjeelc", custom_generate=fast, **arguments) == wanted
    assert fast.decoder.stats.drafts > 0
    texts = ["dhbj", "fik", "nbbugt"]
    wanted = [answer(t, max_new_tokens=8, do_sample=False)[0] for t in texts]
    batch = answer(texts, batch_size=3, max_new_tokens=8, do_sample=False, custom_generate=fast)
    assert [b[0] for b in batch] == wanted
