"""Training objectives: small dataclasses in a registry, one file each, composable by name and weight.

An objective turns per-slot quantities into a sum over slots, and says what the sum is divided by. The divisor depends
on the labels alone, so that it can be added up over micro-batches and processes before any of them runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec.adapters.config import CONDITIONERS
from selfspec.training.objectives.bv import BlockVerification
from selfspec.training.objectives.calibrator import Calibrator
from selfspec.training.objectives.ce import CrossEntropy
from selfspec.training.objectives.chain import Chain
from selfspec.training.objectives.confidence import Confidence
from selfspec.training.objectives.dblast import AcceptanceLength
from selfspec.training.objectives.dpace import DPace
from selfspec.training.objectives.focal import FirstErrorFocal
from selfspec.training.objectives.kl import ForwardKL
from selfspec.training.objectives.length import Length
from selfspec.training.objectives.lk import LKAlpha, LKHybrid
from selfspec.training.objectives.markov import Markov
from selfspec.training.objectives.nelbo import Nelbo
from selfspec.training.objectives.on_policy import OnPolicy
from selfspec.training.objectives.positional import Positional
from selfspec.training.objectives.rkl import ReverseKL
from selfspec.training.objectives.slots import Slots
from selfspec.training.objectives.tv import TotalVariation
from selfspec.training.objectives.vat import Vat

__all__ = ["HEADS", "OBJECTIVES", "Mix", "Objective", "Slots"]

HEADS: dict[str, type] = {  # terms that train a head: that of the same name, and "markov" the sampler head too
    "calibrator": Calibrator,
    "confidence": Confidence,
    "length": Length,
    "markov": Markov,
}
OBJECTIVES: dict[str, type] = {
    "bv": BlockVerification,
    "ce": CrossEntropy,
    "chain": Chain,
    "dblast": AcceptanceLength,
    "dpace": DPace,
    "focal": FirstErrorFocal,
    "kl": ForwardKL,
    "lk_alpha": LKAlpha,
    "lk_hybrid": LKHybrid,
    "nelbo": Nelbo,
    "on_policy": OnPolicy,
    "positional": Positional,
    "rkl": ReverseKL,
    "tv": TotalVariation,
    "vat": Vat,
    **HEADS,
}


def term_of(head: str) -> str:
    """The objective that trains a head."""
    return "markov" if head in CONDITIONERS else head


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

    def require(self, heads: Iterable[str], learnt: Iterable[str] = ()) -> None:
        """Refuse a term without its head, and a head without a term: it would never learn.

        Args:
            heads: of the path.
            learnt: those that have learnt already; they need no term where the path under them stays as it is.

        Raises:
            ValueError: says which.
        """
        terms = {name for name, _, _ in self.terms if name in HEADS}
        heads = [head for head in heads if not (self.heads_alone and head in learnt and term_of(head) not in terms)]
        wanted = {head: term_of(head) for head in heads}
        if missing := sorted(terms - set(wanted.values())):
            raise ValueError(f"the objective {missing[0]!r} trains a head that adapter.heads does not name")
        if idle := sorted(head for head, term in wanted.items() if term not in terms):
            raise ValueError(f"the head {idle[0]!r} has no objective {wanted[idle[0]]!r} that trains it")

    @property
    def on_policy(self) -> bool:
        """Whether a term wants the verifier to judge the draft's own tokens."""
        return any(isinstance(t, OnPolicy) for _, _, t in self.terms)

    @property
    def heads_alone(self) -> bool:
        """Whether every term trains a head and detaches the path under it."""
        return all(name in HEADS and getattr(t, "detach", False) for name, _, t in self.terms)

    def divisors(self, steps: Tensor, valid: Tensor) -> Tensor:
        """One per term, at least a tiny number. [terms]"""
        return torch.stack([t.divisor(steps, valid).float() for _, _, t in self.terms]).clamp(min=1e-6)

    def loss(self, slots: Slots, divisors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum, and each term by name, detached."""
        parts = {name: t.total(slots) / d for (name, _, t), d in zip(self.terms, divisors, strict=True)}
        loss = torch.stack([w * parts[name] for name, w, _ in self.terms]).sum()
        return loss, {name: p.detach() for name, p in parts.items()}
