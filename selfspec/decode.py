"""The one round: draft a tree, verify it in one forward, commit the path that the base model itself would have taken.

Plain decoding is a round whose tree is the anchor alone. An overlapped round hangs draft groups on the tree's nodes, so
that the next draft comes out of the same forward. Pure functions over tensors of static shape: what changes from round
to round stands in `Slots` and in the cache, so that a CUDA graph can hold a whole round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec import kernels, rows
from selfspec.backbone import Backbone, Hidden
from selfspec.cache import KVCache
from selfspec.draft import DraftTree
from selfspec.draft.block import guesses
from selfspec.draft.block import states as one_pass
from selfspec.draft.loop import Prefix
from selfspec.draft.loop import propose as loop
from selfspec.draft.overlap import Groups, attach
from selfspec.slots import Slots
from selfspec.verify import Accepted


@dataclass(frozen=True)
class Draft:
    """What a draft says of the positions after the anchors.

    Attributes:
        logits: [n, T, V] marginals; the mask's id is banned.
        states: [n, T, d] hidden states that they were read from, for the path's heads; None where nobody asks.
    """

    logits: Tensor
    states: Tensor | None = None

    def __getitem__(self, at: tuple[slice, slice]) -> Draft:
        """Of some requests and positions."""
        return Draft(self.logits[at], None if self.states is None else self.states[at])

    def where(self, chosen: Tensor, other: Draft) -> Draft:
        """Of the chosen requests this one, of the rest the other; states if this one has them. chosen: [n] bool"""
        chosen = chosen[:, None, None]
        logits = torch.where(chosen, self.logits, other.logits)
        if self.states is None or other.states is None:
            return Draft(logits)
        return Draft(logits, torch.where(chosen, self.states, other.states))


@dataclass(frozen=True)
class Frame:
    """Which requests a forward is for, and how far attention has to read.

    Attributes:
        first: slot of the first request.
        n: requests, in neighbouring slots.
        n_keys: K of `KVCache.bind`; None takes it from the lengths that the host knows.
    """

    first: int
    n: int
    n_keys: int | None = None

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.n)


def prefill(
    backbone: Backbone,
    cache: KVCache,
    slots: Slots,
    frame: Frame,
    counts: Tensor,
    base: Tensor | None = None,
    *,
    width: int,
) -> tuple[Tensor, Tensor | None]:
    """Run the next positions of some prompts. Nothing is committed: `start` stays where it is.

    Args:
        backbone: the model.
        cache: committed up to each request's start.
        slots: of the requests.
        frame: which of them.
        counts: [n] long, positions to run of each, from its start on; at most width.
        base: [n] long, slots of the requests, instead of the frame's; see `KVCache.bind`.
        width: rows of the forward.

    Returns:
        [n, d] hidden state of each one's last position, and its features [n, F] where the mask path wants them.
    """
    start, text = slots.start[frame.span], slots.text[frame.span]
    if base is not None:
        start, text = slots.start[base], slots.text[base]
    at = start[:, None] + torch.arange(width, device=start.device)
    ids = text.gather(1, at.clamp(max=text.shape[1] - 1))
    first = frame.first if base is None else base
    hidden = backbone(rows.chain(start, width), cache, ids, first=first, n_keys=frame.n_keys)
    last = (counts - 1).clamp(min=0)
    return _at(hidden.clean, last), None if hidden.taps is None else _at(hidden.taps, last)


def draft(
    backbone: Backbone,
    cache: KVCache,
    slots: Slots,
    frame: Frame,
    size: int,
    path,
    passes: int = 1,
    prefix: Prefix | None = None,
    logits: Tensor | None = None,
    states: Tensor | None = None,
) -> Draft:
    """The size - 1 positions after the anchors, from one draft pass or a loop, whose passes keep a `prefix`.

    With logits [n, size - 1, V] and states [n, size - 1, d] of a draft that is there, of the loop's later passes."""
    features = slots.features[: frame.n] if backbone.n_features and slots.features is not None else None
    anchor, start = slots.anchor(frame.n), slots.start[: frame.n]
    if passes > 1:
        first = None if logits is None or states is None else (logits, states)
        looped = loop(backbone, cache, anchor, start, size, path, features, frame.n_keys, passes, prefix, first=first)
        return Draft(looped.logits, looped.states)
    hidden = one_pass(backbone, cache, anchor, start, size, path, features, frame.n_keys)
    return Draft(guesses(backbone, hidden, path), hidden)


