"""Which steps do what a request's processors do.

A recipe is how requests are grouped, and what a CUDA graph is valid for. A graph that was captured with one has to hold
on to it, since its steps keep the constant tensors that the graph reads, and it has to have been called before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from selfspec import kernels, sampling, tops
from selfspec.nodes import Nodes
from selfspec.penalties import PresenceFrequencyPenalty
from selfspec.runs import Run, joined
from selfspec.steps import Ban, Bias, Decay, Eta, Force, NGram, PresenceFrequency, Pure, Repetition, Step, TopH


class Recipe:
    """Steps in order. There is one object for equal steps, as long as anyone holds it.

    Attributes:
        steps: what it does.
        reads_text: some step needs the tokens of the text.
        of_scores: no step needs to know even its length; the processors then serve any prompt.
    """

    _known: ClassVar[WeakValueDictionary[tuple[Step, ...], Recipe]] = WeakValueDictionary()

    def __init__(self, steps: tuple[Step, ...]):
        self.steps = steps
        self.reads_text = any(s.reads_text for s in steps)
        self.of_scores = all(s.of_scores for s in steps)

    @cached_property
    def cuts(self) -> Recipe:
        """The steps that are functions of the scores alone. It holds on to the same constants."""
        return Recipe.of([s for s in self.steps if s.of_scores])

    @cached_property
    def light(self) -> Recipe:
        """Without the steps that rank the vocabulary or sum over it."""
        return Recipe.of([s for s in self.steps if not (isinstance(s, Pure) and s.key[0] in RANKING)])

    @cached_property
    def alone(self) -> Recipe:
        """Of these, the steps that look at every score by itself: they also serve some of the vocabulary."""
        return Recipe.of([s for s in self.light.steps if isinstance(s, Pure)])

    @cached_property
    def temperature(self) -> float:
        """What scores are divided by."""
        warm = [s for s in self.steps if isinstance(s, Pure) and s.key[0] == "TemperatureLogitsWarper"]
        return math.prod(float(s.processor.temperature) for s in warm)

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Recipe:
        """The recipe of these steps."""
        found = cls._known.get(tuple(steps))
        if found is None:
            found = cls._known[tuple(steps)] = cls(tuple(steps))
        return found

    def __call__(self, nodes: Nodes | None, logits: Tensor) -> Tensor:
        """Target scores after every node.

        Args:
            nodes: the nodes; None for steps that are functions of the scores alone.
            logits: [N, M, V], left as they are.

        Returns:
            [N, M, V] float32, in which transformers computes
        """
        if kernels.serve(logits) and logits.numel():
            return _all(self.parts(logits.shape[-1]), nodes, logits)
        return _all(self.steps, nodes, logits)

    def parts(self, vocab: int) -> tuple[Run | Step | Few, ...]:
        """The steps as they are done where there are kernels: many of them together."""
        return self._narrow if vocab > COLUMNS else self._wide

    @cached_property
    def _wide(self) -> tuple[Run | Step | Few, ...]:
        return tuple(joined(self.steps))

    @cached_property
    def _narrow(self) -> tuple[Run | Step | Few, ...]:
        first, end = few(self.steps)
        some = (Few(self.steps[first:end]),) if end else ()  # type: ignore[arg-type]
        return (*joined(self.steps[:first]), *some, *joined(self.steps[end:]))

    def draw(self, nodes: Nodes, logits: Tensor) -> Tensor:
        """The token drawn after every node: `sampling.draw` from the target scores. [N, M, V] -> [N, M] long"""
        parts = self.parts(logits.shape[-1]) if kernels.serve(logits) and logits.numel() else ()
        if parts and isinstance(parts[-1], Few):
            scores, ids = parts[-1].among(_all(parts[:-1], nodes, logits))
            return sampling.draw_among(scores.flatten(0, 1), ids.flatten(0, 1), *nodes.keys).view(logits.shape[:2])
        return sampling.draw(self(nodes, logits).flatten(0, 1), *nodes.keys).view(logits.shape[:2])


def _all(parts: Sequence[Run | Step | Few], nodes: Nodes | None, logits: Tensor) -> Tensor:
    """One after another."""
    scores = logits
    if not parts or not isinstance(parts[0], Run):  # which makes scores of its own
        scores = logits.to(torch.float32, copy=True)  # processors may write in place
    for part in parts:
        scores = part(nodes, scores)  # type: ignore[arg-type]
    return scores


COLUMNS, LARGEST = 128, 64  # columns that cuts look at behind a top-k of so many at most; the others are for ties
# cuts that a kernel makes, in the order in which it makes them, and where their thresholds stand
KERNEL = {
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "mass",
}
CUTS = {"TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper"}


def few(steps: Sequence[Step]) -> tuple[int, int]:
    """The first and the end of a run of cuts that needs no more than the best few scores; (0, 0) if there is none."""
    for i, step in enumerate(steps):
        if isinstance(step, Pure) and step.key[0] == "TopKLogitsWarper" and step.processor.top_k <= LARGEST:
            run = itertools.takewhile(lambda s: isinstance(s, Pure) and s.key[0] in CUTS, steps[i + 1 :])
            cuts = [step.processor, *(s.processor for s in run if isinstance(s, Pure))]
            plain = all(p.filter_value == -math.inf and p.min_tokens_to_keep <= LARGEST for p in cuts)
            return (i, i + len(cuts)) if plain else (0, 0)
    return 0, 0


@dataclass(frozen=True)
class Few:
    """A top-k and the cuts behind it, over each row's best COLUMNS alone, the others being cut anyway.

    A cut keeps what transformers' class would keep in the vocabulary's width, but for the last bits of its sums, and
    for which of equal scores it takes first, which transformers leaves open. Its top-k keeps all that equal the last
    one; here those of them that have a column, the lower tokens first: at least COLUMNS - k + 1.

    Attributes:
        steps: what they are.
    """

    steps: tuple[Pure, ...]

    def __call__(self, nodes: Nodes | None, scores: Tensor) -> Tensor:
        """[N, M, V] float32 -> the same, -inf but for what is kept"""
        best, ids = self.among(scores)
        # where a row has fewer tokens, their places name token 0, which may have a column of its own
        return torch.full_like(scores, -math.inf).scatter_reduce_(-1, ids, best, "amax")

    def among(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The columns' scores, -inf for what is cut, float32 [N, M, COLUMNS], and tokens, long [N, M, COLUMNS]."""
        top, ids = tops.ranked(scores, COLUMNS)
        if self.known is not None:
            from selfspec.kernels import cuts

            return cuts.cut(scores, top, ids, self.known), ids
        best = scores.gather(-1, ids).masked_fill(top == -math.inf, -math.inf)
        for step in self.steps:
            best = step(None, best)
        return best, ids

    @cached_property
    def known(self) -> dict[str, tuple[float, int]] | None:
        """Names of cuts, their thresholds and how many tokens they keep at least; None where no kernel has them all."""
        found: dict[str, tuple[float, int]] = {}
        for step in self.steps:
            name, p = step.key[0], step.processor
            if name not in KERNEL or (found and list(KERNEL).index(name) <= list(KERNEL).index([*found][-1])):
                return None
            found[name] = getattr(p, KERNEL[name]), p.min_tokens_to_keep if name != "TopKLogitsWarper" else 1
        return found


