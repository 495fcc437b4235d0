"""`SelfSpecModel.generate` against transformers' own: padding, lengths, settings; and what it refuses."""

import pytest
import torch
from tiny import POSITIONS, PROMPT, RAGGED, VOCAB, build, model_of, path_of, reference
from transformers import GenerationConfig

from selfspec import SelfSpecModel

pytestmark = pytest.mark.usefixtures("chains")

MODES = ("ar", "sequential", "tree", "overlap", "overlap+tree")
ONE = torch.tensor([PROMPT])
PAD = 0


def speculative(model=None, **config):
    model = model or model_of()
    return SelfSpecModel(model, path_of(model, **config))


def own(model, ids, **kwargs):
    """transformers' greedy answer to a batch; the mask is spelt out."""
    with torch.no_grad():
        return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs})


def padded(side, width=12):
    """Ragged prompts as a tokenizer would hand them over."""
    ids, mask = torch.full((3, width), PAD), torch.zeros(3, width, dtype=torch.long)
    for i, prompt in enumerate(RAGGED):
        where = slice(width - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[i, where], mask[i, where] = torch.tensor(prompt), 1
    return ids, mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(side, mode):
    """Every row answers as its prompt does alone; the prompts come back as they were given."""
    ids, mask = padded(side)
    truth = reference(model_of(), RAGGED, 9)
    out = speculative().generate(ids, attention_mask=mask, max_new_tokens=9, mode=mode)
    assert torch.equal(out[:, :12], ids) and out[:, 12:].tolist() == truth


@pytest.mark.parametrize("mode", MODES)
def test_left_padded_batches_with_eos_look_like_transformers_own(mode):
    """Rows that end early are filled up with the pad token, and the width is that of the longest answer."""
    model = model_of()
    ids, mask = padded("left")
    answers = reference(model, RAGGED, 9)
    eos = [answers[0][3], answers[1][1], answers[2][5]]
    wanted = own(model, ids, attention_mask=mask, max_new_tokens=9, eos_token_id=eos, pad_token_id=PAD)
    got = speculative().generate(ids, attention_mask=mask, max_new_tokens=9, eos_token_id=eos, mode=mode)
    assert torch.equal(got, wanted)


def test_without_a_mask_padding_is_inferred_as_transformers_does():
    model = model_of()
    ids, mask = padded("left")
    assert not any(PAD in prompt for prompt in RAGGED)
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(speculative().generate(ids, max_new_tokens=6), wanted)
    assert torch.equal(wanted, own(model, ids, attention_mask=mask, max_new_tokens=6))


def test_a_pad_token_that_is_also_eos_counts_as_text():
    """Then transformers infers no mask."""
    model = build()
    model.generation_config.eos_token_id = PAD
    ids = torch.tensor([[PAD, *PROMPT]])
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(speculative(model).generate(ids, max_new_tokens=6), wanted)


def test_batches_of_one_and_input_ids_by_keyword():
    decoder, wanted = speculative(), own(model_of(), ONE, max_new_tokens=7)
    assert torch.equal(decoder.generate(ONE, max_new_tokens=7), wanted)
    assert torch.equal(decoder.generate(input_ids=ONE, max_new_tokens=7), wanted)
    assert torch.equal(decoder.generate(inputs=ONE, max_new_tokens=7, do_sample=False), wanted)
    assert torch.equal(SelfSpecModel(model_of()).generate(ONE, max_new_tokens=7), wanted)  # no adapter: plain


SETTINGS = {
    "twenty by default": {},
    "max_length": dict(max_length=17),
    "both lengths": dict(max_length=12, max_new_tokens=6),
    "eos": dict(max_new_tokens=12, eos_token_id=7),
    "eos list": dict(max_new_tokens=12, eos_token_id=[19, 7]),
    "no eos": dict(max_new_tokens=12, eos_token_id=None),
    "pad": dict(max_new_tokens=12, eos_token_id=[7], pad_token_id=5),
    "neutral values": dict(
        max_new_tokens=9,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_length=0,
        temperature=0.3,
        top_p=0.5,
        top_k=3,
        use_cache=True,
        num_return_sequences=1,
        return_dict_in_generate=False,
        output_scores=False,
        logits_processor=None,
        stopping_criteria=None,
        synced_gpus=None,
    ),
}


@pytest.mark.parametrize("given", ["keywords", "config"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("models_own", ["bare", "eos", "length"])
def test_settings_mean_what_they_mean_to_transformers(name, given, models_own):
    """The same precedence of keywords, a given configuration, and the model's own."""
    model, settings = build(), SETTINGS[name]
    answer = reference(model, [PROMPT], 12)[0]
    assert answer[3] == 7  # the EOS above
    fields = {"bare": {}, "eos": {"eos_token_id": [answer[5]]}, "length": {"max_length": 19}}[models_own]
    model.generation_config = GenerationConfig(pad_token_id=PAD, **fields)
    if given == "config":
        extra = {"logits_processor", "stopping_criteria", "synced_gpus"}
        settings = {"generation_config": GenerationConfig(**{k: v for k, v in settings.items() if k not in extra})}
    wanted = own(model, ONE, **{"do_sample": None, **settings} if given == "config" else settings)
    got = speculative(model).generate(ONE, **settings)
    assert torch.equal(got, wanted)


def test_nothing_new_is_asked_for():
    """An error in transformers, and so here."""
    for decoder in (model_of(), speculative()):
        with pytest.raises(ValueError, match="max_new_tokens"):
            decoder.generate(ONE, max_new_tokens=0)


def test_one_new_token_comes_from_the_prefill():
    decoder = speculative()
    assert torch.equal(decoder.generate(ONE, max_new_tokens=1), own(model_of(), ONE, max_new_tokens=1))
    assert decoder.stats.rounds == 0 and decoder.stats.tau == decoder.stats.tpf == 0


REFUSED = {
    "num_beams": 2,
    "guidance_scale": 1.5,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "token_healing": True,
    "prompt_lookup_num_tokens": 1,
    "assistant_early_exit": 1,
    "cache_implementation": "quantized",
    "dola_layers": "high",
    "penalty_alpha": 0.6,
    "constraints": [1],
    "force_words_ids": [[1]],
    "assistant_model": "a model",
    "custom_generate": lambda *a, **k: None,
    "synced_gpus": True,
    "negative_prompt_ids": ONE,
    "inputs_embeds": torch.zeros(1, 2, 32),
    "position_ids": ONE,
    "past_key_values": object(),
    "seed": 3,
    "verify": "block",
    "max_new_token": 3,  # a slip of the pen
    "no_such_thing": 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        speculative().generate(ONE, **{"max_new_tokens": 4, name: REFUSED[name]})


@pytest.mark.parametrize("name", ["num_beams", "guidance_scale", "token_healing"])
@pytest.mark.parametrize("given", ["config", "model"])
def test_a_configuration_object_is_read_as_strictly(name, given):
    model = build()
    config = GenerationConfig(max_new_tokens=4, pad_token_id=PAD, **{name: REFUSED[name]})
    arguments = {}
    if given == "model":
        model.generation_config = config
    else:
        arguments["generation_config"] = config
    with pytest.raises(ValueError, match=name):
        speculative(model).generate(ONE, **arguments)


def test_attributes_that_a_configuration_carries_for_its_owner_are_left_alone():
    """transformers tolerates them; those that would change the text are refused still."""
    config = GenerationConfig(max_new_tokens=4, pad_token_id=PAD, my_note="for me", penalty_alpha=None)
    assert torch.equal(speculative().generate(ONE, config), own(model_of(), ONE, max_new_tokens=4))
    with pytest.raises(ValueError, match="penalty_alpha"):
        speculative().generate(ONE, GenerationConfig(max_new_tokens=4, penalty_alpha=0.6))


def test_prompts_of_int32_answer_in_int32():
    got = speculative().generate(ONE.int(), max_new_tokens=4)
    assert got.dtype == torch.int32 and got.tolist() == own(model_of(), ONE, max_new_tokens=4).tolist()


def test_a_model_that_samples_by_default_can_be_asked_not_to():
    model = build()
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, pad_token_id=PAD)
    got = speculative(model).generate(ONE, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, own(model, ONE, max_new_tokens=6))
    assert model.generation_config.do_sample and model.generation_config.max_new_tokens is None


def test_return_dict_in_generate():
    out = speculative().generate(ONE, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(out.sequences, own(model_of(), ONE, max_new_tokens=6))


BAD_INPUTS = {
    "empty": (torch.zeros(1, 0, dtype=torch.long), None, "empty"),
    "no rows": (torch.zeros(0, 3, dtype=torch.long), None, "empty"),
    "flat": (torch.tensor(PROMPT), None, r"\[N, T\]"),
    "all padding": (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 0]]), "prompt 1 is empty"),
    "hole": (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]]), "holes"),
    "other shape": (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 1]]), "shape"),
    "past the vocabulary": (torch.tensor([[1, VOCAB]]), None, f"0..{VOCAB - 1}"),
    "negative": (torch.tensor([[1, -1]]), None, f"0..{VOCAB - 1}"),
    "a type too small for the answer": (torch.tensor([[1, 2]], dtype=torch.uint8), None, "uint8"),
    "another": (torch.tensor([[1, 2]], dtype=torch.int16), None, "int16"),
    "numbers that are no ids": (torch.tensor([[1.0, 2.0]]), None, "integer"),
    "longer than the context": (torch.ones(1, POSITIONS + 1, dtype=torch.long), None, f"{POSITIONS} positions"),
    "as long as the context": (torch.ones(1, POSITIONS, dtype=torch.long), None, f"{POSITIONS} positions"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_are_named(name):
    ids, mask, message = BAD_INPUTS[name]
    decoder = speculative()
    with pytest.raises(ValueError, match=message):
        decoder.generate(ids, attention_mask=mask, max_new_tokens=4)
    assert decoder.generate(ONE, max_new_tokens=1).shape == (1, 11)  # nothing is lost


def test_the_prompt_is_given_once():
    for arguments in ({}, {"inputs": ONE, "input_ids": ONE}):
        with pytest.raises(ValueError, match="once"):
            speculative().generate(**arguments)


def test_lengths_that_leave_nothing_are_refused():
    for arguments in ({"max_length": 10}, {"max_length": 4}, {"max_new_tokens": -1}):
        with pytest.raises(ValueError, match="max_"):
            speculative().generate(ONE, **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(mode="lookahead"), "lookahead"),
        (dict(mode="ar+tree"), "ar"),
        (dict(block_size=6), "block size 6"),
        (dict(block_size=0), "block_size=0"),
        (dict(mode="tree", tree_nodes=0), "tree_nodes=0"),
    ],
)
def test_modes_and_blocks_that_do_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        speculative().generate(ONE, max_new_tokens=4, **arguments)


