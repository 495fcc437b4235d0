"""`SelfSpecModel`: a causal language model that drafts for itself, behind transformers' `generate` interface."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from selfspec import hub, settings
from selfspec.adapters import MaskPathModel, io
from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.session import Request, Session, fitting
from selfspec.shadow import table_of
from selfspec.stats import Stats, total

Prompts = Sequence[str | Sequence[int]]
LOOKUP_BLOCK = 8  # nodes of a looked-up chain: longer ones are seldom right, and every row costs
log = logging.getLogger(__name__)


class SelfSpecModel:
    """One model, loaded once: the untouched causal path verifies what its mask path drafts.

    Args:
        model: a decoder-only causal LM of transformers; nothing on it is changed.
        path: its mask path; None leaves plain decoding and prompt lookup.
        tokenizer: used by the command line and chat, by `generate` only for prompts that are strings.

    Attributes:
        stats: what the last `generate` call did, summed over its prompts.
        request_stats: the same for each prompt.
    """

    def __init__(self, model: PreTrainedModel, path: MaskPathModel | None = None, tokenizer: Any = None):
        if path is not None:
            _follow(model, path)
        self.model, self.path, self.tokenizer = model, path, tokenizer
        self.backbone = Backbone(model, path)
        self.stats = Stats()
        self.request_stats: list[Stats] = []

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        adapter: str | Path | None = "auto",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        finetuned_base: bool = False,
    ) -> SelfSpecModel:
        """Load a model and its adapter.

        Args:
            name: a local folder, a hub name, a `.gguf` file or an embedded model (`selfspec.hub.load`).
            adapter: a folder, the name of a shipped adapter, "auto" for the shipped one that fits, None for none.
            dtype: of the weights.
            device: where to put them.
            finetuned_base: accept a model whose weights differ from those the adapter was trained on.

        Raises:
            AdapterError: the adapter is missing, damaged, or of another model.
            UnsupportedModel: the model cannot decode speculatively.
        """
        model, tokenizer = hub.load_model(str(name), dtype, device), hub.load_tokenizer(str(name))
        found = io.shipped_for(model) if adapter == "auto" else adapter
        path = None if found is None else io.load(found, model, finetuned_base)
        return cls(model, path, tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapter (never the base model) to a folder.

        Raises:
            ValueError: there is none.
        """
        if self.path is None:
            raise ValueError("this model has no adapter to save")
        io.save(self.path, folder, self.model)

    def generate(
        self,
        inputs: Tensor | Prompts | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | Prompts | None = None,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        mode: str | None = None,
        block_size: int | None = None,
        tree_nodes: int = 16,
        slots: int | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Greedy generation, token for token what `model.generate(..., do_sample=False)` gives.

        Args:
            inputs: [N, T] long prompts, padded on either side; or a list of token lists, or of strings, which the
                tokenizer encodes as they stand (no chat template).
            generation_config: as in transformers; keyword arguments override its fields.
            input_ids: the same as `inputs`.
            attention_mask: [N, T], 0 on padding. Without it the pad token is padding, unless it is also an EOS, as in
                transformers.
            streamer: gets the prompt, then each round's committed tokens (one prompt only).
            mode: "ar", "lookup", "sequential", "tree", "overlap" or "overlap+tree"; by default "sequential" with an
                adapter and "lookup" without.
            block_size: tokens verified per round in a chain; by default the adapter's.
            tree_nodes: nodes of a tree beside its root.
            slots: prompts that run at a time, the others wait; by default as many as fit into memory.
            **kwargs: fields of `GenerationConfig`.

        Returns:
            [N, T + longest answer] long: the prompts as given, then the answers, padded on the right; with
            `return_dict_in_generate` as the `sequences` of transformers' output class.

        Raises:
            ValueError: an argument that this release does not act on, or a prompt that does not fit.
        """
        config = settings.merge(self.model.generation_config, generation_config, kwargs)
        eos, pad = settings.eos_ids(config), settings.pad_id(config)
        ids, listed = self._one_input(inputs, input_ids, pad or 0)
        if listed is not None and attention_mask is not None:
            raise ValueError("an attention_mask goes with padded token ids, not with a list of prompts")
        attention_mask = attention_mask if listed is None else listed
        if attention_mask is None and pad is not None and pad not in eos:
            attention_mask = ids != pad
        prompts = _prompts(ids, attention_mask)
        cap = self._cap(config, prompts, ids.shape[1])
        if streamer is not None and len(prompts) > 1:
            raise ValueError("a streamer takes one prompt at a time")
        if streamer is not None:
            streamer.put(ids.cpu())
        requests = [Request(p, cap, frozenset(eos)) for p in prompts]
        plan = self.plan(mode, block_size, tree_nodes)
        for tokens in self.run(requests, plan, slots):
            if streamer is not None and tokens:
                streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        self.request_stats = [r.stats for r in requests]
        self.stats = total(self.request_stats)
        sequences = _padded(ids, requests, pad or 0)
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def run(self, requests: list[Request], plan: Plan, slots: int | None = None) -> Iterator[list[int]]:
        """Decode requests to their end; those that find no free slot wait.

        Args:
            requests: what to decode; each holds its output and stats afterwards.
            plan: how.
            slots: requests at a time; by default as many as fit into memory.

        Yields:
            What the first request emits, round by round.
        """
        if slots is not None and slots < 1:
            raise ValueError(f"slots={slots}: expected 1 or more")
        capacity = max(len(r.prompt) + r.max_new_tokens for r in requests)
        slots = min(slots or fitting(self.backbone, capacity), len(requests))
        session = Session(self.backbone, plan, slots, capacity)
        for request in requests:
            session.check(request)
        waiting = list(requests)
        while waiting or session.active:
            free = slots - len(session.active)
            if free and waiting:
                batch, waiting = waiting[:free], waiting[free:]
                emitted = list(zip(batch, session.add(batch)))
            else:
                emitted = session.step()
            yield from (tokens for request, tokens in emitted if request is requests[0])

    def plan(self, mode: str | None = None, block_size: int | None = None, tree_nodes: int = 16) -> Plan:
        """The fixed plan that these choices stand for.

        Raises:
            ValueError: a plan that drafts, and no adapter.
        """
        if mode is None:
            mode = "lookup" if self.path is None else "sequential"
        if block_size is None:
            block_size = LOOKUP_BLOCK if self.path is None or mode == "lookup" else self.path.config.block_size
        plan = Plan(mode, block_size, tree_nodes)
        plan.require(getattr(self.path, "config", None))
        return plan

    def _one_input(
        self, inputs: Tensor | Prompts | None, input_ids: Tensor | Prompts | None, pad: int
    ) -> tuple[Tensor, Tensor | None]:
        """The prompts as [N, T], and the mask of those that came as a list."""
        if (inputs is None) == (input_ids is None):
            raise ValueError("pass the prompt once, as inputs or as input_ids")
        ids = inputs if inputs is not None else input_ids
        assert ids is not None
        mask = None
        if not isinstance(ids, Tensor):
            ids, mask = _left_padded(self._encoded(ids), pad)
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"the prompt is empty or not [N, T]: got shape {tuple(ids.shape)}")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"token ids must be integers, got {ids.dtype}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.backbone.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.backbone.vocab_size - 1}")
        return ids.to(self.backbone.device), mask

    def _encoded(self, prompts: Prompts) -> list[list[int]]:
        """Token lists of a list of prompts."""
        if isinstance(prompts, str):
            raise ValueError("pass a list of prompts, not a single string")
        if any(isinstance(p, str) for p in prompts) and self.tokenizer is None:
            raise ValueError("prompts are strings, and this model was made without a tokenizer")
        out = [self.tokenizer(p)["input_ids"] if isinstance(p, str) else list(p) for p in prompts]
        if not out or not all(out):
            raise ValueError("the prompt is empty" if out else "no prompts were given")
        return out

    def _cap(self, config: GenerationConfig, prompts: list[list[int]], width: int) -> int:
        """New tokens allowed, checked against the model's context."""
        limit, longest = self.backbone.max_positions, max(map(len, prompts))
        cap = settings.new_tokens(config, width, limit)
        if limit is not None and longest + cap > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {cap} new ones exceed the model's {limit} positions; "
                f"shorten the prompt or pass max_new_tokens={max(limit - longest, 0)} or less"
            )
        return cap


def _follow(model: PreTrainedModel, path: MaskPathModel) -> None:
    """Put an adapter where its model is, and say so where it was not."""
    table, own = table_of(model), next(path.parameters(), None)
    if own is not None and (own.device, own.dtype) != (table.device, table.dtype):
        log.warning("the adapter was on %s in %s: moved to %s as %s", own.device, own.dtype, table.device, table.dtype)
        path.to(table.device, table.dtype)


def _left_padded(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ragged prompts as [N, T] and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


def _prompts(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
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


def _padded(ids: Tensor, requests: list[Request], pad: int) -> Tensor:
    longest = max(len(r.output) for r in requests)
    rows = [r.output + [pad] * (longest - len(r.output)) for r in requests]
    return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device).reshape(len(rows), longest)], 1)
