"""Reads transformers' generation settings: same precedence, and nothing that would be ignored is let through."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig

# fields that this release acts on; any other whose value says something raises
SUPPORTED = {
    *("max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    "return_dict_in_generate",
}
# values that say nothing; None and False never do
NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
}
# fields that say nothing whatever their value, in greedy decoding without beams and without an assistant
IDLE = {
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    *("use_cache", "cache_config", "compile_config", "disable_compile"),
}
DEFAULT_NEW_TOKENS = 20  # transformers' own


def merge(own: GenerationConfig, given: GenerationConfig | None, overrides: dict[str, Any]) -> GenerationConfig:
    """Keyword arguments over a given configuration over the model's own, as in transformers.

    Args:
        own: the model's; what it holds beside transformers' own fields is left out.
        given: the caller's, whose unset fields are filled from the model's; left as it is.
        overrides: keyword arguments; None unsets a field.

    Raises:
        ValueError: for a setting that this release would ignore.
    """
    known = {k for k in vars(GenerationConfig()) if not k.startswith("_")} - {"transformers_version"}
    fields = {} if given is None else {k: v for k, v in vars(given).items() if not k.startswith("_")}
    for settings in (fields, overrides):
        unknown = sorted(k for k, v in settings.items() if k not in known | {"transformers_version"} and v is not None)
        if unknown:
            raise ValueError(f"generate() takes no argument {', '.join(map(repr, unknown))}")
    merged = GenerationConfig() if given is None else copy.deepcopy(given)
    merged.update(defaults_only=True, **{k: v for k, v in own.to_dict().items() if k in known})
    merged.update(**{k: v for k, v in overrides.items() if k in known})
    if merged.do_sample:
        raise ValueError("do_sample=True: this release decodes greedily; pass do_sample=False")
    odd = [f"{k}={v!r}" for k in sorted(known - SUPPORTED - IDLE) if _says_something(k, v := getattr(merged, k, None))]
    if odd:
        raise ValueError(f"not supported in this release: {', '.join(odd)}")
    return merged


def _says_something(name: str, value: Any) -> bool:
    if name == "cache_implementation":
        return value == "quantized"  # the others hold the same numbers
    return value is not None and value is not False and not (name in NEUTRAL and value == NEUTRAL[name])


def new_tokens(config: GenerationConfig, width: int, limit: int | None) -> int:
    """Tokens that may be emitted, in transformers' order of precedence.

    Args:
        config: merged.
        width: tokens of the padded prompts.
        limit: the model's positions.

    Raises:
        ValueError: nothing is left.
    """
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is None:
        end = width + DEFAULT_NEW_TOKENS
        end = end if limit is None else min(end, limit)
    else:
        end = config.max_length
    if end <= width:
        raise ValueError(f"the prompt has {width} tokens, max_length allows {end}: nothing is left")
    return end - width


def eos_ids(config: GenerationConfig) -> list[int]:
    """Token ids that end an answer, in the order given."""
    ids = config.eos_token_id
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def pad_id(config: GenerationConfig) -> int | None:
    """The pad token, or the first EOS where there is none, as in transformers."""
    return config.pad_token_id if config.pad_token_id is not None else next(iter(eos_ids(config)), None)
