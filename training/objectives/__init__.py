"""Training objectives: small dataclasses in a registry, one file each, composable by name and weight.

An objective turns per-slot quantities into a sum over slots, and says what the sum is divided by. The divisor depends
on the labels alone, so that it can be added up over micro-batches and processes before any of them runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec.training.objectives.ce import CrossEntropy
from selfspec.training.objectives.dpace import DPace
from selfspec.training.objectives.kl import ForwardKL

OBJECTIVES: dict[str, type] = {"ce": CrossEntropy, "dpace": DPace, "kl": ForwardKL}


@dataclass(frozen=True)
class Slots:
    """What is known of G groups of T slots.

    Attributes:
        steps: [T] long, how many tokens after the anchor a slot predicts: 1 for the first draft, 0 for a hidden bonus.
        valid: [G, T] bool, slots with a label.
        logp: [G, T] log-probability of the label; anything where there is none.
        kl: [G, T] divergences that objectives asked for, by top_k.
    """

    steps: Tensor
    valid: Tensor
    logp: Tensor
    kl: dict[int | None, Tensor] = dataclasses.field(default_factory=dict)


class Objective(Protocol):
    """One loss term."""

    def total(self, slots: Slots) -> Tensor:
        """Sum over all slots."""

    def divisor(self, steps: Tensor, valid: Tensor) -> Tensor:
        """What the sum is divided by, from the labels alone."""


@dataclass(frozen=True)
class Mix:
    """A weighted sum of objectives."""

    terms: tuple[tuple[str, float, Objective], ...]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Mix:
        """From `{name: weight}` or `{name: {"weight": w, option: value}}`.

        Raises:
            ValueError: an objective or an option that does not exist.
        """
        terms = []
        for name, spec in config.items():
            if name not in OBJECTIVES:
                raise ValueError(f"unknown objective {name!r}: expected one of {sorted(OBJECTIVES)}")
            options = dict(spec) if isinstance(spec, dict) else {"weight": spec}
            weight = float(options.pop("weight", 1.0))
            known = {f.name for f in dataclasses.fields(OBJECTIVES[name])}
            if unknown := sorted(set(options) - known):
                raise ValueError(f"objective {name!r} has no option {', '.join(unknown)}; it has {sorted(known)}")
            if weight:
                terms.append((name, weight, OBJECTIVES[name](**options)))
        if not terms:
            raise ValueError("no objective has a weight")
        return cls(tuple(terms))

    @property
    def top_ks(self) -> set[int | None]:
        """Divergences that have to be computed."""
        return {t.top_k for _, _, t in self.terms if isinstance(t, ForwardKL)}

    def divisors(self, steps: Tensor, valid: Tensor) -> Tensor:
        """One per term, at least a tiny number. [terms]"""
        return torch.stack([t.divisor(steps, valid).float() for _, _, t in self.terms]).clamp(min=1e-6)

    def loss(self, slots: Slots, divisors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum, and each term by name, detached."""
        parts = {name: t.total(slots) / d for (name, _, t), d in zip(self.terms, divisors, strict=True)}
        loss = torch.stack([w * parts[name] for name, w, _ in self.terms]).sum()
        return loss, {name: p.detach() for name, p in parts.items()}