def verify(
    backbone: Backbone,
    cache: KVCache,
    start: Tensor,
    tree: DraftTree,
    frame: Frame,
    hang: tuple[Groups, int] | None = None,
    path=None,
) -> Hidden:
    """One forward over the tree, with draft groups on some of its nodes.

    Args:
        backbone: the model.
        cache: committed up to the anchor's position.
        start: [n] long, the anchors' positions.
        tree: the candidates.
        frame: which requests.
        hang: the groups and the rows of each.
        path: the mask path's configuration, where there are groups.
    """
    clean = rows.chain(start, tree.n_nodes)
    if tree.parents is not None:
        clean = rows.tree(start, tree.parents, tree.ancestors, tree.depths)
    layout, inputs = (clean, None) if hang is None else attach(clean, *hang, path.causal, bool(path.taps))
    return backbone(layout, cache, tree.tokens.clamp(min=0), inputs, first=frame.first, n_keys=frame.n_keys)


def settle(
    cache: KVCache,
    slots: Slots,
    frame: Frame,
    tree: DraftTree,
    accepted: Accepted,
    taps: Tensor | None,
    depth: int,
    ready: Tensor | None = None,
) -> Tensor:
    """Keep the accepted rows and move on to the bonus token.

    Args:
        cache: of the verify forward.
        slots: of the requests; those that may emit nothing stay as they are.
        frame: which requests.
        tree: what was verified.
        accepted: the path.
        taps: [n, M, F] features of the tree's nodes, where the mask path wants them.
        depth: nodes of the tree's longest path.
        ready: [n] bool, whether a draft for the next round was saved; None if not.

    Returns:
        [n, 2 + depth] long: how many tokens each request emits, the tokens, and `ready`.
    """
    text, start, left = slots.text[frame.span], slots.start[frame.span], slots.left[frame.span]  # views
    if tree.parents is not None:  # before starts move on
        cache.compact(accepted.rows[:, :depth], start, frame.first)
    out = move_on(text, start, left, accepted.count, accepted.tokens[:, :depth], ready)
    if taps is not None:
        assert slots.features is not None
        features = slots.features[frame.span]
        features.copy_(torch.where(out[:, :1] > 0, _at(taps, accepted.last), features))
    return out


def move_on(text: Tensor, start: Tensor, left: Tensor, count: Tensor, tokens: Tensor, ready: Tensor | None) -> Tensor:
    """Write what is emitted behind each text, and advance starts and budgets, all in place.

    Args:
        text: [n, W] long; the last column takes what nobody wants.
        start: [n] long
        left: [n] long
        count: [n] long, tokens accepted, of which `left` may be emitted.
        tokens: [n, depth] long
        ready: [n] bool, or None for none.

    Returns:
        See `settle`.
    """
    if kernels.serve(text):
        from selfspec.kernels import settle as kernel

        return kernel.move_on(text, start, left, count, tokens, ready)
    return torch_move_on(text, start, left, count, tokens, ready)


def torch_move_on(
    text: Tensor, start: Tensor, left: Tensor, count: Tensor, tokens: Tensor, ready: Tensor | None
) -> Tensor:
    """The same by torch."""
    count, step = torch.minimum(count, left), rows.steps(tokens.shape[1], start.device)
    at = torch.where(step < count[:, None], start[:, None] + 1 + step, text.shape[1] - 1)
    text.scatter_(1, at, tokens)
    start += count
    left -= count
    saved = torch.zeros_like(count) if ready is None else ready.long()
    return torch.cat([count[:, None], tokens, saved[:, None]], 1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [n, C, ...], index [n] -> [n, ...]"""
    return values[rows.steps(len(index), index.device), index]
