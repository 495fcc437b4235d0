"""What the objectives read of a forward: label probabilities, and on demand distributions, heads, second opinions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from selfspec.adapters import heads
from selfspec.backbone import Backbone
from selfspec.training import anchors as anchoring
from selfspec.training.anchors import Groups
from selfspec.training.head import Head
from selfspec.training.objectives.slots import Measure, Slots
from selfspec.training.pack import Pack
from selfspec.training.step import run_clean, run_draft, run_verifier


class Rows:
    """Implements `objectives.slots.Readout` for one micro-batch of G groups of T slots.

    Args:
        head: the model's.
        hidden: [G, T, d] draft rows.
        clean: [G, T, d] clean rows that predict the same tokens.
        labels: [G, T] long, 0 where there is none.
        steps: [T] long.
        before: [G, T] long, the text's token before each label.
        bonus: [G] long, the text's token at slot 0 of a hidden group.
        heads: of the mask path.
        policy: the verifier's hidden states for the same slots after the draft's own tokens, [G, T, d].
        skip: slots before the first draft: 1 where slot 0 may be a hidden bonus.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        clean: Tensor,
        labels: Tensor,
        steps: Tensor,
        before: Tensor,
        bonus: Tensor,
        heads: nn.ModuleDict,
        policy: Callable[[], Tensor] | None = None,
        skip: int = 0,
    ):
        self.head, self.hidden, self.clean, self.labels, self.steps = head, hidden, clean, labels, steps
        self.before, self.bonus, self.heads, self.policy, self.skip = before, bonus, heads, policy, skip
        self._kept: dict[tuple, Tensor] = {}  # several terms may read the same

    def measure(self, fn: Measure, *scales: Tensor, **options) -> Tensor:
        """See `Readout`."""
        if scales:
            return self._against(self.clean, fn, *scales, **options)
        key = (fn, *sorted(options.items()))
        if key not in self._kept:
            self._kept[key] = self._against(self.clean, fn, **options)
        return self._kept[key]

    @torch.no_grad()
    def verifier_logp(self) -> Tensor:
        """See `Readout`."""
        return self._logp(self.clean)

    def on_policy(self, fn: Measure, **options) -> Tensor:
        """See `Readout`."""
        if self.policy is None:
            raise ValueError("on-policy terms need the verifier: pass `verifier` to `read`")
        return self._against(self.policy(), fn, **options)

    def corrected(self, name: str, detach: bool) -> Tensor:
        """See `Readout`."""
        hidden = self.hidden.detach() if detach else self.hidden
        if name == "markov":
            correct, given = heads.conditioner(self.heads), self.before
        else:
            correct, given = self.heads[name], self.bonus[:, None].expand_as(self.before)
        assert correct is not None
        return self._logp(correct(hidden, self.head.backbone.embed(given)))

    def predicted(self, name: str, detach: bool) -> Tensor:
        """See `Readout`."""
        hidden = self.hidden.detach() if detach else self.hidden
        if name == "length":
            return self.heads[name](hidden[:, self.skip :])
        return self.heads[name](hidden, self.steps)

    def _logp(self, hidden: Tensor) -> Tensor:
        return self.head.logp(hidden.flatten(0, 1), self.labels.flatten())[0].view(self.labels.shape)

    def _against(self, clean: Tensor, fn: Measure, *scales: Tensor, **options) -> Tensor:
        rows = (self.hidden.flatten(0, 1), clean.flatten(0, 1), *(s.flatten() for s in scales))
        return self.head.measure(fn, *rows, **options).view(self.labels.shape)


def read(
    backbone: Backbone,
    head: Head,
    pack: Pack,
    groups: Groups,
    progress: float | Tensor = 1.0,
    verifier: Backbone | None = None,
) -> Slots:
    """Run a micro-batch.

    Args:
        backbone: with the mask path in training.
        head: of the backbone.
        pack: the documents.
        groups: the draft groups over them.
        progress: share of the schedule that is done.
        verifier: of `step.verifier_of`, for on-policy terms.

    Returns:
        What the objectives read, of G = N * A groups.
    """
    path = backbone.path
    cache, clean, taps = run_clean(backbone, pack)
    hidden = run_draft(backbone, groups, cache, taps)[:, :, groups.first :].flatten(0, 1)  # [G, T, d]
    steps, labels = groups.charged()
    known = labels.clamp(min=0)
    logp, hits = (x.view(labels.shape) for x in head.logp(hidden.flatten(0, 1), known.flatten()))
    source = (groups.anchors[:, :, None] + steps - 1).clamp(0, clean.shape[1] - 1).flatten(1)  # [N, A * T]
    teacher = clean.gather(1, source[:, :, None].expand(-1, -1, clean.shape[2])).view(hidden.shape)
    before = pack.tokens.gather(1, source).view(labels.shape)
    bonus = pack.tokens.gather(1, groups.anchors).flatten()  # [G]
    config = path.config  # type: ignore[union-attr]
    policy, nearest = None, groups.first + config.shift + config.seed_row  # the first slot's step

    def judged() -> Tensor:
        assert verifier is not None
        guess = head.argmax(hidden.detach().flatten(0, 1), config.mask_id).view(labels.shape)
        block = own_block(pack, groups, guess, nearest, config.noise != "uniform", int(config.seed_row))
        after = run_verifier(verifier, pack, cache, groups.anchors, block).flatten(0, 1)[:, max(nearest - 1, 0) :]
        return torch.cat([teacher[:, :1], after], 1) if nearest == 0 else after

    if verifier is not None:
        policy = judged
    rows = Rows(head, hidden, teacher, known, steps, before, bonus, path.heads, policy, int(nearest == 0))  # type: ignore
    level = None if groups.level is None else groups.level.flatten().to(logp.dtype)
    return Slots(steps, labels >= 0, logp, hits, level, progress, rows)


def own_block(pack: Pack, groups: Groups, guess: Tensor, nearest: int, shows: bool, seed: int) -> Tensor:
    """The block that a draft would propose, the anchor in front: what it was shown, and its guesses elsewhere.

    Args:
        pack: the documents.
        groups: the draft groups over them.
        guess: [G, T] long, the most probable token of every slot.
        nearest: how many tokens after the anchor the first slot predicts.
        shows: tokens in the groups' rows are the text's own; otherwise they are noise.
        seed: positions from the anchor to a group's first row.

    Returns:
        [N, A, L] long: tokens 0..L-1 after the anchor, L the last slot's step.
    """
    n, a = groups.anchors.shape
    last = nearest + guess.shape[1] - 1
    ahead = torch.arange(last, device=guess.device)
    text = anchoring.following(pack, groups.anchors, ahead).clamp(min=0)  # [N, A, L]
    own = text.clone()
    first = max(nearest, 1)
    own[:, :, first:] = guess.view(n, a, -1)[:, :, first - nearest : last - nearest]
    if shows:
        held = groups.rows.tokens.view(n, a, -1) >= 0  # by row; row j stands `seed` + j after the anchor
        held = torch.nn.functional.pad(held, (seed, max(0, last - seed - held.shape[2])))[:, :, :last]
        own = torch.where(held, text, own)
    return torch.where(ahead == 0, text, own)
