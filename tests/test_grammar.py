"""Answers that follow a grammar: the text is valid, and the same with and without speculation."""

import json
import re

import pytest
import torch
from tiny import build, path_of
from transformers import PreTrainedTokenizerFast

from selfspec import SelfSpecModel, grammar

pytestmark = pytest.mark.usefixtures("chains")

pytest.importorskip("llguidance")
MODES = ("lookup", "sequential", "tree", "overlap+tree")
CHARACTERS = '{}[]":,Ġabcdefgnrtuls0123456789.-xy'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["red", "blue"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMATS = {
    "schema": {"type": "json_schema", "json_schema": SCHEMA},
    "OpenAI's nesting": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
    "regex": {"type": "regex", "regex": "(ab|ba){2,4}x[0-9]{3}"},
}


def letters():
    """A tokenizer of single characters; token 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *CHARACTERS])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def decoder():
    model = build(vocab_size=40, eos_token_id=0, max_position_embeddings=128)  # a few more than the tokenizer has
    model.generation_config.eos_token_id = 0
    return SelfSpecModel(model, path_of(model, 0.2), letters())


def valid(name, text):
    if name == "regex":
        return re.fullmatch(FORMATS[name]["regex"], text)
    found = json.loads(text)
    return set(found) == {"a", "b"} and 0 <= found["a"] <= 99 and found["b"] in ("red", "blue")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sample", [False, True])
def test_answers_follow_the_format_and_equal_plain_decodings(decoder, name, sample):
    """A batch too: each answer has a matcher of its own."""
    how = dict(do_sample=True, seed=[3, 4], temperature=1.5) if sample else dict(do_sample=False)
    prompts = ["a1b", "the red blue 99"]
    arguments = dict(max_new_tokens=110, response_format=FORMATS[name], **how)
    wanted = decoder.generate(prompts, mode="ar", **arguments)
    width = max(len(decoder.tokenizer(p).input_ids) for p in prompts)
    for row in wanted:
        assert valid(name, decoder.tokenizer.decode(row[width:], skip_special_tokens=True).strip())
    for mode in MODES:
        assert torch.equal(decoder.generate(prompts, mode=mode, **arguments), wanted)


def test_a_json_object_parses(decoder):
    ban = dict(max_new_tokens=90, do_sample=True, top_k=0, sequence_bias={(2,): 4.0, (0,): 9.0})  # it comes to its end
    for seed in range(3):
        out = decoder.generate(["a"], response_format={"type": "json_object"}, seed=seed, **ban)
        assert isinstance(json.loads(decoder.tokenizer.decode(out[0, 1:], skip_special_tokens=True)), dict)


def test_grammars_of_other_libraries_are_asked_on_the_true_text_once_a_token(decoder):
    """A processor as xgrammar's and outlines' are: one matcher, moved on by the last token of the text."""

    class Alternating:
        def __init__(self):
            self.state, self.calls = 0, []

        def __call__(self, input_ids, scores):
            self.calls.append(input_ids.shape[1])
            if len(self.calls) > 1:
                assert int(input_ids[0, -1]) % 2 == self.state % 2  # nothing that was only drafted
                self.state += 1
            allowed = torch.arange(scores.shape[-1]) % 2 == self.state % 2
            return scores.masked_fill(~allowed, float("-inf"))

    ids, wanted = torch.tensor([[5, 6, 7]]), None
    for mode in ("ar", *MODES):
        processor = Alternating()
        out = decoder.generate(ids, max_new_tokens=12, eos_token_id=None, logits_processor=[processor], mode=mode)
        wanted = out if wanted is None else wanted
        assert torch.equal(out, wanted) and processor.calls == list(range(3, 15))


REFUSED = {
    "no such type": ({"type": "xml"}, "expected"),
    "a broken regex": ({"type": "regex", "regex": "a("}, "regex"),
    "a broken schema": ({"type": "json_schema", "json_schema": {"type": "nothing"}}, "response_format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_cannot_be_followed_are_refused(decoder, name):
    asked, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        decoder.generate(["a"], max_new_tokens=4, response_format=asked)


def test_a_format_needs_a_tokenizer_and_an_end(decoder):
    model = SelfSpecModel(decoder.model)
    for extra in ({}, dict(tokenizer=letters(), eos_token_id=None)):
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(torch.tensor([[5]]), max_new_tokens=4, response_format=FORMATS["regex"], **extra)
    assert grammar.processors({"type": "text"}, None, []) == []