def test_layouts_that_were_not_trained_are_refused():
    with pytest.raises(ValueError, match="hidden"):
        speculative(layouts=("known",)).generate(ONE, max_new_tokens=4, mode="overlap")
    with pytest.raises(ValueError, match="known"):
        speculative(layouts=("hidden",)).generate(ONE, max_new_tokens=4, mode="sequential")
    with pytest.raises(ValueError, match="adapter"):
        SelfSpecModel(model_of()).generate(ONE, max_new_tokens=4, mode="sequential")


def test_ties_go_to_the_first_index_as_in_transformers():
    """Two rows of the head are equal: every logit of theirs ties, to the last bit."""
    model = build()
    answer = reference(model, [PROMPT], 8)[0]
    twin = min(set(range(1, VOCAB)) - set(answer))
    with torch.no_grad():
        for token in set(answer):
            other = twin if token > twin else VOCAB - 1
            if token != other:
                model.lm_head.weight[other] = model.lm_head.weight[token]
                break
    wanted = own(model, ONE, max_new_tokens=10)
    for mode in MODES:
        assert torch.equal(speculative(model).generate(ONE, max_new_tokens=10, mode=mode), wanted)
    flat = build()
    with torch.no_grad():
        flat.lm_head.weight[:] = flat.lm_head.weight[:1]
    assert speculative(flat).generate(ONE, max_new_tokens=4)[0, 10:].tolist() == [0] * 4


