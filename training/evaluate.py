"""Teacher-forced tau: how many tokens a round would emit, without decoding.

A group is drafted at every answer position at once, in forwards of the training kind. Replaying the rounds then needs
no model: start at the answer's first token (the prefill emits it), accept the slots that match the answer up to the
first miss, add the bonus, jump there. With greedy answers of the same model that is what decoding does, by the round.
At T = 1 a slot is not right or wrong but accepted with a chance, the overlap of the two distributions there, and the
rounds that an answer takes are an expectation (`selfspec.training.acceptance`), along the same given answers.

A path's heads correct its drafts as in decoding: a calibrator those that were drafted without their bonus, a Markov
or sampler head every slot by the token before it. That token is the text's own here, which is exact up to a round's
first miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec import tops
from selfspec.adapters import heads
from selfspec.backbone import MASK, Backbone
from selfspec.draft.block import ban_mask
from selfspec.draft.condition import CANDIDATES
from selfspec.stats import Stats, mean_tau, total
from selfspec.training import anchors as anchoring
from selfspec.training import noise
from selfspec.training.acceptance import expected_rounds
from selfspec.training.data import Answer
from selfspec.training.head import Head
from selfspec.training.objectives.tv import overlap
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
            right, chance = judge(backbone, head, pack, cache, clean, taps, batching.anchors, size, layout)
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


def judge(
    backbone: Backbone,
    head: Head,
    pack: Pack,
    cache,
    clean: Tensor,
    taps: Tensor | None,
    n: int,
    size: int,
    layout: str,
    few: int = CANDIDATES,
) -> tuple[Tensor, Tensor]:
    """Which drafts match, of a group at every slot of a pack.

    Args:
        backbone: with a mask path.
        head: of the backbone.
        pack: the documents.
        cache: of `run_clean`.
        clean: likewise, [N, S, d].
        taps: likewise.
        n: groups of a row and forward.
        size: B.
        layout: "known" or "hidden".
        few: candidates of a slot, where a head conditions them on the token before.

    Returns:
        1 or 0, and with what chance each is accepted at T = 1; -1 past the answer's end. [N, S, B - 1] long, float.
    """
    config, own = backbone.path.config, backbone.path.heads  # type: ignore[union-attr]
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
        drafts = draft_states(backbone, groups, cache, clean, taps).flatten(0, 1)  # [N * A, B - 1, d]
        calibrates = layout == "hidden" and "calibrator" in own
        if calibrates:
            drafts = heads.calibrated(own, backbone, drafts, pack.tokens.gather(1, groups.anchors).flatten())
        # the verifier's distribution of a slot's token stands on the clean row before it
        before = (chosen.clamp(min=0)[:, :, None] + steps - 1).clamp(max=clean.shape[1] - 1).flatten(1)
        target = clean.gather(1, before[:, :, None].expand(-1, -1, clean.shape[2])).flatten(0, 1)
        given = None
        if heads.conditioner(own) is not None:
            given = pack.tokens.gather(1, before).view(*chosen.shape, size - 1)
            # a seed row's output is the model's own, and a calibrator has told the first draft of its bonus already
            given = given.masked_fill((steps == 1) & (config.seed_row or calibrates), MASK).flatten()
        compared = _compare(head, drafts.flatten(0, 1), target, config.mask_id, given, few)
        guess, overlaps = (x.view(*chosen.shape, size - 1) for x in compared)
        labels = anchoring.following(pack, chosen, steps)
        match = torch.where(labels < 0, -1, (guess == labels).long()).to(torch.int8)
        real = chosen >= 0
        request = torch.arange(len(chosen), device=chosen.device)[:, None].expand_as(chosen)
        out[request[real], chosen[real]] = match[real]
        chance[request[real], chosen[real]] = torch.where(labels < 0, -1.0, overlaps.float())[real]
    return out.long(), chance


def _compare(
    head: Head, drafts: Tensor, target: Tensor, banned: int | None, before: Tensor | None, few: int
) -> tuple[Tensor, Tensor]:
    """The draft's guess in every row, and the two distributions' overlap.

    Args:
        head: of the backbone.
        drafts: [M, d]
        target: [M, d]
        banned: a token that is never guessed.
        before: [M] long, the token before each row's for the head that conditions on it, below 0 for a row that it
            leaves alone; None for a path without.
        few: candidates among which it chooses.

    Returns:
        [M] long, [M] float.
    """
    guesses, overlaps = [], []
    for start in range(0, len(drafts), head.chunk):
        at = slice(start, start + head.chunk)
        logits = ban_mask(head.logits(drafts[at]), banned)
        guess = logits.argmax(-1)
        if before is not None:
            ids = tops.ranked(logits, min(few, logits.shape[-1]))[1]  # decoding chooses among the same
            path = head.backbone.path
            logits = heads.conditioned(path.heads, head.backbone, drafts[at], before[at])  # type: ignore[union-attr]
            logits = ban_mask(logits, banned)
            guess = ids.gather(1, logits.gather(1, ids).argmax(-1, keepdim=True))[:, 0]
        guesses.append(guess)
        overlaps.append(overlap(logits, head.logits(target[at])))
    return torch.cat(guesses), torch.cat(overlaps)
