"""The ways to decode that are measured: this package's modes, and transformers' `generate` in its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from selfspec import hub, options
from selfspec.measure import Prompts, Runner, Watch
from selfspec.model import SelfSpecModel
from selfspec.reference import answers, eos_ids
from selfspec.request import Request
from selfspec.stats import Stats

# Forms of `generate`: what they pass to it. "compile" is a static cache, which `generate` itself compiles on a GPU.
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "compile": {"cache_implementation": "static"},
    "lookup": {"prompt_lookup_num_tokens": 10},  # the number in transformers' own documentation
}


def engine_runner(
    model: SelfSpecModel,
    mode: str,
    block_size: int | None = None,
    tree_nodes: int | None = None,
    name: str | None = None,
    lengths: str | None = None,
) -> Runner:
    """This package's decoder in one mode. Its slots are kept full from the queue: an ended request's successor joins
    while the others run.

    Prefill ends for the run with its first token; that of later requests is taken from the session's own clock.
    """
    policy, eos = model.policy(mode, block_size, tree_nodes, lengths=lengths), eos_ids(model.model)

    def run(prompts: Prompts, cap: int, slots: int, watch: Watch) -> tuple[Prompts, list[Stats]]:
        requests = [Request(p, cap, eos) for p in prompts]
        index = {r: i for i, r in enumerate(requests)}
        until_first = 0.0
        for emitted in model.rounds(requests, policy, slots):
            began = not watch.first
            watch.step((index[r], len(tokens)) for r, tokens in emitted if tokens)
            if began and watch.first:
                until_first = _prefill(requests)
                watch.prefill = min(t for t, _ in watch.first.values()) - watch.begin
        watch.prefill += _prefill(requests) - until_first
        return [r.output for r in requests], [r.stats for r in requests]

    longest = max(p.block_size if p.drafts or p.lookup else 1 for p in policy.plans)
    return Runner(name or mode, model.backbone.device, run, longest)


def _prefill(requests: list[Request]) -> float:
    return sum(r.stats.seconds["prefill"] for r in requests)


def hf_runner(model: PreTrainedModel, name: str, form: str = "") -> Runner:
    """Greedy `generate` of transformers, which knows static batches only: so many prompts, left-padded, to the last
    one's end.

    The moment of the first token comes from a stopping criterion, which the loop calls after every token: it notes the
    time once and stops nothing, so that no separately timed prefill has to be subtracted and no streamer copies tokens
    to the host.

    Args:
        model: of transformers.
        name: for tables.
        form: a key of `FORMS`.
    """

    def run(prompts: Prompts, cap: int, slots: int, watch: Watch) -> tuple[Prompts, list[Stats]]:
        if form == "compile" and model.device.type == "cpu":
            raise NotImplementedError("generate compiles on an accelerator only, and this model is on the CPU")
        outputs: Prompts = []
        for at in range(0, len(prompts), slots):
            part = prompts[at : at + slots]
            began, first = watch.now(), _FirstTokens(watch, at, max(map(len, part)))
            outputs += answers(model, model, part, cap, stopping_criteria=StoppingCriteriaList([first]), **FORMS[form])
            ended = watch.now()
            watch.last |= {i: ended for i in range(at, at + len(part))}  # all are handed over at the end
            watch.prefill += watch.first[at][0] - began
        return outputs, []

    return Runner(name, model.device, run)


class _FirstTokens(StoppingCriteria):
    """Notes the first tokens of a batch; stops nothing."""

    def __init__(self, watch: Watch, at: int, width: int):
        self.watch, self.at, self.width = watch, at, width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.at not in self.watch.first:
            now, tokens = self.watch.now(), input_ids.shape[1] - self.width
            self.watch.first |= {self.at + i: (now, tokens) for i in range(len(input_ids))}
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def baselines(names: Sequence[str], model: SelfSpecModel, source: str) -> list[Runner]:
    """Hugging Face `generate`, by names of the form `hf[-compile|-lookup][-DTYPE]`.

    Args:
        names: such as "hf", in the model's own dtype, or "hf-lookup-float32".
        model: its own transformers model serves the baselines of its dtype.
        source: where to load the model from in the others.

    Raises:
        ValueError: a name of another form.
    """
    own, parsed = options.dtype_name(model.backbone.dtype), []
    for name in names:
        head, *parts = name.split("-")
        form = parts.pop(0) if parts and parts[0] in FORMS and parts[0] else ""
        dtype = parts.pop(0) if parts and parts[0] in options.DTYPES else own
        if head != "hf" or parts:
            forms = ", ".join(f"hf-{f}" for f in FORMS if f)
            raise ValueError(f"baseline {name!r} is unknown: expected hf, {forms}, with -{', -'.join(options.DTYPES)}")
        parsed.append((name, form, dtype))
    models: dict[str, PreTrainedModel] = {own: model.model}
    for _, _, dtype in parsed:
        if dtype not in models:
            models[dtype], _ = hub.load(source, dtype=getattr(torch, dtype), device=model.backbone.device)
    return [hf_runner(models[dtype], name, form) for name, form, dtype in parsed]
