"""Answers that follow a grammar: `response_format` through llguidance, as one more logits processor.

A processor of this kind has memory. It works under speculation because it is asked once per emitted token, on the true
text, as in plain decoding: those of xgrammar or outlines do in the same way when passed as `logits_processor`.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor

KINDS = '{"type": "json_schema", "json_schema": ...}, {"type": "json_object"}, {"type": "regex", "regex": ...}'
SPACES = {"whitespace_pattern": r"[\x20\x0A\x09]{0,8}"}  # some between two parts of JSON, but no endless blank


class Grammar(LogitsProcessor):
    """Bans every token that the grammar does not allow next; what ends the answer is allowed where it may end.

    Args:
        matcher: llguidance's, at the beginning of an answer. It belongs to one answer.
        eos: tokens that end an answer.
    """

    def __init__(self, matcher: Any, eos: list[int]):
        self.matcher, self.eos = matcher, eos
        self.seen: int | None = None  # tokens of the text that the matcher knows, the prompt's among them

    def __deepcopy__(self, memo: Any) -> Grammar:
        out = Grammar(self.matcher.deep_copy(), self.eos)
        out.seen = self.seen
        return out

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [1, t], one token more at every call; scores: [1, V]"""
        new = [] if self.seen is None else input_ids[0, self.seen :].tolist()
        self.seen = input_ids.shape[1]
        if new and not self.matcher.is_stopped():
            self.matcher.consume_tokens(new)
        if self.matcher.is_error():
            raise ValueError(f"response_format: {self.matcher.get_error()}")
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        if self.matcher.is_stopped():
            allowed[self.eos] = True
        else:
            known = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
            allowed[: len(known)] = known[: len(allowed)] > 0  # a vocabulary may be padded
        return scores.masked_fill(~allowed.to(scores.device), -math.inf)


def processors(response_format: dict[str, Any] | None, tokenizer: Any, eos: list[int]) -> list[Grammar]:
    """The processor of one answer; none without a format.

    Args:
        response_format: OpenAI's (API reference, "structured outputs"), and "regex".
        tokenizer: a fast one.
        eos: tokens that end an answer.

    Raises:
        ValueError: the format is not one of those, or not well formed, or something is missing to follow it.
        ModuleNotFoundError: llguidance is not installed.
    """
    if response_format is None or response_format == {"type": "text"}:
        return []
    if tokenizer is None or not eos:
        raise ValueError("response_format needs a tokenizer, and an eos_token_id to end the answer with")
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as cause:
        raise ModuleNotFoundError("response_format needs llguidance: pip install selfspec[grammar]") from cause
    matcher = LLMatcher(_words(tokenizer, tuple(eos)), _grammar(LLMatcher, response_format))
    if matcher.is_error():
        raise ValueError(f"response_format: {matcher.get_error().splitlines()[0]}")
    return [Grammar(matcher, eos)]


def _grammar(matcher: Any, asked: dict[str, Any]) -> str:
    """llguidance's form of a format."""
    match asked:
        case {"type": "json_object"}:
            return matcher.grammar_from_json_schema({"type": "object"}, defaults=SPACES)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return matcher.grammar_from_json_schema(schema, defaults=SPACES)
        case {"type": "json_schema", "json_schema": dict(schema)}:
            return matcher.grammar_from_json_schema(schema, defaults=SPACES)
        case {"type": "regex", "regex": str(pattern)}:
            return matcher.grammar_from_regex(pattern)
    raise ValueError(f"response_format={asked!r}: expected {KINDS}")


_WORDS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()  # it takes a second to make


def _words(tokenizer: Any, eos: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer."""
    from llguidance.hf import from_tokenizer

    made = _WORDS.setdefault(tokenizer, {})
    if eos not in made:
        made[eos] = from_tokenizer(tokenizer, eos_token=list(eos))
    return made[eos]
