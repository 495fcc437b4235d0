"""Runs of steps that kernels do in a few launches, where there are kernels: each step alone takes several passes.

A run changes scores in one pass, in this order: repetition penalty, decay towards an end, presence and frequency
penalties, temperature; transformers applies them in that order, and where a caller has another one, the next run
begins. Whatever the order, what is banned stays banned (none of these lifts -inf), so bans of a run come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from selfspec.nodes import Nodes
from selfspec.steps import Ban, Bias, Decay, NGram, PresenceFrequency, Pure, Repetition, Step

SCALES = (Repetition, Decay, PresenceFrequency)  # and temperature, in order
EVER = 1 << 40  # tokens


@dataclass(frozen=True)
class Run:
    """Steps that are done together.

    Attributes:
        scales: some of `SCALES` and a temperature, one of each at most, in that order.
        bans: those that only ban.
        kept: constant tensors by device.
    """

    scales: tuple[Step, ...]
    bans: tuple[Step, ...]
    kept: dict[torch.device, tuple] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def reads_text(self) -> bool:
        """Whether some step needs the tokens of the text."""
        return any(s.reads_text for s in (*self.scales, *self.bans))

    @cached_property
    def reads(self) -> bool:
        """Whether some step needs to know of the text, if only its length."""
        return not all(s.of_scores for s in (*self.scales, *self.bans))

    def __call__(self, nodes: Nodes | None, logits: Tensor) -> Tensor:
        """[N, M, V], left as they are -> float32 [N, M, V]; see `Recipe`."""
        from selfspec.kernels import processors as kernels

        if logits.device not in self.kept:
            self.kept[logits.device] = self._constants(kernels, logits.device)
        how, table = self.kept[logits.device]
        place = kernels.Place.of(nodes, self.reads_text) if nodes is not None and self.reads else None
        scores = kernels.scale(logits, how, place)
        for step in self.bans:
            if isinstance(step, NGram):
                assert place is not None
                kernels.grams(scores, place, step.size, step.prompt_only)
        if table is not None:
            kernels.strike(scores, table, place)
        return scores

    def _constants(self, kernels, device: torch.device) -> tuple:
        """What changes the scores, and the table of banned tokens or None."""
        how: dict[str, Any] = {}
        for step in self.scales:
            match step:
                case Repetition():
                    how["repetition"] = step.penalty, step.first
                case Decay():
                    ids, growth = torch.tensor(sorted(set(step.ids))), torch.tensor(step.table())
                    how["decay"] = ids.to(device), growth.to(device), step.start
                case PresenceFrequency():
                    how["counted"] = step.presence, step.frequency, step.skip
                case Pure():
                    how["temperature"] = step.processor.temperature
        lines = [line for step in self.bans for line in _lines(step)]
        if not lines:
            return kernels.Scaling(**how), None
        k = max(len(before) for *_, before in lines)
        rows = [[*line, *(-1,) * (k - len(before)), *before] for *line, before in lines]
        return kernels.Scaling(**how), torch.tensor(rows).to(device)


def _lines(step: Step) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """Tokens that it bans, from and before which length of the answer, and after which tokens."""
    if isinstance(step, Ban):
        low, high = -EVER if step.at is None else step.at, EVER if step.at is None else step.at + 1
        high = high if step.below is None else step.below
        return [(token, low, high, ()) for token in step.ids]
    if isinstance(step, Bias):
        return [(token, -EVER, EVER, tuple(before)) for (*before, token), _ in step.sequences]
    return []


def joined(steps: Sequence[Step]) -> list[Run | Step]:
    """The same steps, those together that can be."""
    out: list[Run | Step] = []
    scales: list[Step] = []
    bans: list[Step] = []

    def close() -> None:
        if scales or bans:
            out.append(Run(tuple(scales), tuple(bans)))
            scales.clear()
            bans.clear()

    for step in steps:
        rank = _rank(step)
        if rank is None:
            close()
            out.append(step)
        elif rank < 0:
            bans.append(step)
        else:
            if scales and _rank(scales[-1]) >= rank:  # type: ignore[operator]
                close()
            scales.append(step)
    close()
    return out


def _rank(step: Step) -> int | None:
    """Its place in a run; -1 for a ban, None for what no run holds."""
    if isinstance(step, Pure):
        return len(SCALES) if step.key[0] == "TemperatureLogitsWarper" else None
    if isinstance(step, Ban | NGram) or (isinstance(step, Bias) and all(b == -math.inf for _, b in step.sequences)):
        return -1
    return next((i for i, kind in enumerate(SCALES) if isinstance(step, kind)), None)
