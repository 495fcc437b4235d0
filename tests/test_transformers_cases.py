"""transformers' own generation tests, case by case, with selfspec in the place of its decoding methods.

Names are those of `tests/generation/` in transformers, 5.17 to 5.24. Cases that have a test elsewhere:

| case of transformers | here |
|---|---|
| test_greedy_generate, ..._dict_outputs, ..._use_cache | test_processors.py: test_one_prompt, test_scores_and_logits_of_emitted_tokens |
| test_sample_generate, ..._dict_output | test_sampling.py: test_speculation_changes_no_token, test_scores_of_sampled_tokens |
| test_assisted_decoding_matches_greedy_search, test_prompt_lookup_decoding_matches_greedy_search | test_decode.py: test_every_family_in_every_mode, test_lookup.py |
| test_speculative_sampling, ..._target_distribution | test_verifiers.py: test_chains_have_plain_decodings_law and after |
| test_prompt_lookup_decoding_stops_at_eos | test_faults.py: test_a_lookup_that_copies_an_eos_from_the_prompt_ends_there |
| test_left_padding_compatibility | test_generate.py: test_padded_batches |
| test_generate_continue_from_past_key_values | test_past.py |
| test_custom_stopping_criteria, test_stop_sequence_stopping_criteria, all of StopStringCriteria | test_stops.py |
| test_max_time_criteria | test_stops.py: test_max_time_ends_after_the_running_token |
| all of test_logits_process.py that a decoder-only text model can meet | test_nodes.py: each class on every node |
| test_watermarking | test_processors.py: "watermark" |
| test_async_iterator_streamer_matches_non_streaming | test_stops.py: test_an_async_iterator |

Cases that don't apply:

| case | why |
|---|---|
| beam, group beam, constrained beam and contrastive search, DoLa | refused with the reason (test_generate.py: REFUSED) |
| encoder-decoder, speech, vision, `inputs_embeds`, multi-modal inputs | decoder-only text models |
| assistant schedules, vocabulary translation, universal and early-exit assistants, DFlash and MTP generators | the model drafts for itself; such arguments are refused or say nothing |
| static, quantised and compiled caches, `logits_to_keep`, cache formats | generate() keeps a cache of its own |
| token healing, classifier-free guidance | refused with the reason |
| attentions and hidden states among the outputs | refused: those of rejected rows would be among them |
| continuous batching, paged attention, safety, FSDP and ZeRO generation | other machinery of transformers |
| stop-string embeddings and positions, validate_stopping_criteria | transformers' own classes are used as they are |
"""  # noqa: E501

from queue import Empty
from threading import Thread

import pytest
import torch
from test_stops import words
from tiny import PROMPT, RAGGED, build, model_of, path_of
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, TextIteratorStreamer, TextStreamer
from transformers.generation import ConfidenceCriteria, MaxLengthCriteria

from selfspec import SelfSpecModel

ONE = torch.tensor([PROMPT])
MODES = ("ar", "lookup", "sequential", "tree", "overlap", "overlap+tree")
pytestmark = [pytest.mark.usefixtures("chains"), pytest.mark.filterwarnings("ignore::UserWarning")]


def own(model, ids=ONE, **kwargs):
    with torch.no_grad():
        return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs})


def speculative(model=None, tokenizer=None):
    model = model or model_of()
    return SelfSpecModel(model, path_of(model, 0.2), tokenizer)


# ---- assisted decoding and the integration tests


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "lengths",
    [
        dict(max_new_tokens=10),
        dict(min_new_tokens=10, max_length=20),
        dict(min_new_tokens=10, max_new_tokens=20),
        dict(max_length=15),
        dict(min_length=18, max_length=20),
    ],
)
def test_generated_length_assisted_generation(lengths, mode):
    arguments = dict(eos_token_id=[7, 15], **lengths)
    assert torch.equal(speculative().generate(ONE, mode=mode, **arguments), own(model_of(), **arguments))


def test_default_assisted_generation():
    """A configuration's assistant settings say nothing without an assistant, as in transformers."""
    config = GenerationConfig(num_assistant_tokens=5, num_assistant_tokens_schedule="heuristic", pad_token_id=0)
    assert torch.equal(speculative().generate(ONE, config, max_new_tokens=5), own(model_of(), max_new_tokens=5))


def test_eos_token_id_int_and_list_greedy_search():
    answer = own(model_of(), max_new_tokens=12)[0, len(PROMPT) :].tolist()
    single, several = answer[4], [answer[4], 22]
    assert not {*several} & {*answer[:4]}
    one = speculative().generate(ONE, max_new_tokens=12, eos_token_id=single)
    assert torch.equal(one, speculative().generate(ONE, max_new_tokens=12, eos_token_id=several))
    assert torch.equal(one, speculative().generate(ONE, max_new_tokens=12, eos_token_id=torch.tensor([single])))


def test_max_new_tokens_decoder_only():
    """`max_new_tokens` goes before `max_length`, and counts new tokens only."""
    for arguments in (dict(max_new_tokens=3), dict(max_new_tokens=3, max_length=12), dict(max_length=13)):
        assert speculative().generate(ONE, **arguments).shape[1] == len(PROMPT) + 3


def test_default_max_length():
    assert speculative().generate(ONE).shape == own(model_of()).shape == (1, len(PROMPT) + 20)


def test_special_tokens_fall_back_to_model_default():
    model = build()
    answer = own(model, max_new_tokens=12)[0, len(PROMPT) :].tolist()
    model.generation_config.eos_token_id = answer[4]
    short = own(model, max_new_tokens=12)
    assert short.shape[1] < len(PROMPT) + 12
    assert torch.equal(speculative(model).generate(ONE, max_new_tokens=12), short)
    assert torch.equal(speculative(model).generate(ONE, GenerationConfig(max_new_tokens=12)), short)