def recipe_of(processors: Sequence[Any], prompt: list[int], cap: int) -> Recipe | None:
    """The recipe of a request's processors; None where one has no batched form (a caller's own, a stateful one).

    Args:
        processors: as transformers builds them for this prompt.
        prompt: token ids.
        cap: new tokens.
    """
    steps = [step_of(p, prompt, cap) for p in processors]
    known = [s for s in steps if s is not None]
    return Recipe.of(known) if len(known) == len(steps) else None


def cuts_of(processors: Sequence[Any], prompt: list[int], cap: int) -> Recipe:
    """The steps among them that are functions of the scores alone: temperature and cuts, for the drafter's logits.

    See `recipe_of`; what depends on the text is left out, a draft may be wrong.
    """
    steps = [step_of(p, prompt, cap) for p in processors]
    return Recipe.of([s for s in steps if s is not None and s.of_scores])


def step_of(processor: Any, prompt: list[int], cap: int) -> Step | None:
    """The batched form of a processor, None where there is none. See `recipe_of`; a subclass is another processor."""
    p, n, kind = processor, len(prompt), type(processor).__name__
    if kind in PURE and type(p) is getattr(hf, kind, None):
        key = (kind, *((k, _frozen(v)) for k, v in sorted(vars(p).items())))
        return {"EtaLogitsWarper": Eta, "TopHLogitsWarper": TopH}.get(kind, Pure)(key, p)
    if type(p) is PresenceFrequencyPenalty:
        return PresenceFrequency(p.presence, p.frequency, p.prompt - n)
    if type(p) is not getattr(hf, kind, None):
        return None
    match kind:
        case "SuppressTokensLogitsProcessor":
            return Ban(_ids(p.suppress_tokens))
        case "SuppressTokensAtBeginLogitsProcessor":
            return Ban(_ids(p.begin_suppress_tokens), at=p.begin_index - n)
        case "MinLengthLogitsProcessor":
            return Ban(_ids(p.eos_token_id), below=p.min_length - n)
        case "MinNewTokensLengthLogitsProcessor":
            return Ban(_ids(p.eos_token_id), below=p.prompt_length_to_skip + p.min_new_tokens - n)
        case "ForcedBOSTokenLogitsProcessor":
            return Force((p.bos_token_id,), 1 - n)
        case "ForcedEOSTokenLogitsProcessor":
            return Force(_ids(p.eos_token_id), p.max_length - 1 - n)
        case "ExponentialDecayLengthPenalty":
            longest = 1 << max(cap - 1, 1).bit_length()  # few sizes, so that requests share
            return Decay(p.regulation_start - n, p.regulation_factor, _ids(p.eos_token_id), longest)
        case "RepetitionPenaltyLogitsProcessor":
            first = p.prompt_ignore_length
            if isinstance(first, Tensor) and first.numel() != 1:
                return None
            return Repetition(p.penalty, int(first or 0))
        case "EncoderRepetitionPenaltyLogitsProcessor":
            return Repetition(p.penalty, None) if p.encoder_input_ids.tolist() == [prompt] else None
        case "NoRepeatNGramLogitsProcessor":
            return NGram(p.ngram_size)
        case "EncoderNoRepeatNGramLogitsProcessor":
            wanted = {tuple(prompt[i : i + p.ngram_size]) for i in range(n - p.ngram_size + 1)}
            held = [{(*k, t) for k, ends in grams.items() for t in ends} for grams in p.generated_ngrams]
            return NGram(p.ngram_size, True) if held == [wanted] else None
        case "SequenceBiasLogitsProcessor" | "NoBadWordsLogitsProcessor":
            return Bias(tuple((tuple(map(int, s)), float(b)) for s, b in p.sequence_bias.items()))
    return None


# functions of one row's scores alone
PURE = {
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
    *("InfNanRemoveLogitsProcessor", "LogitNormalization"),
}
# those of them that cut a distribution's tail, or normalise it
RANKING = PURE - {"TemperatureLogitsWarper", "InfNanRemoveLogitsProcessor"}


def _ids(values: Tensor) -> tuple[int, ...]:
    return tuple(values.reshape(-1).tolist())


def _frozen(value: Any) -> Any:
    return tuple(value.reshape(-1).tolist()) if isinstance(value, Tensor) else value
