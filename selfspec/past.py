"""Keys and values of a finished text, kept to continue it: the next turn of a chat prefills what is new, no more."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from selfspec.cache import KVCache

# what transformers calls it in its output: `past_key_values` until 5.2x, `cache` since
FIELD = next(n for n in ("cache", "past_key_values") if n in GenerateDecoderOnlyOutput.__dataclass_fields__)


@dataclass(frozen=True, eq=False)
class PastText:
    """A text and its keys and values in every layer, a copy that no later decoding changes.

    Attributes:
        tokens: token ids that it holds.
        stores: per layer [Hkv, tokens, D], keys first and then values.
        owner: the input embeddings of the model whose they are.
    """

    tokens: list[int]
    stores: list[Tensor]
    owner: weakref.ref

    @classmethod
    def of(cls, cache: KVCache, slot: int, text: list[int], owner: Any) -> PastText:
        """Copy what a slot holds of a text; its last token's keys may be missing, as decoding left them."""
        n = min(cache.lengths[slot], len(text))
        stores = [full[slot, :, :n].clone() for full in cache.stores]
        return cls(text[:n], stores, weakref.ref(owner))

    def common(self, text: list[int]) -> int:
        """Tokens that need no prefill when `text` is to be continued: the common beginning, but never its last token,
        whose logits are wanted."""
        most = min(len(self.tokens), len(text) - 1)
        return next((i for i in range(most) if self.tokens[i] != text[i]), most)

    def load(self, cache: KVCache, slot: int, text: list[int]) -> int:
        """Put what is common with a new text into an empty slot. Returns how many positions that is."""
        n = self.common(text)
        for full, kept in zip(cache.stores, self.stores, strict=True):
            full[slot, :, :n] = kept[:, :n]
        cache.lengths[slot] = n
        return n


class Past(Sequence[PastText]):
    """What `generate` returns as `past_key_values`, and takes: one text an answer, in order.

    Args:
        texts: of the answers.
    """

    def __init__(self, texts: Sequence[PastText]):
        self.texts = list(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        """One text, or some of them as a `Past`."""
        return Past(self.texts[index]) if isinstance(index, slice) else self.texts[index]

    def get_seq_length(self) -> int:
        """Tokens of the longest text, as transformers' caches tell it."""
        return max((len(t.tokens) for t in self.texts), default=0)


def checked(past: Any, answers: int, model: Any) -> list[PastText | None]:
    """The text that each answer continues.

    Args:
        past: as given to `generate`; None for nothing.
        answers: how many are asked for.
        model: that answers.

    Raises:
        ValueError: it is not what `generate` returned, not of this model, or of another number of answers.
    """
    if past is None:
        return [None] * answers
    if not isinstance(past, Past):
        raise ValueError(
            f"past_key_values is a {type(past).__name__}: pass what generate(return_dict_in_generate=True) returned "
            "(a cache of transformers does not say which tokens it holds, so nothing could be checked)"
        )
    if len(past) != answers:
        raise ValueError(f"past_key_values holds {len(past)} texts for {answers} answers")
    for text in past:
        if text.owner() is not model.get_input_embeddings():
            raise ValueError("past_key_values comes from another model")
        if text.stores and text.stores[0].device.type != torch.device(model.device).type:
            raise ValueError("past_key_values lies on another device than the model now; drop it")
    return list(past)
