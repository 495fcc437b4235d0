"""Models of real sizes with random weights: what a forward costs depends on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

QWEN3: Any = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960)
SHAPES = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "qwen3-1.7b": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "qwen3-8b": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
        **QWEN3,
    ),
}


def random_model(name: str, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """A model of that shape, its weights drawn on the device.

    Args:
        name: a key of `SHAPES`, or a transformers configuration: a .json file or the folder that holds it.
        dtype: of the weights.
        device: where to put them.

    Raises:
        ValueError: nothing is known under that name.
    """
    try:
        config = SHAPES[name] if name in SHAPES else AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"shape {name!r} is none of {', '.join(SHAPES)}, and no configuration of transformers: {error}"
        ) from error
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
