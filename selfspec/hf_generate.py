"""Speculation from within transformers: `model.generate(..., custom_generate=selfspec.custom_generate(adapter))`.

transformers reads the arguments, builds processors and criteria, and hands over. It hands a callable neither the
streamer nor the tokenizer (as of 5.24), so both are given to `custom_generate`. `stop_strings` and `seed` arrive
because the callable has parameters of these names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
)

from selfspec import settings
from selfspec.adapters import MaskPathModel, io
from selfspec.generation import Extras, copied, processors_of, prompts_of
from selfspec.model import SelfSpecModel
from selfspec.sampling import Pipeline


def custom_generate(
    adapter: str | Path | MaskPathModel | None = "auto",
    *,
    streamer: BaseStreamer | None = None,
    tokenizer: Any = None,
    seed: int | list[int] | None = None,
    verify: str | None = None,
    mode: str | None = None,
    block_size: int | None = None,
    tree_nodes: int | None = None,
    lengths: str | None = None,
) -> Callable[..., Any]:
    """A decoding method for transformers' `generate`, on an untouched model.

    Args:
        adapter: a folder, the name of a shipped adapter, "auto" for the shipped one that fits, a mask path in memory,
            or None for plain decoding.
        streamer: to be passed here, not to `generate`.
        tokenizer: likewise; needed by `stop_strings`.
        seed: unless `generate` gets one.
        verify: see `SelfSpecModel.generate`, as for the next four.
        mode: likewise.
        block_size: likewise.
        tree_nodes: likewise.
        lengths: likewise.

    Returns:
        A callable with the decoder of the last model that it ran on as `decoder`.
    """
    own_seed = seed

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: list[Any] | None = None,
        generation_config: GenerationConfig | None = None,
        stop_strings: str | list[str] | None = None,
        seed: int | list[int] | None = None,
        **kwargs: Any,
    ):
        decoder = decode.decoder  # type: ignore[attr-defined]
        if decoder is None or decoder.model is not model:
            decoder = decode.decoder = _decoder(model, adapter)  # type: ignore[attr-defined]
        assert generation_config is not None
        config = copy.deepcopy(generation_config)
        config.num_return_sequences = 1  # transformers has repeated the prompts
        settings.check(config)
        _refuse_a_past(kwargs)
        mask, width = kwargs.get("attention_mask"), input_ids.shape[1]
        prompts = prompts_of(input_ids, mask)
        cap = settings.new_tokens(config, width, None)
        given = LogitsProcessorList(logits_processor or [])
        copies = generation_config.num_return_sequences or 1
        extras = Extras(
            stopping_criteria=[c for c in stopping_criteria or () if not _known_to_requests(c, config)],
            tokenizer=tokenizer,
            seed=own_seed if seed is None else seed,
            pipelines=[Pipeline(p) for p in _per_prompt(model, given, config, prompts, input_ids, mask, cap, copies)],
        )
        config.max_time, config.stop_strings = None, stop_strings  # the former is among the criteria
        plan = decoder.policy(mode, block_size, tree_nodes, verify or "coupled", lengths)
        return decoder.answer(input_ids, mask, config, extras, plan, verify, streamer)

    decode.decoder = None  # type: ignore[attr-defined]
    return decode


def _decoder(model: PreTrainedModel, adapter: str | Path | MaskPathModel | None) -> SelfSpecModel:
    if isinstance(adapter, MaskPathModel):
        return SelfSpecModel(model, adapter)
    found = io.shipped_for(model) if adapter == "auto" else adapter
    return SelfSpecModel(model, None if found is None else io.load(found, model))


def _refuse_a_past(kwargs: dict[str, Any]) -> None:
    """The cache that transformers has made is empty; one with a text in it is the caller's."""
    for name in ("cache", "past_key_values"):
        past = kwargs.get(name)
        if past is not None and past.get_seq_length() > 0:
            raise ValueError(f"{name} holds a text already: {settings.REASONS['cache']}")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError(f"inputs_embeds: {settings.REASONS['inputs_embeds']}")


def _known_to_requests(criterion: Any, config: GenerationConfig) -> bool:
    """EOS and cap as the configuration says them; a caller's own may differ."""
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    return type(criterion) is EosTokenCriteria and set(criterion.eos_token_id.tolist()) == set(settings.eos_ids(config))


def _per_prompt(
    model: PreTrainedModel,
    given: LogitsProcessorList,
    config: GenerationConfig,
    prompts: list[list[int]],
    ids: Tensor,
    mask: Tensor | None,
    cap: int,
    copies: int,
) -> list[LogitsProcessorList]:
    """transformers built one list for the padded prompts; each needs its own, on its own text.

    Raises:
        ValueError: a processor that cannot be told from transformers' own, or not be copied.
    """
    width = ids.shape[1]
    if len(prompts) == 1 and len(prompts[0]) == width:
        return [given]
    batched = model._get_logits_processor(  # type: ignore[operator]
        generation_config=config,
        input_ids_seq_length=width,
        encoder_input_ids=ids[::copies],
        logits_processor=LogitsProcessorList(),
        device=ids.device,
        model_kwargs={"attention_mask": mask},
    )
    defaults = {type(p): p for p in batched}
    allowed = next((p for p in given if type(p) is PrefixConstrainedLogitsProcessor), None)
    custom = [p for p in given if p is not allowed and type(p) not in defaults]
    for p in given:
        if type(p) in defaults and not _same(vars(p), vars(defaults[type(p)])):
            raise ValueError(
                f"a {type(p).__name__} of your own, in a batch or beside padding, in place of generate()'s: "
                "pass its setting"
            )
    out = []
    for i, prompt in enumerate(prompts):
        fn = None
        if allowed is not None:
            fn = lambda _, text, row=i // copies: allowed._prefix_allowed_tokens_fn(row, text)  # noqa: E731
        out.append(processors_of(model, config, prompt, width, cap, copied(custom), fn))
    return out


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal attributes, tensors included."""

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            return isinstance(x, Tensor) and isinstance(y, Tensor) and torch.equal(x, y)
        return bool(x == y)

    return a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
