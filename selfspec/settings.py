"""Reads transformers' generation settings: same precedence, and nothing that would be ignored is let through."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig

# fields that shape the scores of greedy and sampled decoding alike; transformers' own processors act on them
PROCESSORS = {
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "remove_invalid_values"),
    *("renormalize_logits", "watermarking_config"),
}
# fields that shape the distribution of sampled tokens; greedy decoding doesn't read them, in transformers neither
WARPERS = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
# fields that this release acts on; any other whose value says something raises
SUPPORTED = {
    *("max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *("return_dict_in_generate", "output_scores", "output_logits", "do_sample", "num_return_sequences"),
    *("max_time", "stop_strings"),
    *PROCESSORS,
    *WARPERS,
}
# values that say nothing; None and False never do
NEUTRAL = {"num_beams": 1, "guidance_scale": 1.0}
# fields that say nothing whatever their value, without beams and without an assistant
IDLE = {
    *("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    *("use_cache", "cache_config", "compile_config", "disable_compile"),
}
# why some settings and arguments are refused
REASONS = {
    "num_beams": "beam search follows many texts at once; speculation answers with one",
    "constraints": "it needs beam search",
    "force_words_ids": "it needs beam search",
    "penalty_alpha": "contrastive search ranks tokens by hidden states that the verifier does not compute",
    "dola_layers": "its logits are not the model's own",
    "guidance_scale": "it runs the model a second time for every token; pass a logits_processor to have that",
    "assistant_model": "the model drafts for itself",
    "assistant_tokenizer": "the model drafts for itself",
    "assistant_early_exit": "the model drafts for itself",
    "prompt_lookup_num_tokens": "the model drafts for itself",
    "custom_generate": "generate() is selfspec's own already",
    "cache": "generate() keeps its own cache",
    "output_attentions": "attention weights are never made",
    "output_hidden_states": "hidden states of rejected rows would be among them",
    "inputs_embeds": "drafts and processors need token ids",
}
DEFAULT_NEW_TOKENS = 20  # transformers' own, and so are these
DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0}


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
        if settings is fields:  # a configuration may carry attributes of its owner's, which mean nothing to generate()
            unknown = [k for k in unknown if k in REASONS]
        if unknown:
            reasons = [REASONS[k] for k in unknown if k in REASONS]
            said = f": {reasons[0]}" if reasons else ""
            raise ValueError(f"generate() takes no argument {', '.join(map(repr, unknown))}{said}")
    merged = GenerationConfig() if given is None else copy.deepcopy(given)
    merged.update(defaults_only=True, **{k: v for k, v in own.to_dict().items() if k in known})
    merged.update(defaults_only=True, **{k: v for k, v in DEFAULTS.items() if k in known})
    merged.update(**{k: v for k, v in overrides.items() if k in known})
    check(merged)
    return merged


def check(config: GenerationConfig) -> None:
    """Refuse what would be ignored.

    Raises:
        ValueError: names the settings.
    """
    known = {k for k in vars(GenerationConfig()) if not k.startswith("_")} - {"transformers_version"}
    odd = {k: v for k in sorted(known - SUPPORTED - IDLE) if _says_something(k, v := getattr(config, k, None))}
    if odd:
        reasons = [f" ({REASONS[k]})" if k in REASONS else "" for k in odd]
        named = ", ".join(f"{k}={v!r}{why}" for (k, v), why in zip(odd.items(), reasons))
        raise ValueError(f"not supported in this release: {named}")
    copies = config.num_return_sequences
    if copies is not None and (copies < 1 or (copies > 1 and not config.do_sample)):
        raise ValueError(f"num_return_sequences={copies}: greedy decoding has one answer; pass do_sample=True")


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
