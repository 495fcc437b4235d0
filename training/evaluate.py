"""Teacher-forced tau: how many tokens a round would emit, without decoding.

A group is drafted at every answer position at once, in forwards of the training kind. Replaying the rounds then needs
no model: start at the answer's first token (the prefill emits it), accept the slots that match the answer up to the
first miss, add the bonus, jump there. With greedy answers of the same model that is what decoding does, by the round.
At T = 1 a slot is not right or wrong but accepted with a chance, the overlap of the two distributions there, and the
rounds that an answer takes are an expectation (`selfspec.training.acceptance`), along the same given answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.backbone import Backbone
from selfspec.stats import Stats, mean_tau, total
from selfspec.training import anchors as anchoring
from selfspec.training import noise
from selfspec.training.acceptance import expected_rounds, overlap
from selfspec.training.data import Answer
from selfspec.training.head import Head
from selfspec.training.pack import Pack, Packer
from selfspec.training.step import draft_states, run_clean


@dataclass(frozen=True)
class Batching:
    """Shapes of evaluation forwards; the trainer's own, so that nothing is compiled twice.

    Attributes:
        length: S, tokens of a packed row.
        rows: N, packed rows.
        anchors: A, groups of a packed row and forward.
    """

    length: int
    rows: int
    anchors: int


@torch.no_grad()
def evaluate(
    backbone: Backbone,
    head: Head,
    answers: Sequence[Answer],
    batching: Batching,
    layouts: Sequence[str] = ("known",),
    block_size: int | None = None,
) -> dict[str, dict]:
    """Teacher-forced tau of a mask path on answers of its own model.

    Args:
        backbone: with a `MaskPathModel`.
        head: of the backbone.
        answers: the model's greedy answers; those that do not fit a row are left out.
        batching: of the forwards.
        layouts: "known" drafts once the bonus is there; "hidden" drafts beside the verification (the first round of an
            answer is a known one, as there is nothing to ride with).
        block_size: B; None takes the path's own.

    Returns:
        For each layout `{tau, mean_tau, tau_t1, rounds, tokens, responses, acceptance}`; `acceptance[k]` is the share
        of rounds that take slot k + 1 among those that took every slot before it and had one to take; `tau_t1` is
        tokens per expected round at T = 1.
    """
    size = block_size or backbone.path.config.block_size  # type: ignore[union-attr]
    fitting = [a for a in answers if len(a) <= batching.length]
    out: dict[str, dict] = {"left_out": len(answers) - len(fitting)}  # type: ignore[dict-item]
    if not any(len(a.answer) >= 2 for a in fitting):
        return out
    packer = Packer(fitting, batching.length, batching.rows)
    replays: dict[str, list[tuple[Stats, Tensor]]] = {layout: [] for layout in layouts}
    expected = dict.fromkeys(layouts, 0.0)
    for plan in packer.in_order():
        pack = packer.pack(plan).to(backbone.device)
        cache, clean, taps = run_clean(backbone, pack)
        matches, chances = {}, {}
        for layout in sorted({"known", *layouts}):
            right, chance = _matches(backbone, head, pack, cache, clean, taps, batching.anchors, size, layout)
            matches[layout], chances[layout] = right.cpu(), chance.cpu()
        segments, able = pack.segments.cpu(), anchoring.eligible(pack).cpu()
        for i, docs in enumerate(plan):
            for segment in range(len(docs)):
                at = able[i] & (segments[i] == segment)
                for layout in layouts:
                    right = matches[layout][i][at]
                    replays[layout].append(replay(right, matches["known"][i][at]))
                    rows = [[c for c in row if c >= 0] for row in chances[layout][i][at].tolist()]
                    start = [c for c in chances["known"][i][at][0].tolist() if c >= 0]
                    expected[layout] += expected_rounds(rows, start)
    for layout, results in replays.items():
        stats = [s for s, _ in results]
        tries = torch.stack([t for _, t in results]).sum(0).tolist()
        whole = total(stats)
        out[layout] = {
            "tau": whole.tau,
            "mean_tau": mean_tau(stats),
            "tau_t1": whole.tokens / expected[layout],
            "rounds": whole.rounds,
            "tokens": whole.tokens,
            "responses": len(stats),
            "acceptance": [round(tries[1][k] / n, 4) if (n := tries[0][k]) else None for k in range(size - 1)],
        }
    return out


def replay(matches: Tensor, first: Tensor | None = None) -> tuple[Stats, Tensor]:
    """The rounds of one answer of n tokens.

    Args:
        matches: [n - 1, T] long, for a group at each position but the last: 1 where a slot matches, 0 where it misses,
            -1 past the end.
        first: the same for the first round, when that is drafted in another layout.

    Returns:
        The rounds, and [2, T] how often each slot was reached and taken.
    """
    stats, n = Stats(), len(matches)
    tries = torch.zeros(2, matches.shape[1], dtype=torch.long)
    at = 0
    while at < n:
        row = matches[at] if at or first is None else first[at]
        reached = torch.cat([torch.ones(1, dtype=torch.long), (row == 1).long()[:-1]]).cumprod(0) * (row >= 0)
        taken = int((row == 1).long().cumprod(0).sum())
        tries += torch.stack([reached, reached * (row == 1)])
        emitted = min(taken + 1, n - at)
        stats.count(emitted)
        at += emitted
    return stats, tries


def _matches(
    backbone: Backbone,
    head: Head,
    pack: Pack,
    cache,
    clean: Tensor,
    taps: Tensor | None,
    n: int,
    size: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """For a group at every slot of a pack, which of its drafts match, 1 or 0, and with what chance each is accepted at
    T = 1; -1 past the end. [N, S, B - 1] long, [N, S, B - 1] float"""
    config = backbone.path.config  # type: ignore[union-attr]
    able = anchoring.eligible(pack)
    slots = torch.arange(able.shape[1], device=able.device).expand_as(able)
    order = torch.where(able, slots, able.shape[1]).sort(1).values  # eligible slots first
    order = order.masked_fill(order == able.shape[1], -1)
    out = torch.full((*able.shape, size - 1), -1, dtype=torch.int8, device=able.device)
    chance = torch.full(out.shape, -1.0, device=able.device)
    steps = torch.arange(1, size, device=able.device)
    for start in range(0, int(able.sum(1).max()), n):
        chosen = order[:, start : start + n]
        chosen = torch.nn.functional.pad(chosen, (0, n - chosen.shape[1]), value=-1)
        hidden_bonus = torch.full_like(chosen, layout == "hidden", dtype=torch.bool)
        groups = anchoring.path_groups(config, pack, chosen, size, hidden_bonus)
        groups = noise.fill(groups, pack, config.noise, backbone.vocab_size, config.mask_id, None)
        drafts = draft_states(backbone, groups, cache, clean, taps).flatten(0, 2)
        # the verifier's distribution of a slot's token stands on the clean row before it
        before = (chosen.clamp(min=0)[:, :, None] + steps - 1).clamp(max=clean.shape[1] - 1).flatten(1)
        target = clean.gather(1, before[:, :, None].expand(-1, -1, clean.shape[2])).flatten(0, 1)
        guess, overlaps = (x.view(*chosen.shape, size - 1) for x in _compare(head, drafts, target, config.mask_id))
        labels = anchoring.following(pack, chosen, steps)
        match = torch.where(labels < 0, -1, (guess == labels).long()).to(torch.int8)
        real = chosen >= 0
        request = torch.arange(len(chosen), device=chosen.device)[:, None].expand_as(chosen)
        out[request[real], chosen[real]] = match[real]
        chance[request[real], chosen[real]] = torch.where(labels < 0, -1.0, overlaps.float())[real]
    return out.long(), chance


def _compare(head: Head, drafts: Tensor, target: Tensor, banned: int | None) -> tuple[Tensor, Tensor]:
    """The draft's best token of every row, and the two distributions' overlap. [M, d], [M, d] -> [M], [M]"""
    guesses, overlaps = [], []
    for d, t in zip(drafts.split(head.chunk), target.split(head.chunk), strict=True):
        logits = head.logits(d)
        if banned is not None:
            logits[:, banned] = float("-inf")
        guesses.append(logits.argmax(-1))
        overlaps.append(overlap(head.logits(t), logits))
    return torch.cat(guesses), torch.cat(overlaps)
