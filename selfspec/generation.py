"""Turns generation settings into requests, and finished requests into what transformers' `generate` returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList

from selfspec import grammar, settings
from selfspec.past import FIELD, Past, checked
from selfspec.penalties import PresenceFrequencyPenalty
from selfspec.request import Request
from selfspec.sampling import Pipeline, Sampling, seeds_of


@dataclass(frozen=True)
class Extras:
    """What `generate` takes beside the configuration.

    Attributes:
        logits_processor: transformers' processors or functions of (input_ids, scores); with several answers each gets
            copies of its own. A list of lists has one list a prompt.
        stopping_criteria: of transformers; asked about one answer at a time, shared by all.
        prefix_allowed_tokens_fn: (prompt's index, [t] long) -> allowed token ids.
        tokenizer: for `stop_strings`.
        seed: see `selfspec.sampling.seeds_of`.
        presence_penalty: see `selfspec.penalties`, as for the next.
        frequency_penalty: likewise.
        past_key_values: see `selfspec.past`.
        response_format: see `selfspec.grammar`.
        pipelines: ready-made, one an answer; then nothing is built from configuration and processors.
    """

    logits_processor: Sequence[Any] | None = None
    stopping_criteria: Sequence[Any] | None = None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None
    tokenizer: Any = None
    seed: int | list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    past_key_values: Past | None = None
    response_format: dict[str, Any] | None = None
    pipelines: Sequence[Pipeline] | None = None


def build_requests(
    model: PreTrainedModel, config: GenerationConfig, prompts: list[list[int]], width: int, cap: int, extras: Extras
) -> list[Request]:
    """One request an answer, prompt by prompt.

    Every request has processors of its own, on its own text without padding.

    Args:
        model: builds transformers' processors and criteria.
        config: merged.
        prompts: token ids without padding.
        width: tokens of the padded prompts, which lengths in the configuration count from.
        cap: new tokens.
        extras: see there.

    Raises:
        ValueError: an extra that cannot serve all prompts.
    """
    copies = config.num_return_sequences or 1
    eos = frozenset(settings.eos_ids(config))
    words = extras.tokenizer, settings.eos_ids(config)
    sample = bool(config.do_sample)
    if not sample and extras.seed is not None:
        raise ValueError("seed: greedy decoding draws nothing; pass do_sample=True")
    seeds = seeds_of(extras.seed, len(prompts), copies) if sample else [0] * len(prompts)
    keep = [bool(config.return_dict_in_generate and x) for x in (config.output_scores, config.output_logits)]
    criteria = _criteria(model, config, extras)
    custom = _per_answer(extras.logits_processor, len(prompts), copies)
    past = checked(extras.past_key_values, len(prompts) * copies, model)
    out = []
    for i, seed in enumerate(seeds):
        prompt = prompts[i // copies]
        if extras.pipelines is not None:
            pipeline = extras.pipelines[i]
        else:
            allowed = _for_prompt(extras.prefix_allowed_tokens_fn, i // copies)
            given = [*penalties_of(extras, prompt), *custom[i], *grammar.processors(extras.response_format, *words)]
            pipeline = Pipeline(processors_of(model, config, prompt, width, cap, given, allowed))
        request = Request(prompt, cap, eos, criteria=criteria, past=past[i], keep_past=keeps_past(config))
        if sample or pipeline.processors or any(keep):
            request.sampling = Sampling(pipeline, sample, seed, *keep)
        out.append(request)
    return out


def processors_of(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt: list[int],
    width: int,
    cap: int,
    custom: Sequence[Any] = (),
    prefix_allowed_tokens_fn: Callable | None = None,
) -> LogitsProcessorList:
    """transformers' own processors and warpers for one answer, in its own order. See `build_requests`."""
    own, n = copy.deepcopy(config), len(prompt)
    own.max_length, own.num_return_sequences, own.num_beams = n + cap, 1, 1
    if own.min_new_tokens is not None:
        own.min_length = own.min_new_tokens + n
    elif own.min_length:
        own.min_length += n - width  # transformers counts the padding
    if width > 1:
        own.forced_bos_token_id = None  # it comes after a text of one token
    ids = torch.tensor([prompt], device=model.device)
    model._prepare_special_tokens(own, True, device=model.device, batch_size=1)  # type: ignore[operator]
    return model._get_logits_processor(  # type: ignore[operator]
        generation_config=own,
        input_ids_seq_length=n,
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        logits_processor=LogitsProcessorList(custom),
        device=model.device,
        model_kwargs={},
    )


def penalties_of(extras: Extras, prompt: list[int]) -> list[Any]:
    """The penalties that transformers lacks."""
    presence, frequency = extras.presence_penalty or 0.0, extras.frequency_penalty or 0.0
    return [PresenceFrequencyPenalty(presence, frequency, len(prompt))] if presence or frequency else []


def _criteria(model: PreTrainedModel, config: GenerationConfig, extras: Extras) -> StoppingCriteriaList | None:
    """What may end an answer beside EOS and cap, which requests know themselves."""
    own = copy.deepcopy(config)
    own.max_length, own._eos_token_tensor = None, None
    found = model._get_stopping_criteria(  # type: ignore[operator]
        generation_config=own,
        stopping_criteria=StoppingCriteriaList(extras.stopping_criteria or ()),
        tokenizer=extras.tokenizer,
    )
    return found or None


def _per_answer(given: Sequence[Any] | None, prompts: int, copies: int) -> list[Sequence[Any]]:
    """Processors of every answer; those with memory may not meet two texts."""
    given = () if given is None else given
    n = prompts * copies
    if given and all(isinstance(g, list | tuple) for g in given):
        if len(given) != prompts:
            raise ValueError(f"logits_processor has {len(given)} lists for {prompts} prompts")
        lists = [g for g in given for _ in range(copies)]
        return lists if copies == 1 else [copied(g) for g in lists]
    if n == 1 or not given:
        return [given] * n  # the caller's own objects: he may look into them afterwards
    return [copied(given) for _ in range(n)]


def copied(processors: Sequence[Any]) -> list[Any]:
    """Processors for one more answer.

    Raises:
        ValueError: they cannot be copied.
    """
    try:
        return copy.deepcopy(list(processors))
    except Exception as cause:
        raise ValueError(
            f"logits_processor: each answer needs processors of its own, and these cannot be copied ({cause}); "
            "pass a list of lists, one a prompt"
        ) from cause


def _for_prompt(allowed: Callable | None, index: int) -> Callable | None:
    """The caller's function for one prompt of the batch: its processor sees a batch of one."""
    return None if allowed is None else lambda _, text: allowed(index, text)


def keeps_past(config: GenerationConfig) -> bool:
    """Whether the output has the texts' keys and values, as in transformers."""
    return bool(config.return_dict_in_generate) and config.use_cache is not False


def prompts_of(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Token lists without their padding."""
    if mask is None:
        return ids.tolist()
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, the prompt {tuple(ids.shape)}")
    out = []
    for i, (row, keep) in enumerate(zip(ids.tolist(), mask.bool().tolist())):
        kept = [t for t, k in zip(row, keep) if k]
        if not kept:
            raise ValueError(f"prompt {i} is empty: its attention_mask is all zeros")
        first = keep.index(True)
        if not all(keep[first : first + len(kept)]):
            raise ValueError(
                f"prompt {i}: the attention_mask has holes between tokens (without a mask, every pad token counts as "
                "padding; pass attention_mask if it stands in the text)"
            )
        out.append(kept)
    return out


def output_of(
    ids: Tensor, requests: list[Request], config: GenerationConfig, copies: int = 1
) -> Tensor | GenerateDecoderOnlyOutput:
    """Prompts as given and their answers, padded on the right.

    Scores and logits are kept of emitted tokens; after an answer's end they are zeros.

    Args:
        ids: [N, T] long.
        requests: finished, `copies` a prompt.
        config: merged.
        copies: answers a prompt.
    """
    pad = settings.pad_id(config) or 0
    longest = max(len(r.output) for r in requests)
    rows = [r.output + [pad] * (longest - len(r.output)) for r in requests]
    answers = torch.tensor(rows, dtype=ids.dtype, device=ids.device).reshape(len(rows), longest)
    sequences = torch.cat([ids.repeat_interleave(copies, 0), answers], 1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=_by_step([r.scores for r in requests], longest) if config.output_scores else None,  # type: ignore[arg-type]
        logits=_by_step([r.logits for r in requests], longest) if config.output_logits else None,  # type: ignore[arg-type]
        **{FIELD: Past([r.past for r in requests if r.past]) if keeps_past(config) else None},  # type: ignore[arg-type]
    )


def _by_step(rows: list[list[Tensor]], longest: int) -> tuple[Tensor, ...]:
    """Per request lists of [1, V] as one [N, V] a step."""
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.cat([r[i] if i < len(r) else nothing for r in rows]) for i in range(longest))
