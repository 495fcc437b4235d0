"""Prune: a length rule at work between draft and verification.

Rows of a verification stand in a rectangle, so one length serves a whole batch: a row more is one more for every
request, and worth the mean of their chances to use it. The rule therefore sees one chain whose running products are the
batch's means, which for `Scan` gives the batch's own optimum; alone, a request is judged by its own confidences. The
outcome is one number that the host reads before it starts the verification: rows are saved, not padded. Where shapes
are fixed it is rounded up to a few lengths, each with a graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec import tops
from selfspec.backbone import Backbone
from selfspec.forecast import Forecast, heads_of
from selfspec.plan import BLOCKS, Plan
from selfspec.plan.cost import STEP, Costs
from selfspec.plan.lengths import LENGTHS, Fixed, Margins, Scan, require
from selfspec.plan.lengths.adaflash import confidences
from selfspec.plan.lengths.margin import margins
from selfspec.plan.lengths.named import read
from selfspec.plan.policy import Fixed as Always
from selfspec.transfer import onto


class Cut(NamedTuple):
    """What a rule wants of a batch.

    Attributes:
        drafts: [] long, drafts of every request to verify.
        margins: [N, T] of the drafts, where confidences are learnt from them.
    """

    drafts: Tensor
    margins: Tensor | None = None


class Pruning:
    """One rule for the adapters that are loaded, and what it has learnt. Shared by sessions, which take turns.

    Confidences are the adapter's own where it has a head for them ("head": the confidence head's, or what the length
    head says of single positions), else the marginals' largest probabilities ("certainty"); "margin" learns them
    while it serves.

    Args:
        text: the rule, see `selfspec.plan.lengths.named`.
        bodies: a backbone for each adapter.
        costs: of rounds, for rules that weigh them.

    Raises:
        ValueError: there is no such rule.
    """

    def __init__(self, text: str, bodies: Sequence[Backbone], costs: Costs | None = None):
        self.text, self.named, self.costs = text, read(text, LENGTHS), costs
        self.device = bodies[0].device
        rule, settings = LENGTHS[self.named.name], self.named.settings
        self.rule: Any = Scan(torch.empty(0), **settings) if rule is Scan else rule(**settings)
        self.learnt: dict[int, Margins] = {}  # by adapter
        for i, body in enumerate(bodies if self.named.by == "margin" else ()):
            if (path := getattr(body.path, "config", None)) is not None:
                self.learnt[i] = Margins(path.block_size - 1, body.device)
        self._times: dict[tuple, Tensor] = {}  # stay where they are: graphs read them

    def policy(self, plan: Plan, path: Any) -> Always:
        """Always that plan, pruned. A rule that asks for no confidences needs none of what stands below.

        Raises:
            ValueError: as `require`.
        """
        self.require(plan, path)
        if isinstance(self.rule, Fixed):
            return Always(replace(plan, verify_length=min(self.rule.length + 1, plan.nodes)))
        return Always(plan, self)

    def require(self, plan: Plan, path: Any, drawn: bool = False) -> None:
        """Refuse what the rule cannot be used for.

        Args:
            plan: whose rounds it is to prune.
            path: the mask path of its adapter.
            drawn: drafts are drawn and verified against what they were drawn from.

        Raises:
            ValueError: says why.
        """
        if not plan.chain:
            raise ValueError(f"lengths={self.text!r} prunes drafted chains, and mode={plan.mode!r} has none")
        confidence, length = heads_of(path)
        if self.named.name == "adaflash" and length is None:
            raise ValueError(f"lengths={self.text!r} reads a length head, which this adapter was trained without")
        if self.named.by == "head" and confidence is None and length is None:
            raise ValueError(
                f"lengths={self.text!r}: this adapter was trained without a confidence or length head; by=certainty "
                "and by=margin need none"
            )
        if isinstance(self.rule, Scan) and self.costs is None:
            raise ValueError(f"lengths={self.text!r} weighs what rounds cost, and no latency table was given")
        require(self.rule, drawn, plan.loop)

    def __call__(self, plan: Plan, logits: Tensor, told: Forecast, live: Tensor, times: Tensor | None = None) -> Cut:
        """How many drafts to verify. Static shapes, no host reads.

        Args:
            plan: of the round.
            logits: [N, T, V] the drafts' marginals.
            told: what the path's heads say of them.
            live: [N] bool, requests that have a draft and may emit something.
            times: [T + 1] float32 of `times`, for rules that weigh them.
        """
        if self.named.name == "adaflash":
            assert told.lengths is not None
            return Cut(self.rule(_mean(told.lengths, live)[None])[0])
        seen = margins(logits) if plan.adapter in self.learnt else None
        if seen is not None:
            confidence = self.learnt[plan.adapter](seen)
        elif self.named.by != "certainty" and told.sure is not None:
            confidence = told.sure
        elif self.named.by != "certainty" and told.lengths is not None:
            confidence = confidences(told.lengths)
        else:
            confidence = tops.certainty(logits)
        rule = self.rule if times is None else replace(self.rule, costs=times)
        return Cut(rule(together(confidence, live))[0], seen)

    def times(self, plan: Plan, n: int, t: int, context: int, drafted: bool, fixed: bool) -> Tensor | None:
        """Milliseconds of a round of n requests that verifies 0..t drafts, or None for a rule that does not ask.

        Args:
            plan: of the round.
            n: requests.
            t: drafts.
            context: committed positions.
            drafted: the draft is there already; otherwise a pass for it counts.
            fixed: shapes are, see `bucket`.

        Returns:
            [t + 1] float32, the same tensor for the same round.
        """
        if not isinstance(self.rule, Scan):
            return None
        context = -(-context // STEP) * STEP
        key = plan, n, t, context, drafted, fixed
        if key not in self._times:
            assert self.costs is not None
            plans = [replace(plan, verify_length=bucket(d, t + 1, fixed)) for d in range(t + 1)]
            ms = [self.costs.round(p, n, context, 0 if drafted else None) for p in plans]
            self._times[key] = onto(ms, self.device).float()
        return self._times[key]

    def observe(self, adapter: int, seen: Tensor | None, verified: Tensor, accepted: Tensor) -> None:
        """Learn from a round.

        Args:
            adapter: that drafted.
            seen: [N, T] margins of its drafts; None where nothing is learnt from them.
            verified: [N] long, drafts that were verified and could have been emitted.
            accepted: [N] long, those of them that were accepted.
        """
        if seen is not None:
            self.learnt[adapter].observe(seen, verified, accepted)


def weighs(text: str) -> bool:
    """Whether a rule asks what rounds cost.

    Raises:
        ValueError: there is no such rule.
    """
    return LENGTHS[read(text, LENGTHS).name] is Scan


def bucket(drafts: int, size: int, fixed: bool, sizes: Sequence[int] = (1, *BLOCKS)) -> int:
    """Nodes of a verified chain or tree, the anchor included: where shapes are fixed one of few.

    Args:
        drafts: wanted.
        size: nodes of the whole one.
        fixed: shapes are.
        sizes: those few, beside the whole one.
    """
    return next((b for b in sizes if drafts < b < size), size) if fixed else drafts + 1


def together(confidence: Tensor, live: Tensor) -> Tensor:
    """One chain that stands for a batch: its running products are the means of theirs.

    Args:
        confidence: [N, T], each draft's chance if those before it are accepted.
        live: [N] bool, whom to count.

    Returns:
        [1, T] float32
    """
    if len(confidence) == 1:
        return confidence.float() * live[:, None]
    mean = _mean(confidence.float().cumprod(1), live)  # [T]
    before = torch.cat([torch.ones_like(mean[:1]), mean[:-1]])
    return (mean / before.clamp(min=torch.finfo(mean.dtype).tiny)).clamp(max=1)[None]


def _mean(values: Tensor, live: Tensor) -> Tensor:
    """Over the requests that count. [N, K], [N] bool -> [K]"""
    return (values * live[:, None]).sum(0) / live.sum().clamp(min=1)