def test_generated_config_is_left_alone():
    config = GenerationConfig(max_new_tokens=4, repetition_penalty=1.2, pad_token_id=0)
    before = config.to_dict()
    speculative().generate(ONE, config, top_k=3, do_sample=True, seed=1)
    assert config.to_dict() == before


def test_validate_generation_inputs():
    for slip in ("foo", "max_lenght", "do_samples"):
        with pytest.raises(ValueError, match=slip):
            speculative().generate(ONE, max_new_tokens=2, **{slip: 1})


# ---- logits processors


def test_custom_logits_processor():
    """One of the caller's beside one of the same setting: in its place, as in transformers."""

    class Shift(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.roll(1, -1)

    for extra in ({}, dict(min_length=13, eos_token_id=7)):
        arguments = dict(max_new_tokens=8, logits_processor=[Shift()], **extra)
        assert torch.equal(speculative().generate(ONE, **arguments), own(model_of(), **arguments))


@pytest.mark.parametrize("mode", ["ar", "sequential", "tree"])
def test_logits_processor_not_inplace(mode):
    """The logits that are returned are the model's, whatever a processor does to its argument."""

    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 5:] = -1.0
            return scores

    arguments = dict(max_new_tokens=6, return_dict_in_generate=True, output_logits=True, output_scores=True)
    out = speculative().generate(ONE, mode=mode, logits_processor=[InPlace()], **arguments)
    for raw, processed in zip(out.logits, out.scores, strict=True):
        assert (processed[:, 5:] == -1).all() and not (raw[:, 5:] == -1).any()
    out = speculative().generate(ONE, mode=mode, suppress_tokens=[3], **arguments)
    assert all(r[0, 3].isfinite() and s[0, 3].isinf() for r, s in zip(out.logits, out.scores, strict=True))


# ---- stopping criteria


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class AtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("mode", MODES)
def test_list_criteria(mode):
    """Any of them ends the answer."""
    for end in range(11, 16):
        criteria = [Never(), AtLength(end), MaxLengthCriteria(15)]
        got = speculative().generate(ONE, max_new_tokens=9, stopping_criteria=criteria, mode=mode)
        assert torch.equal(got, own(model_of(), max_new_tokens=end - 10))


def test_custom_stopping_criteria_in_a_batch():
    """Rows that have ended are padded while the others go on."""
    model = model_of()
    out = speculative(model).generate(RAGGED, max_new_tokens=9, stopping_criteria=[AtLength(12)])
    width = max(map(len, RAGGED))
    for row, prompt in zip(out[:, width:].tolist(), RAGGED, strict=True):
        n = min(9, 12 - len(prompt))
        alone = own(model, torch.tensor([prompt]), max_new_tokens=n)[0, len(prompt) :].tolist()
        assert row[:n] == alone and not any(row[n:])


def test_confidence_criteria():
    """Criteria that read the last token's scores get them, of every emitted token in turn."""
    arguments = dict(max_new_tokens=10, return_dict_in_generate=True, output_scores=True)
    for threshold in (0.05, 0.3, 0.6, 0.9):
        asked = ConfidenceCriteria(threshold)
        criterion = lambda ids, scores, c=asked, **k: torch.tensor([bool(c(ids, scores))])  # noqa: E731
        got = speculative().generate(ONE, stopping_criteria=[criterion], **arguments)
        wanted = own(model_of(), stopping_criteria=[criterion], **arguments)
        assert torch.equal(got.sequences, wanted.sequences) and len(got.scores) == len(wanted.scores)


# ---- streamers


@pytest.mark.parametrize("skip", [False, True])
def test_text_streamer_matches_non_streaming(skip, capsys):
    tokenizer = words()
    out = speculative().generate(ONE, max_new_tokens=10, streamer=TextStreamer(tokenizer, skip_prompt=skip))
    text = tokenizer.decode(out[0, len(PROMPT) if skip else 0 :])
    assert capsys.readouterr().out == text + "\n"


def test_text_streamer_decode_kwargs(capsys):
    tokenizer = words()
    tokenizer.add_special_tokens({"additional_special_tokens": ["d", "h"]})  # tokens 3 and 7, both in the prompt
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    out = speculative().generate(ONE, max_new_tokens=6, streamer=streamer)
    text = capsys.readouterr().out.strip()
    assert text == tokenizer.decode(out[0], skip_special_tokens=True) and not set(text) & {"d", "h"}


def test_iterator_streamer_matches_non_streaming():
    tokenizer, decoder = words(), speculative()
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    thread = Thread(target=decoder.generate, args=(ONE,), kwargs=dict(max_new_tokens=10, streamer=streamer))
    thread.start()
    assert "".join(streamer) == tokenizer.decode(own(model_of(), max_new_tokens=10)[0])
    thread.join()


def test_iterator_streamer_timeout():
    """The reader's timeout is the reader's; generation goes on to its end."""
    streamer, out = TextIteratorStreamer(words(), timeout=0.0001), []
    decoder, gate = speculative(), []

    def wait(ids, scores):
        while not gate:
            pass
        return scores

    arguments = dict(max_new_tokens=5, streamer=streamer, logits_processor=[wait])
    thread = Thread(target=lambda: out.append(decoder.generate(ONE, **arguments)))
    thread.start()
    with pytest.raises(Empty):
        for _ in range(9):
            next(iter(streamer))
    gate.append(1)
    thread.join(60)
    assert torch.equal(out[0], own(model_of(), max_new_tokens=5))
