"""`SelfSpecModel`: a causal language model that drafts for itself, behind transformers' `generate` interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from selfspec import hub, settings
from selfspec.adapters import MaskPathModel, io
from selfspec.attention import decoding
from selfspec.backbone import Backbone
from selfspec.generation import Extras, build_requests, output_of, prompts_of
from selfspec.growth import Growth
from selfspec.inputs import Prompts, batch
from selfspec.memory import fitting
from selfspec.past import Past
from selfspec.plan import NODES, Plan
from selfspec.plan.named import read
from selfspec.plan.policy import Fixed, Policy
from selfspec.planners import default_mode, fixed_for, planner_for
from selfspec.pruning import Pruning
from selfspec.session import Request, Session
from selfspec.shadow import table_of
from selfspec.stats import Stats, total
from selfspec.turns import in_turn

LOOKUP_BLOCK = 8  # nodes of a looked-up chain: longer ones are seldom right, and every row costs
ROUND_UP = 1024  # positions of a session on a GPU, so that the next, longer text fits it too
log = logging.getLogger(__name__)


class SelfSpecModel:
    """One model, loaded once: the untouched causal path verifies what its mask path drafts. Threads take turns on it.

    Args:
        model: a decoder-only causal LM of transformers; nothing on it is changed.
        path: its mask path, or several that share the model; None leaves plain decoding and prompt lookup.
        tokenizer: used by the command line and chat, by `generate` only for prompts that are strings.
        exact: also in half precision every token is the one that this engine's plain decoding of the prompt alone
            gives, whatever the batch, mode and block size. Dense Llama, Qwen2, Qwen3 and Mistral models on CUDA.
        attention: backend (`selfspec.attention.BACKENDS`), by default the fastest for decoding; "flash" runs
            long prefills by flash-attn (`pip install 'selfspec[flash]'`), and decodes as the default does.

    Raises:
        UnsupportedModel: the model cannot decode speculatively, or not exactly.
        ValueError: there is no such backend here.

    Attributes:
        kernels: which of our kernels run it, and why not the others.
        stats: what the last `generate` call did, summed over its prompts.
        request_stats: the same for each prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        path: MaskPathModel | Sequence[MaskPathModel] | None = None,
        tokenizer: Any = None,
        exact: bool = False,
        attention: str | None = None,
    ):
        paths = [] if path is None else [path] if isinstance(path, torch.nn.Module) else [*path]
        for one in paths:
            _follow(model, one)
        self.model, self.path, self.tokenizer, self.exact = model, paths[0] if paths else None, tokenizer, exact
        backend, packed = decoding(attention, model.device, model.dtype), {}  # type: ignore[var-annotated]
        self.bodies = [Backbone(model, p, backend, verify=not i) for i, p in enumerate(paths or [None])]
        self.backbone = self.bodies[0]
        self.kernels, *_ = [body.hasten(exact, packed) for body in self.bodies]
        log.info("%s: %s", type(model).__name__, self.kernels)
        self.stats = Stats()
        self.request_stats: list[Stats] = []
        self._kept: Session | None = None
        self._planners: dict[str, Policy] = {}  # by verifier
        self._rules: dict[str, Pruning | Growth] = {}  # by their names

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        adapter: str | Path | Sequence[str | Path] | None = "auto",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        finetuned_base: bool = False,
        exact: bool = False,
        attention: str | None = None,
    ) -> SelfSpecModel:
        """Load a model and its adapter.

        Args:
            name: a local folder, a hub name, a `.gguf` file or an embedded model (`selfspec.hub.load`).
            adapter: a folder, the name of a shipped adapter, "auto" for the shipped one that fits, None for none; or
                several, which share the model: plans name them by their place, and mode="auto" chooses among them.
            dtype: of the weights.
            device: where to put them.
            finetuned_base: accept a model whose weights differ from those the adapter was trained on.
            exact: token-identical in half precision too; see the class.
            attention: backend; see the class.

        Raises:
            AdapterError: the adapter is missing, damaged, or of another model.
            UnsupportedModel: the model cannot decode speculatively.
        """
        model, tokenizer = hub.load_model(str(name), dtype, device), hub.load_tokenizer(str(name))
        names = [adapter] if adapter is None or isinstance(adapter, str | Path) else [*adapter]
        found = [io.shipped_for(model) if name == "auto" else name for name in names]
        paths = [io.load(one, model, finetuned_base) for one in found if one is not None]
        return cls(model, paths, tokenizer, exact, attention)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapter (never the base model) to a folder.

        Raises:
            ValueError: there is none, or there are several.
        """
        if self.path is None:
            raise ValueError("this model has no adapter to save")
        if len(self.bodies) > 1:
            raise ValueError(f"this model has {len(self.bodies)} adapters; load the one to save by itself")
        io.save(self.path, folder, self.model)

    def generate(
        self,
        inputs: Tensor | Prompts | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | Prompts | None = None,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        tokenizer: Any = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        seed: int | list[int] | None = None,
        past_key_values: Past | None = None,
        cache: Past | None = None,
        response_format: dict[str, Any] | None = None,
        verify: str | None = None,
        mode: str | None = None,
        block_size: int | None = None,
        tree_nodes: int | None = None,
        lengths: str | None = None,
        slots: int | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What `model.generate` gives, sooner.

        Greedy text is token for token transformers' own. Sampled text follows the same distribution, and the same seed
        gives the same text in every mode, batch and block size (with `verify="coupled"`). Processors see each answer's
        own text without padding, once per emitted token.

        Args:
            inputs: [N, T] long prompts, padded on either side; or a list of token lists, or of strings, which the
                tokenizer encodes as they stand (no chat template).
            generation_config: as in transformers; keyword arguments override its fields.
            input_ids: the same as `inputs`.
            attention_mask: [N, T], 0 on padding. Without it the pad token is padding, unless it is also an EOS, as in
                transformers.
            streamer: gets the prompt, then each round's committed tokens (one answer only).
            logits_processor: as in transformers; see `selfspec.generation.Extras` for these four.
            stopping_criteria: likewise.
            prefix_allowed_tokens_fn: likewise.
            tokenizer: needed by `stop_strings`; the model's own if it has one.
            presence_penalty: taken once from the score of every token that the answer holds (transformers has none).
            frequency_penalty: taken once for each time that it does.
            seed: of sampling, one number or one a prompt; by default drawn from torch's global generator.
            past_key_values: what an earlier call returned (with `return_dict_in_generate`), one text a prompt: the
                beginning that it shares with the prompt is not prefilled again.
            cache: the same by transformers' newer name.
            response_format: {"type": "json_schema", "json_schema": ...}, {"type": "json_object"} or {"type": "regex",
                "regex": ...}: the answer follows it (needs `pip install selfspec[grammar]` and a tokenizer).
            verify: how drawn tokens are verified: "coupled" (the default), "rejection", "block" (chains) or "multi".
            mode: "ar", "lookup", "sequential", "loop", "tree", "overlap", or several as in "overlap+tree"; "auto"
                measures and chooses before every round. By default "auto", see `selfspec.planners.default_mode`.
                Settings go with a name, as in "overlap/b=8/groups=2", "loop/passes=3" or "tree/nodes=63/rule=caddtree"
                (`selfspec.plan.named`).
            block_size: tokens verified per round in a chain; by default the adapter's.
            tree_nodes: nodes of a tree beside its root, by default 31.
            lengths: a rule that says how many drafts of a chain are verified: "product", "libraspec", "scan" (measures
                forwards), "adaflash" (an adapter with a length head) or "fixed:length=4"; settings as in
                "product:threshold=0.1:by=margin". By default all are. The text stays the same.
            slots: prompts that run at a time, the others wait; by default as many as fit into memory.
            **kwargs: fields of `GenerationConfig`.

        Returns:
            [N, T + longest answer] long: the prompts as given, then the answers, padded on the right; with
            `return_dict_in_generate` transformers' output class.

        Raises:
            ValueError: an argument that this release does not act on, or a prompt that does not fit.
        """
        config = settings.merge(self.model.generation_config, generation_config, kwargs)
        eos, pad = settings.eos_ids(config), settings.pad_id(config)
        body = self.backbone
        ids, listed = batch(inputs, input_ids, pad or 0, body.vocab_size, body.device, self.tokenizer)
        if listed is not None and attention_mask is not None:
            raise ValueError("an attention_mask goes with padded token ids, not with a list of prompts")
        attention_mask = attention_mask if listed is None else listed
        if attention_mask is None and pad is not None and pad not in eos:
            attention_mask = ids != pad
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        extras = Extras(
            logits_processor,
            stopping_criteria,
            prefix_allowed_tokens_fn,
            tokenizer,
            seed,
            presence_penalty,
            frequency_penalty,
            past_key_values if cache is None else cache,
            response_format,
        )
        plan = self.policy(mode, block_size, tree_nodes, verify or "coupled", lengths)
        return self.answer(ids, attention_mask, config, extras, plan, verify, streamer, slots)

    def answer(
        self,
        ids: Tensor,
        mask: Tensor | None,
        config: GenerationConfig,
        extras: Extras,
        plan: Plan | Policy,
        verify: str | None = None,
        streamer: BaseStreamer | None = None,
        slots: int | None = None,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """`generate`, once all that it was given has been read."""
        if verify is not None and not config.do_sample:
            raise ValueError(f"verify={verify!r}: greedy decoding has one way to verify; pass do_sample=True")
        prompts = prompts_of(ids, mask)
        cap, copies = self._cap(config, prompts, ids.shape[1]), config.num_return_sequences or 1
        if streamer is not None and len(prompts) * copies > 1:
            raise ValueError("a streamer takes one prompt at a time, with one answer")
        requests = build_requests(self.model, config, prompts, ids.shape[1], cap, extras)
        rounds = self.run(requests, plan, slots, verify or "coupled")
        if streamer is not None:
            streamer.put(ids.cpu())
        for tokens in rounds:
            if streamer is not None and tokens:
                streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        self.request_stats = [r.stats for r in requests]
        self.stats = total(self.request_stats)
        return output_of(ids, requests, config, copies)

    def run(
        self, requests: list[Request], plan: Plan | Policy, slots: int | None = None, verify: str = "coupled"
    ) -> Iterator[list[int]]:
        """Decode requests to their end; those that find no free slot wait.

        Args:
            requests: what to decode; each holds its output and stats afterwards.
            plan: how.
            slots: requests at a time; by default as many as fit into memory.
            verify: how drawn tokens are verified.

        Returns:
            What the first request emits, round by round, as it is decoded.

        Raises:
            ValueError: at once, for what cannot be decoded.
        """
        rounds = self.rounds(requests, plan, slots, verify)
        return (tokens for emitted in rounds for request, tokens in emitted if request is requests[0])

    def rounds(
        self, requests: list[Request], plan: Plan | Policy, slots: int | None = None, verify: str = "coupled"
    ) -> Iterator[list[tuple[Request, list[int]]]]:
        """`run`, with what every request emits: after each prefill and each round."""
        if slots is not None and slots < 1:
            raise ValueError(f"slots={slots}: expected 1 or more")
        if not requests:
            return iter(())
        session = self._session_for(requests, plan, slots, verify)
        try:
            for request in requests:
                session.check(request)
        except ValueError:
            self._keep(session)
            raise
        return self._decode(session, list(requests))

    def _decode(self, session: Session, waiting: list[Request]) -> Iterator[list[tuple[Request, list[int]]]]:
        try:
            while waiting or session.active:
                n = session.room(len(waiting))
                batch, waiting = waiting[:n], waiting[n:]
                session.add(batch)
                emitted = session.step()
                for failure in (r.failure for r, _ in emitted if r.failure is not None):
                    raise failure
                yield emitted
        finally:
            session.clear()
            self._keep(session)

    def _keep(self, session: Session) -> None:
        """What was captured and compiled for a session serves the next call too."""
        if session.graphs.enabled:
            self._kept = session

    @in_turn
    def _session_for(self, requests: list[Request], plan: Plan | Policy, slots: int | None, verify: str) -> Session:
        """A session with room for these requests: the last call's, or a new one."""
        capacity = max(len(r.prompt) + r.max_new_tokens for r in requests)
        policy = self.pruned(plan, None) if isinstance(plan, Plan) else plan
        kept, self._kept = self._kept, None  # nobody else gets it meanwhile
        wanted = min(slots or len(requests), len(requests))
        if kept is not None and kept.suits(policy, capacity, verify) and len(kept.requests) >= wanted:
            self._keep(kept)  # in case that it refuses
            kept.use(policy)
            kept.limit, self._kept = wanted, None
            return kept
        del kept
        if self.backbone.device.type == "cuda":
            limit = self.backbone.max_positions or capacity
            capacity = max(capacity, min(limit, -(-capacity // ROUND_UP) * ROUND_UP))
        slots = min(slots or fitting(self.backbone, capacity, policy.plans), len(requests))
        return Session(self.bodies, policy, slots, capacity, verify)

    @in_turn
    def policy(
        self,
        mode: str | None = None,
        block_size: int | None = None,
        tree_nodes: int | None = None,
        verify: str = "coupled",
        lengths: str | None = None,
    ) -> Policy:
        """What chooses the rounds' plans: with "auto" the planner, which learns from call to call; else one plan.

        Raises:
            ValueError: a plan that drafts, and no adapter; sizes or a length rule beside "auto"; one without use.
        """
        mode = mode or default_mode(self.path is not None, verify, block_size, tree_nodes, lengths)
        if tree_nodes is not None and "tree" not in mode:
            raise ValueError(f"tree_nodes={tree_nodes}: mode={mode!r} builds no tree of a given size")
        if mode != "auto":
            return self.pruned(self.plan(mode, block_size, tree_nodes), read(mode).lengths or lengths)
        for name, given in (("block_size", block_size), ("lengths", lengths)):
            if given is not None:
                raise ValueError(f"{name}={given}: with mode='auto' the planner chooses it")
        if verify not in self._planners:
            self._planners[verify] = planner_for(self.bodies, verify)
        return self._planners[verify]

    def pruned(self, plan: Plan, lengths: str | None, slots: int | None = None) -> Fixed:
        """Always that plan, by rules that are kept, as is what they learn. See `selfspec.planners.fixed_for`."""
        return fixed_for(self.bodies, plan, lengths, self._rules, slots)

    def plan(self, mode: str, block_size: int | None = None, tree_nodes: int | None = None) -> Plan:
        """The fixed plan that these choices stand for. What a mode's own settings say (`selfspec.plan.named`) goes
        before what is said of all modes.

        Raises:
            ValueError: a plan that drafts, and no adapter, or settings that make no sense.
        """
        named = read(mode)
        adapter = named.adapter or 0
        if adapter >= len(self.bodies):
            raise ValueError(f"adapter={adapter}: {len(self.bodies)} are loaded, counted from 0")
        path = getattr(self.bodies[adapter].path, "config", None)
        if block_size is None:
            block_size = LOOKUP_BLOCK if path is None or named.mode == "lookup" else path.block_size
        sizes = {"block_size": block_size, "tree_nodes": NODES if tree_nodes is None else tree_nodes}
        plan = Plan(named.mode, adapter=adapter, **{**sizes, **named.given})
        plan.require(path)
        return plan

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
