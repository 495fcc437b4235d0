"""What Hugging Face `generate` answers, how two answers differ, and what float64 says about the place where they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Rescore = Callable[[Tensor, Tensor], Tensor]
TIE = 1e-4  # float32 noise of logits: below this gap either token is a right answer


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end an answer, by the model's own generation settings."""
    config = model.generation_config
    ids = None if config is None else config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def left_padded(prompts: list[list[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    """Prompts as one batch, padded on the left as decoder-only generation needs it.

    Returns:
        `input_ids` and `attention_mask`, each [N, longest].
    """
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def answers(model: Any, hf: PreTrainedModel, prompts: list[list[int]], cap: int, **options: Any) -> list[list[int]]:
    """Answers, greedy if not said otherwise, through a `generate` method of transformers' signature.

    Args:
        model: whose `generate` is called: a transformers model or a `SelfSpecModel`.
        hf: the transformers model, for its special tokens and device.
        prompts: token ids; more than one are left-padded.
        cap: new tokens at most.
        **options: for `generate`.

    Returns:
        New tokens of each answer, the EOS included, padding not.
    """
    eos = eos_ids(hf)
    pad = min(eos, default=0)
    inputs = left_padded(prompts, pad, hf.device)
    with torch.no_grad():
        out = model.generate(**inputs, **{"do_sample": False, **options}, max_new_tokens=cap, pad_token_id=pad)
    return [until_eos(row, eos) for row in out[:, inputs["input_ids"].shape[1] :].tolist()]


def until_eos(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """Tokens up to the first EOS, which is kept."""
    end = next((i for i, t in enumerate(tokens) if t in eos), len(tokens))
    return tokens[: end + 1]


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token in which two answers differ, also where one of them has ended; None if none does."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Finding:
    """Where an answer leaves the reference, and what float64 says there.

    Attributes:
        position: index among the new tokens.
        expected: the reference's token, None where it had ended.
        found: the other answer's token, None where it had ended.
        top: the two best tokens of float64 after the common prefix.
        gap: between their scores.
        tie: float64 cannot tell them apart either, at float32's precision.
    """

    position: int
    expected: int | None
    found: int | None
    top: tuple[int, int]
    gap: float
    tie: bool


class Judge:
    """Compares answers; a float64 copy of the model is made when the first difference needs it, and kept.

    Args:
        model: the reference model; it is not changed.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._exact: PreTrainedModel | None = model if model.dtype == torch.float64 else None

    def compare(
        self, prompt: list[int], expected: list[int], found: list[int], rescore: Rescore | None = None
    ) -> Finding | None:
        """None when the answers are the same.

        Args:
            prompt: token ids.
            expected: the reference's new tokens.
            found: the other answer's.
            rescore: what tokens were chosen by, from the text so far [1, t] and float64 logits [1, V]; None is greedy
                decoding on bare logits.
        """
        at = first_difference(expected, found)
        if at is None:
            return None
        top, gap = self.top_two(prompt + expected[:at], rescore)
        a = expected[at] if at < len(expected) else None
        b = found[at] if at < len(found) else None
        # only float32's rounding is small enough for a gap of TIE to prove anything
        tie = self.model.dtype == torch.float32 and {a, b} == set(top) and gap < TIE
        return Finding(at, a, b, top, gap, tie)

    @torch.no_grad()
    def top_two(self, prefix: list[int], rescore: Rescore | None = None) -> tuple[tuple[int, int], float]:
        """The two best next tokens in float64, and the gap between their scores. One forward."""
        if self._exact is None:
            self._exact = copy.deepcopy(self.model).double().eval()
        ids = torch.tensor([prefix], device=self.model.device)
        logits = self._exact(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        scores = logits if rescore is None else rescore(ids, logits)
        values, tokens = scores[0].topk(2)
        return (int(tokens[0]), int(tokens[1])), float(values[0] - values[1])
