"""The prompts that `generate` is called with, in whichever form, as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.reference import left_padded

Prompts = Sequence[str | Sequence[int]]


def batch(
    inputs: Tensor | Prompts | None,
    input_ids: Tensor | Prompts | None,
    pad: int,
    vocab_size: int,
    device: torch.device,
    tokenizer: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """The prompts as one tensor.

    Args:
        inputs: the prompts under transformers' first name for them: token ids [N, T], or a list of texts and lists.
        input_ids: the same under the second.
        pad: stands left of what is shorter.
        vocab_size: V.
        device: of the result.
        tokenizer: for texts.

    Returns:
        [N, T] long or int32, and the mask of prompts that came as a list.

    Raises:
        ValueError: no prompt, two, or what is none; the message says which.
    """
    if (inputs is None) == (input_ids is None):
        raise ValueError("pass the prompt once, as inputs or as input_ids")
    ids = inputs if inputs is not None else input_ids
    assert ids is not None
    mask = None
    if not isinstance(ids, Tensor):
        ids, mask = left_padded(encoded(ids, tokenizer), pad, device).values()
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"the prompt is empty or not [N, T]: got shape {tuple(ids.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):  # the answer has the prompt's type, and must fit into it
        raise ValueError(f"token ids must be int64 or int32 integers, got {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"token ids must lie in 0..{vocab_size - 1}")
    return ids.to(device), mask


def encoded(prompts: Prompts, tokenizer: Any = None) -> list[list[int]]:
    """Token lists of a list of prompts.

    Raises:
        ValueError: texts without a tokenizer, or an empty prompt.
    """
    if isinstance(prompts, str):
        raise ValueError("pass a list of prompts, not a single string")
    if any(isinstance(p, str) for p in prompts) and tokenizer is None:
        raise ValueError("prompts are strings, and this model was made without a tokenizer")
    out = [tokenizer(p)["input_ids"] if isinstance(p, str) else list(p) for p in prompts]
    if not out or not all(out):
        raise ValueError("the prompt is empty" if out else "no prompts were given")
    return out
