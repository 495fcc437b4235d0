"""Presence and frequency penalties, which transformers lacks, as one more of its logits processors."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class PresenceFrequencyPenalty(LogitsProcessor):
    """Subtract `presence` from every token that the answer holds, and `frequency` once for each time it does.

    OpenAI's formula (API reference, "frequency and presence penalties"); the prompt doesn't count.

    Args:
        presence: once per token.
        frequency: per occurrence.
        prompt: tokens of the text that are not the answer's.
    """

    def __init__(self, presence: float, frequency: float, prompt: int):
        self.presence, self.frequency, self.prompt = presence, frequency, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [N, t], scores: [N, V] -> [N, V]"""
        answer = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
