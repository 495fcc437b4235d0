"""How a round is put together from its parts: what is drafted, verified and kept under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec import decode, tops
from selfspec.backbone import MASK, Backbone
from selfspec.cache import KVCache
from selfspec.choose import DEFAULT, Chooser
from selfspec.clock import Clock
from selfspec.decode import Frame
from selfspec.draft import Builder, DraftTree, overlap
from selfspec.draft.condition import Condition, Given, condition_of
from selfspec.draft.lookup import lookup
from selfspec.draft.loop import prefix_of
from selfspec.draft.overlap import Groups
from selfspec.forecast import Forecast, forecast
from selfspec.growth import BUCKETS, Growth
from selfspec.plan import CORRECTIONS, RULES, Plan
from selfspec.plan.policy import Policy
from selfspec.proposal import Proposal
from selfspec.pruning import Cut, Pruning, bucket
from selfspec.request import Request
from selfspec.slots import Slots
from selfspec.verify import Accepted


@dataclass(frozen=True)
class Rounds:
    """What all rounds of a session share.

    Attributes:
        bodies: a backbone for each adapter, all of one model; of any of them the clean rows are the same.
        cache: of the requests.
        slots: of the requests.
        chooser: of drafts.
        fixed: shapes may not depend on data, as in a CUDA graph.
        pruning: the length rule of chains; None verifies all of them.
        growth: the rule of trees; None grows them best-first and verifies all of them.
    """

    bodies: list[Backbone]
    cache: KVCache
    slots: Slots
    chooser: Chooser
    fixed: bool
    pruning: Pruning | None = None
    growth: Growth | None = None

    def under(self, policy: Policy) -> Rounds:
        """The same with a policy's rules."""
        pruning, growth = getattr(policy, "pruning", None), getattr(policy, "growth", None)
        return replace(self, pruning=pruning, growth=growth)

    @staticmethod
    def config(body: Backbone) -> Any:
        """Of its mask path, or None."""
        return getattr(body.path, "config", None)

    def width(self, plans: list[Plan]) -> int:
        """Of the hidden states that saved drafts are conditioned or looped from; 0 where none is."""
        asked = any(map(self.condition, self.bodies)) or any(p.overlap and p.loop for p in plans)
        return self.bodies[0].config.hidden_size if asked else 0

    def condition(self, body: Backbone) -> Condition | None:
        """What conditions its drafts on the tokens before them; None where nothing does, and where drafts are drawn:
        what they are weighed by has to be the law that they were drawn from, and that is the marginals."""
        return None if self.chooser.draws else condition_of(body)

    def drafted(self, plan: Plan, redraft: bool = True) -> float:
        """What its draft passes run of a forward's layers; passes from the entry layer on count in part."""
        if not plan.drafts:
            return 0.0
        body, passes = self.bodies[plan.adapter], plan.passes if plan.loop else 1
        return (1 - self.config(body).entry / body.n_layers) * (passes if redraft else passes - 1)

    def play(
        self,
        plan: Plan,
        frame: Frame,
        size: int,
        redraft: bool,
        requests: list[Request],
        run: Callable[..., Any],
        clock: Clock | None,
    ) -> Tensor:
        """The round itself.

        Args:
            plan: what it does.
            frame: its requests.
            size: nodes of a drafted chain.
            redraft: draft in a pass of its own, in an overlapped round for those whom the last verification left
                nothing (`Slots.ready`); otherwise there is no pass, and they verify the anchor alone.
            requests: of its rows.
            run: runs the parts that need no host, as `Graphs` does.
            clock: marks the parts.

        Returns:
            [n, 2 + depth] long: `decode.settle`'s.
        """
        proposal, cut = self.candidates(plan, frame, size, redraft, requests, run), None
        if proposal.cut is not None:
            proposal, cut = self.shortened(proposal)
        if clock is not None:
            clock.lap("draft")
            if cut is not None and not self.fixed:  # elsewhere parts may be captured just now, which takes long
                self.listen(clock, plan, frame, proposal.tree.n_nodes, redraft)
        result = self.verify(plan, frame, size, proposal, requests, run, clock)
        if cut is not None and plan.chain:
            self.learn(plan, proposal.tree.tokens, cut.margins, result)
        return result

    def verify(
        self,
        plan: Plan,
        frame: Frame,
        size: int,
        proposal: Proposal,
        requests: list[Request],
        run: Callable[..., Any],
        clock: Clock | None = None,
    ) -> Tensor:
        """What follows the draft. See `play`."""
        slots, tree = self.slots, proposal.tree
        backbone = self.bodies[plan.adapter] if plan.overlap else verifier_of(self.bodies)
        groups = None
        if plan.overlap:
            groups = self._groups(plan, proposal)
        parts = (tree.tokens,) if tree.parents is None else (tree.tokens, tree.parents, tree.ancestors, tree.depths)
        hung = () if groups is None else (groups.nodes, groups.tokens)
        shapes = tuple(t.shape for t in (*parts, *hung))

        def forward(*inputs: Tensor) -> decode.Hidden:
            (tokens, *how), which = inputs[: len(parts)], inputs[len(parts) :]
            candidates = DraftTree(tokens)
            if how:
                candidates = DraftTree(tokens, how[0], paths=how[1], levels=how[2])
            hang = (Groups(*which), plan.block_size) if which else None
            return decode.verify(
                backbone, self.cache, slots.start[: frame.n], candidates, frame, hang, self.config(backbone)
            )

        hidden = run(("verify", frame, plan, shapes), forward, *parts, *hung)
        logits = backbone.logits(hidden.clean)  # [n, M, V]
        if clock is not None:
            clock.lap("verify")
        accepted = self.chooser.accept(requests, tree, logits, slots.start[: frame.n], slots.view(frame.n))
        if self.growth is not None:
            self.growth.observe(plan.adapter, tree, accepted.rows, slots.left[: frame.n] > 0)
        ready = None if groups is None else self._save(frame.n, plan, groups, accepted, hidden.draft)
        depth = min(tree.n_nodes, size)
        return decode.settle(self.cache, slots, frame, tree, accepted, hidden.taps, depth, ready)

    def candidates(
        self, plan: Plan, frame: Frame, size: int, redraft: bool, requests: list[Request], run: Callable[..., Any]
    ) -> Proposal:
        """What there is to verify. See `play`."""
        slots, n = self.slots, frame.n
        start, anchor = slots.start[:n], slots.anchor(n)
        if plan.lookup and size > 1:
            tree = lookup(slots.text[:n], start, size)
            if not self.fixed:  # rows that nobody guessed cost for nothing
                tree = DraftTree(tree.tokens[:, : int((tree.tokens >= 0).any(0).sum())])
            return Proposal(tree)
        if not plan.drafts or min(size, plan.nodes) == 1:
            return Proposal(DraftTree(anchor[:, None]))
        drafted, told = self._drafted(plan, frame, size, redraft, run)
        if plan.verify_length is not None:
            drafted = drafted[:, : plan.verify_length - 1]
        told = told.first(drafted.logits.shape[1])
        nodes = plan.tree_nodes if plan.tree else None
        logits, build = drafted.logits, self._builder(plan)
        given = self._given(plan, drafted, anchor) if build is DEFAULT else None
        tree = self.chooser.tree(requests, anchor, start, logits, nodes, slots.seed[:n], given, build)
        if not redraft:  # where the last verification ended without a draft, the anchor is all there is
            first = torch.arange(tree.n_nodes, device=start.device) == 0
            tree = replace(tree, tokens=torch.where(slots.ready[:n, None] | first, tree.tokens, -1))
        if tree.parents is not None:
            return Proposal(tree, cut=self._end(plan, frame, redraft, tree) if self.pruned(plan, size) else None)
        likely = cut = None
        if self._weighs(plan):
            likely = tops.certainty(logits) if told.sure is None else told.sure  # [n, M - 1]
            likely = torch.cat([torch.ones_like(likely[:, :1]), likely], 1)
        if self.pruned(plan, size):
            cut = self._cut(plan, frame, redraft, logits, told)
        return Proposal(tree, likely, cut, overlap.corrections(tree, logits) if plan.branches else None)

    # ---- rules

    def pruned(self, plan: Plan, size: int) -> bool:
        """Whether a rule is asked how much of a round's drafts is verified."""
        if min(size, plan.nodes) < 2:
            return False
        if plan.tree:
            return self.growth is not None and plan.rule == self.growth.rule and self.growth.end is not None
        return self.pruning is not None and plan.chain

    def _builder(self, plan: Plan) -> Builder:
        """What grows trees that no head conditions; a rule's own does so in any case."""
        if self.growth is None or plan.rule == RULES[0]:
            return DEFAULT
        return self.growth.builder(plan) or DEFAULT

    def _end(self, plan: Plan, frame: Frame, redraft: bool, tree: DraftTree) -> Cut:
        """Where the rule ends the trees."""
        assert self.growth is not None
        times = self.growth.times(plan, frame.n, self._context(frame), not redraft, self.fixed)
        return self.growth.cut(plan, tree, self._live(frame, redraft), times)

    def listen(self, clock: Clock, plan: Plan, frame: Frame, rows: int, redraft: bool) -> None:
        """Let the tree rule hear how long a round takes that verifies so many rows of each request."""
        if self.growth is not None and plan.tree:
            self.growth.listen(clock, plan, frame.n, rows, self._context(frame), not redraft)

    def _context(self, frame: Frame) -> int:
        """Committed positions, as far as the host knows."""
        return frame.n_keys or max(self.cache.lengths[frame.span])

    def _live(self, frame: Frame, redraft: bool) -> Tensor:
        """Requests that have a draft and may emit something. [n] bool"""
        live = self.slots.left[: frame.n] > 0
        return live if redraft else live & self.slots.ready[: frame.n]

    def _foretells(self, plan: Plan) -> bool:
        """Whether somebody asks what the path's heads say of a draft."""
        return plan.chain and (self.pruning is not None or self._weighs(plan))

    @staticmethod
    def _weighs(plan: Plan) -> bool:
        """Whether groups hang where a chain most probably ends."""
        return plan.groups is not None and not plan.branches

    def _cut(self, plan: Plan, frame: Frame, redraft: bool, logits: Tensor, told: Forecast) -> Cut:
        """What the rule wants. logits: [n, T, V]"""
        assert self.pruning is not None
        n, t = frame.n, logits.shape[1]
        times = self.pruning.times(plan, n, t, self._context(frame), not redraft, self.fixed)
        return self.pruning(plan, logits, told, self._live(frame, redraft), times)

    def shortened(self, proposal: Proposal) -> tuple[Proposal, Cut]:
        """The nodes that the rule leaves. The host waits for the draft here."""
        cut, tree = proposal.cut, proposal.tree
        assert cut is not None
        sizes = () if tree.parents is None else (BUCKETS,)
        return proposal.first(bucket(int(cut.drafts), tree.n_nodes, self.fixed, *sizes)), cut

    def learn(self, plan: Plan, tokens: Tensor, seen: Tensor | None, result: Tensor) -> None:
        """Tell the rule what came of a round. tokens: [n, M], seen: [n, T] margins, result: `decode.settle`'s"""
        assert self.pruning is not None
        count = result[:, 0]
        room = self.slots.left[: len(count)] + count - 1  # drafts that could be emitted before the round
        verified = torch.minimum((tokens[:, 1:] >= 0).sum(1), room.clamp(min=0))
        self.pruning.observe(plan.adapter, seen, verified, (count - 1).clamp(min=0))

    def _given(self, plan: Plan, drafted: decode.Draft, anchor: Tensor) -> Given | None:
        """What conditions a draft, or None.

        A loop's later passes know the tokens that its earlier ones chose by the marginals: its drafts stay as they are.
        """
        body = self.bodies[plan.adapter]
        condition, config = self.condition(body), self.config(body)
        if condition is None or plan.loop or drafted.states is None or not drafted.states.shape[1]:
            return None
        before = anchor
        if config.seed_row:  # whose output is the model's own
            before = torch.full_like(anchor, MASK)
        elif plan.overlap and body.part("calibrate") is not None:  # it has told a saved draft of its bonus already
            before = torch.where(self.slots.ready[: len(anchor)], MASK, anchor)
        return Given(condition, drafted.states, before, config.mask_id)

    def _groups(self, plan: Plan, proposal: Proposal) -> Groups:
        """The ends that get a draft of their own: all nodes, the likeliest, or those of RecGuide's branches."""
        tree, likely = proposal.tree, proposal.likely
        n, m = tree.tokens.shape
        if proposal.second is not None:
            return overlap.branches(tree, proposal.second, CORRECTIONS)
        if plan.kept is None or plan.kept >= m:
            return overlap.hidden(torch.arange(m, device=tree.tokens.device).expand(n, m))
        survives = overlap.survival(tree, likely) if likely is not None else None
        if survives is None:
            assert tree.scores is not None
            survives = tree.scores.exp()
        return overlap.hidden(overlap.keep(overlap.ends(tree, survives), plan.kept))

    def _drafted(
        self, plan: Plan, frame: Frame, size: int, redraft: bool, run: Callable[..., Any]
    ) -> tuple[decode.Draft, Forecast]:
        """The drafts of a round, made now or saved, and what the path's heads say of them.

        The later passes of a loop go on from saved drafts as from made ones, so that in an overlapped round only the
        first is spared."""
        body, told, made = self.bodies[plan.adapter], Forecast(), None
        given, config = (body, self.cache, self.slots, frame, size), self.config(body)
        how, prefix = ((plan.passes, plan.prefix), prefix_of(plan.prefix)) if plan.loop else ((1, None), None)
        first, key = (1 if plan.overlap else how[0]), (plan.adapter, frame, size, *how)
        if redraft:
            draft = partial(decode.draft, *given, config, first, prefix)
            made = drafted = run(("draft", first, *key), draft)
            if self._foretells(plan):
                told = forecast(body.path, made.states)
        if plan.overlap:
            drafted, told = self._saved(plan, frame.n, size, made, told)
        if plan.overlap and plan.loop:
            later = partial(decode.draft, *given, config, how[0], prefix)
            drafted = run(("loop", *key), later, drafted.logits, drafted.states)
            if self._foretells(plan):
                told = forecast(body.path, drafted.states)
        return drafted, told

    def _saved(
        self, plan: Plan, n: int, size: int, made: decode.Draft | None, told: Forecast
    ) -> tuple[decode.Draft, Forecast]:
        """The drafts that the last verification left, and what the heads said of them; of whom it left none, those
        that were made now, if they were. told: of what was made"""
        slots, path = self.slots, self.bodies[plan.adapter].path
        assert slots.saved is not None
        kept = decode.Draft(slots.saved, slots.states)[:n, : size - 1]
        said = slots.told.known(path, n, plan.block_size - 1).first(size - 1) if self._foretells(plan) else Forecast()
        if made is None:
            return kept, said
        ready = slots.ready[:n]
        return kept.where(ready, made), said.where(ready, told)

    def _save(self, n: int, plan: Plan, groups: Groups, accepted: Accepted, draft: Tensor) -> Tensor:
        """Keep the draft of the end that came. Returns where there is one, [n] bool."""
        slots, body = self.slots, self.bodies[plan.adapter]
        assert slots.saved is not None
        to, outcome = self.config(body), (accepted.last, accepted.bonus)
        logits, hit, corrected, states = overlap.saved(body, draft, groups, *outcome, to, body.part("calibrate"))
        slots.saved[:n, : plan.block_size - 1] = logits
        if slots.states is not None:
            slots.states[:n, : plan.block_size - 1] = corrected
        if self._foretells(plan):
            forecast(body.path, states).keep(slots.told)
        slots.ready[:n] = hit
        return hit


def verifier_of(bodies: list[Backbone]) -> Backbone:
    """The one whose forwards also note the features that some adapter reads of the last position.

    Raises:
        ValueError: several adapters read features.
    """
    readers = [b for b in bodies if b.n_features]
    if len(readers) > 1:
        raise ValueError("of the adapters loaded together only one may read features (taps) of the last position")
    return readers[0] if readers else bodies[0]


def require(policy: Policy, bodies: list[Backbone], chooser: Chooser) -> None:
    """Refuse plans that a mask path was not trained for, and drafts that the verifier does not take.

    Raises:
        ValueError: says what to do.
    """
    pruning = getattr(policy, "pruning", None)
    for plan in policy.plans:
        chooser.require(plan, getattr(policy, "growth", None))
        if plan.adapter >= len(bodies):
            raise ValueError(f"adapter={plan.adapter}: {len(bodies)} are loaded, counted from 0")
        path = bodies[plan.adapter].path
        plan.require(getattr(path, "config", None))
        if pruning is not None and plan.chain:
            pruning.require(plan, path, chooser.draws)


def plainly(key: Any, fn: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run as it is; what `Graphs` does inside a capture."""
    return fn(*inputs)