@pytest.mark.parametrize("mode", MODES)
def test_float32_too(mode):
    model = build(dtype=torch.float32)
    ids, mask = padded("left")
    out = speculative(model).generate(ids, attention_mask=mask, max_new_tokens=9, mode=mode)
    assert out[:, 12:].tolist() == reference(model, RAGGED, 9)


def test_a_model_in_training_mode_answers_without_dropout():
    model = build(attention_dropout=0.5)
    wanted = own(model, ONE, max_new_tokens=8)
    model.train()
    decoder = speculative(model)
    assert torch.equal(decoder.generate(ONE, max_new_tokens=8), wanted)
    assert all(m.training for m in model.modules())


def test_answers_do_not_depend_on_earlier_calls():
    decoder = speculative()
    first = decoder.generate(ONE, max_new_tokens=8)
    decoder.generate(*padded("left")[:1], attention_mask=padded("left")[1], max_new_tokens=3, mode="tree")
    assert torch.equal(decoder.generate(ONE, max_new_tokens=8), first)
    assert len(decoder.request_stats) == 1


def test_stats_tell_time_and_acceptance_by_position():
    decoder = speculative()
    decoder.generate(ONE, max_new_tokens=12)
    stats = decoder.stats
    assert set(stats.seconds) == {"prefill", "draft", "verify", "rest"} and min(stats.seconds.values()) > 0
    rounds = list(stats.accepted.elements())
    for j, share in enumerate(stats.acceptance):
        assert share == sum(k > j + 1 for k in rounds) / sum(k > j for k in rounds)


@pytest.mark.parametrize("prompts", ["text", ["text"], [], [[]], [[3], []]])
def test_lists_of_prompts_that_cannot_be_decoded(prompts):
    with pytest.raises(ValueError, match=r"list of prompts|tokenizer|no prompts|empty"):
        speculative().generate(prompts, max_new_tokens=3)
