"""Conversations that go on from what the last turn left: the same text as from the beginning, without prefilling it."""

import pytest
import torch
from tiny import PROMPT, RAGGED, build, model_of, path_of
from transformers import DynamicCache

from selfspec import SelfSpecModel
from selfspec.past import FIELD, Past

pytestmark = pytest.mark.usefixtures("chains")

MODES = ("ar", "lookup", "sequential", "tree", "overlap", "overlap+tree")
KEEP = dict(return_dict_in_generate=True)
TURNS = ([5, 9], [12], [3, 3, 8], [1, 7])


def decoder(**config):
    model = build(dtype=torch.float32, **config)
    return SelfSpecModel(model, path_of(model, 0.2))


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("mode", MODES)
def test_a_chain_of_turns_is_what_fresh_runs_give(mode, family):
    """Windowed layers too. Turns end at the cap, inside a block as often as not, and at an EOS."""
    model = model_of(family, torch.float32)
    spec = SelfSpecModel(model, path_of(model, 0.2, taps=(1,) if mode == "tree" else ()))
    text, past, held = list(PROMPT), None, 0
    for turn, more in enumerate(TURNS):
        text += more
        arguments = dict(max_new_tokens=5 + turn, mode=mode, eos_token_id=[7] if turn == 2 else None)
        fresh = spec.generate([text], **arguments)
        got = spec.generate([text], past_key_values=past, **arguments, **KEEP)
        assert torch.equal(got.sequences, fresh)
        assert spec.stats.prompt_tokens == len(text) - held
        text, past = got.sequences[0].tolist(), got[FIELD]
        held = past.get_seq_length()
        assert past[0].tokens == text[:held] and len(text) - 1 <= held <= len(text)


def test_sampled_turns_and_batches():
    spec = decoder()
    arguments = dict(do_sample=True, seed=[4, 5, 6], max_new_tokens=6)
    first = spec.generate(RAGGED, mode="tree", **arguments, **KEEP)
    width = max(map(len, RAGGED))
    texts = [p + row + [2] for p, row in zip(RAGGED, first.sequences[:, width:].tolist(), strict=True)]
    wanted = spec.generate(texts, **arguments)
    for slots in (3, 1):
        got = spec.generate(texts, past_key_values=first[FIELD], slots=slots, **arguments)
        assert torch.equal(got, wanted) and spec.stats.prompt_tokens < 3 * 3


@pytest.mark.parametrize("cut", [0, 3, 9, 12, 15])
def test_another_text_uses_the_beginning_that_it_shares(cut):
    """Edited, shortened, the very same: what differs is read again, and the kept copy stays as it was."""
    spec = decoder()
    first = spec.generate([PROMPT], max_new_tokens=6, **KEEP)
    past, whole = first[FIELD], first.sequences[0].tolist()
    for text in ([*whole[:cut], 20, 11], whole[: cut + 1]):
        before = [t.clone() for t in past[0].stores]
        shared = past[0].common(text)
        got = spec.generate([text], max_new_tokens=6, past_key_values=past)
        assert spec.stats.prompt_tokens == len(text) - shared >= 1 and shared >= min(cut, len(text) - 1)
        assert torch.equal(got, spec.generate([text], max_new_tokens=6))
        assert all(torch.equal(a, b) for a, b in zip(past[0].stores, before, strict=True))


def test_stale_keys_would_change_the_text():
    """The kept keys are really read: others give other text."""
    spec = decoder()
    first = spec.generate([PROMPT], max_new_tokens=6, **KEEP)
    text = [*first.sequences[0].tolist(), 3]
    wanted = spec.generate([text], max_new_tokens=12, past_key_values=first[FIELD])
    for store in first[FIELD][0].stores:
        store.mul_(-1)
    assert not torch.equal(spec.generate([text], max_new_tokens=12, past_key_values=first[FIELD]), wanted)


def test_what_cannot_be_continued_is_refused():
    spec, other = decoder(), decoder()
    past = spec.generate([PROMPT], max_new_tokens=3, **KEEP)[FIELD]
    for model, texts, given, message in (
        (other, [PROMPT], past, "another model"),
        (spec, [PROMPT, PROMPT], past, "1 texts for 2"),
        (spec, [PROMPT], DynamicCache(config=spec.model.config), "DynamicCache"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(texts, max_new_tokens=3, past_key_values=given)


def test_nothing_is_copied_that_nobody_asked_for():
    spec = decoder()
    assert spec.generate([PROMPT], max_new_tokens=3, use_cache=False, **KEEP).get(FIELD) is None
    two = spec.generate([PROMPT], max_new_tokens=3, do_sample=True, num_return_sequences=2, seed=1, **KEEP)
    assert isinstance(two[FIELD], Past) and len(two[FIELD][:1]) == 1
    assert two[FIELD][1].tokens != [] and two[FIELD][0].owner() is spec.backbone.embeddings
