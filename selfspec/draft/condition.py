"""Drafts conditioned on the token before them, by an adapter's Markov head (DSpark, arXiv 2607.05147)."""

from __future__ import annotations

CANDIDATES = 8  # tokens of a position, by the plain marginals, that the head chooses among
