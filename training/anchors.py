"""Anchors: where draft groups start in packed answers, what their rows hold, and what each row should predict.

A group of B rows starts at an anchor, an answer position that at least one more answer token follows; it sees prefix
positions below the anchor's, of its own document (random anchors: DFlash, arXiv 2602.06036). With the bonus known
slot 0 holds the anchor's token, with the bonus hidden a mask. Same-position prediction: slot j's label is the token at
the anchor's position + j; a shifted path predicts one further. Behind a seed row (UNO, arXiv 2609.04010) the anchor is
a clean row that the group sees, and slot 0 stands one position after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.adapters import MaskPathConfig
from selfspec.backbone import MASK, DraftRows
from selfspec.rows import RowLayout
from selfspec.training.pack import Pack

IGNORE = -100


@dataclass(frozen=True)
class Groups:
    """Draft groups over a pack, with what they should predict.

    Attributes:
        layout: the draft rows behind the pack's S prefix slots.
        rows: their inputs; features are filled in once the clean rows have run.
        anchors: [N, A] long, slot of each group's anchor in the pack; 0 for padding.
        labels: [N, A, B] long, `IGNORE` where a row predicts nothing.
        steps: [B] long, how many tokens after the anchor each row predicts.
        first: first row that may have a label; rows before it never do.
        level: [N, A] share of a group's unknown slots that are masked, or None where all are.
    """

    layout: RowLayout
    rows: DraftRows
    anchors: Tensor
    labels: Tensor
    steps: Tensor
    first: int = 0
    level: Tensor | None = None

    def charged(self) -> tuple[Tensor, Tensor]:
        """Steps [T] and labels [N * A, T] of the rows that may have a label."""
        return self.steps[self.first :], self.labels[:, :, self.first :].flatten(0, 1)


def eligible(pack: Pack) -> Tensor:
    """Slots that may be anchors. bool [N, S]"""
    follows = torch.zeros_like(pack.answer)
    follows[:, :-1] = pack.answer[:, 1:] & (pack.segments[:, 1:] == pack.segments[:, :-1])
    return pack.answer & follows


def choose(pack: Pack, n: int, noise: Tensor) -> Tensor:
    """The n eligible slots of every row with the greatest numbers, in order of their slots; -1 pads.

    Args:
        pack: the documents.
        n: anchors of a row.
        noise: [N, S] numbers that are not negative, a random one for every slot.

    Returns:
        [N, n] long, without repeats.
    """
    able = eligible(pack)
    noise = noise.masked_fill(~able, -1)
    n_able = min(n, able.shape[1])
    value, slot = noise.topk(n_able, 1)
    last = able.shape[1]
    slot = slot.masked_fill(value < 0, last).sort(1).values
    slot = slot.masked_fill(slot == last, -1)
    return torch.nn.functional.pad(slot, (0, n - n_able), value=-1)


def groups(
    pack: Pack,
    anchors: Tensor,
    size: int,
    hidden: Tensor | None = None,
    splits: Tensor | None = None,
    shift: bool = False,
    causal: bool = False,
    seed: bool = False,
    ends: Tensor | None = None,
) -> Groups:
    """Draft groups that start at the given anchors.

    Args:
        pack: the documents.
        anchors: [N, A] long, slots in the pack, -1 pads.
        size: B, rows of a group.
        hidden: [N, A] bool, groups whose slot 0 is a mask; None means none.
        splits: [N, A] long, slots 1..s of a group hold their tokens and predict nothing (a loop's second pass).
        shift: rows predict the token after their own position.
        causal: groups are causal.
        seed: the anchor is a clean row before the group.
        ends: [N, A] long, last token after the anchor that a group is charged for; None charges for all.
    """
    n, s = pack.tokens.shape
    device = anchors.device
    real = anchors >= 0
    at = anchors.clamp(min=0)
    slots = torch.arange(size, device=device)
    ahead = slots + seed  # position of a row, from the anchor's
    row = at[:, :, None] + ahead  # [N, A, B]
    target = row + 1 if shift else row

    def inside(index: Tensor) -> Tensor:
        same = _at(pack.segments, index) == _at(pack.segments, at)[:, :, None]
        return (index < s) & same & _at(pack.answer, index) & real[:, :, None]

    known = (ahead == 0).expand_as(row)
    if hidden is not None:
        known = known & ~hidden[:, :, None]
    if splits is not None:
        known = known | ((slots > 0) & (slots <= splits[:, :, None]))
    known = known & inside(row)
    tokens = torch.where(known, _at(pack.tokens, row), MASK)
    labels = torch.where(inside(target), _at(pack.tokens, target), IGNORE)
    labels = labels.masked_fill(torch.cat([known[..., 1:], known[..., :1] & False], -1) if shift else known, IGNORE)
    steps = ahead + shift
    if ends is not None:
        labels = labels.masked_fill(steps > ends[:, :, None], IGNORE)

    position = _at(pack.positions, at).masked_fill(~real, 0)  # [N, A]
    group = torch.where(real, torch.arange(at.shape[1], device=device), -1)

    def rows(x: Tensor) -> Tensor:
        return x.repeat_interleave(size, 1)

    segments = _at(pack.segments, at).clamp(min=0)
    layout = RowLayout(
        positions=(position[:, :, None] + ahead).flatten(1),
        start=torch.full((n,), s, dtype=torch.long, device=device),
        n_clean=0,
        attach=torch.full((n, at.shape[1] * size), -1, dtype=torch.long, device=device),
        group=rows(group),
        limit=rows(position + seed),
        causal=causal,
        key_positions=pack.positions,
        segments=rows(segments),
        key_segments=pack.segments,
        group_size=size,
    )
    inputs = DraftRows(tokens.flatten(1), slots.repeat(at.shape[1]).expand(n, -1))
    return Groups(layout, inputs, at, labels, steps, int(hidden is None and not shift))


def path_groups(
    path: MaskPathConfig,
    pack: Pack,
    anchors: Tensor,
    block_size: int | None = None,
    hidden: Tensor | None = None,
    splits: Tensor | None = None,
    ends: Tensor | None = None,
) -> Groups:
    """The groups that a path drafts a block of `block_size` with, the trained one by default; see `groups`."""
    rows = path.rows(block_size or path.block_size)
    return groups(pack, anchors, rows, hidden, splits, path.shift, path.causal, path.seed_row, ends)


def following(pack: Pack, anchors: Tensor, steps: Tensor) -> Tensor:
    """The answer's tokens so many after each anchor, `IGNORE` past its end.

    Args:
        pack: the documents.
        anchors: [N, A] long, -1 pads.
        steps: [T] long.

    Returns:
        [N, A, T] long
    """
    at = anchors.clamp(min=0)
    index = at[:, :, None] + steps
    same = _at(pack.segments, index) == _at(pack.segments, at)[:, :, None]
    inside = (index < pack.tokens.shape[1]) & same & _at(pack.answer, index) & (anchors >= 0)[:, :, None]
    return torch.where(inside, _at(pack.tokens, index), IGNORE)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [N, S], index [N, ...] -> [N, ...]; indices past the end read the last slot."""
    flat = index.clamp(max=values.shape[1] - 1).flatten(1)
    return values.gather(1, flat).view_as(index)
