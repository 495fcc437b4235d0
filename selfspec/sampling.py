"""From logits to the next token: counter-based noise, and transformers' own processors and warpers.

A draw depends on a seed, a position and a token id alone, never on the order in which draws are made. So plain and
speculative decoding, any batch and any block size see the same noise, and the same seed gives the same text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import LogitsProcessorList

from selfspec import kernels

CHUNK = 1 << 22  # scores perturbed at a time: the noise is float64, and its hashing needs a few copies
DRAFT, ACCEPT, RESIDUAL, NOISE = 1, 2, 3, 4  # streams of noise that must not depend on one another

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


# ---- counter-based noise


def hashed(*parts: Tensor | int) -> Tensor:
    """One well-mixed int64 for every combination of the parts, which broadcast (splitmix64's finaliser, chained).

    Integer arithmetic wraps in the same way on every device, so the numbers are the same everywhere.
    """
    h: Tensor | int = 0
    for part in parts:
        x = torch.as_tensor(h + part) + _signed(_GOLDEN)
        x = (x ^ _shift(x, 30)) * _signed(_FIRST)
        x = (x ^ _shift(x, 27)) * _signed(_SECOND)
        h = x ^ _shift(x, 31)
    assert isinstance(h, Tensor)
    return h


def uniform(*parts: Tensor | int) -> Tensor:
    """Numbers strictly between 0 and 1, float64, of a seed and counters."""
    return (_shift(hashed(*parts), 12).double() + 0.5) * 2.0**-52  # 52 bits and a half: neither end is ever reached


def gumbel(seed: Tensor | int, position: Tensor | int, token: Tensor | int) -> Tensor:
    """Standard Gumbel noise, float64; argmax(log p + noise over tokens) is then a draw from p."""
    return -(-uniform(seed, position, token).log()).log()


def draw(scores: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """argmax(scores + g[seed, position, token]): a token from softmax(scores), the first of equals.

    Args:
        scores: [R, V] log-probabilities up to a constant.
        seed: [R] long.
        position: [R] long, of the token that is drawn.

    Returns:
        [R] long
    """
    if kernels.serve(scores):
        from selfspec.kernels import noise

        return noise.draw(scores, seed, position)
    return perturbed(scores, seed, position, lambda s: s.argmax(-1))


def noisy(scores: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """scores + noise, of which `draw` takes the best. [R, V] float32; see there."""
    if kernels.serve(scores):
        from selfspec.kernels import noise

        return noise.noisy(scores, seed, position)
    return perturbed(scores, seed, position, lambda s: s.float())


def draw_among(scores: Tensor, ids: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """`draw` where only a few tokens can come: of equal sums the lowest token.

    Args:
        scores: [R, K], -inf for a place that may not come.
        ids: [R, K] long, the tokens.
        seed: [R] long.
        position: [R] long.

    Returns:
        [R] long
    """
    if kernels.serve(scores):
        from selfspec.kernels import noise

        return noise.draw_among(scores, ids, seed, position)
    total = scores.double() + gumbel(seed[:, None], position[:, None], ids)
    return torch.where(total == total.amax(-1, keepdim=True), ids, torch.iinfo(torch.long).max).amin(-1)


def noisy_among(scores: Tensor, ids: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """`noisy` of a few tokens alone: what it gives at `ids`, to the bit. [R, K] float32; see `draw_among`."""
    if kernels.serve(scores):
        from selfspec.kernels import noise

        return noise.noisy_among(scores, ids, seed, position)
    return (scores.double() + gumbel(seed[:, None], position[:, None], ids)).float()


def perturbed(scores: Tensor, seed: Tensor, position: Tensor, reduce) -> Tensor:
    """`reduce(scores + noise)`, a bounded number of rows at a time. See `draw`."""
    vocabulary = torch.arange(scores.shape[-1], device=scores.device)
    size = max(1, CHUNK // scores.shape[-1])
    parts = zip(scores.split(size), seed.split(size), position.split(size), strict=True)
    return torch.cat([reduce(s.double() + gumbel(k[:, None], p[:, None], vocabulary)) for s, k, p in parts])


def new_seeds(n: int) -> list[int]:
    """Fresh seeds from torch's global generator, so that `torch.manual_seed` makes them repeat."""
    return torch.randint(1 << 62, (n,)).tolist()


def as_seed(seed: int) -> int:
    """Any integer as the int64 of its last 64 bits."""
    return _signed(seed & ((1 << 64) - 1))


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return x - (1 << 64) if x >= 1 << 63 else x


# ---- the target distribution


class Pipeline:
    """Processors and warpers in transformers' order, asked about one text at a time.

    Args:
        processors: as transformers builds them; those with memory belong to one request.
    """

    def __init__(self, processors: LogitsProcessorList | None = None):
        self.processors = LogitsProcessorList() if processors is None else processors

    def __call__(self, prefix: Tensor, logits: Tensor) -> Tensor:
        """Target scores, computed in float32 as transformers does.

        Args:
            prefix: [R, t] long, the texts so far.
            logits: [R, V]; left as they are.

        Returns:
            [R, V] float32
        """
        scores = logits.to(torch.float32, copy=True)  # processors may write in place
        return self.processors(prefix, scores) if self.processors else scores  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Sampling:
    """How one request's tokens come from its logits.

    Attributes:
        pipeline: processors and warpers.
        sample: draw with the seed's noise; False takes the best score.
        seed: of the noise.
        keep_scores: note the processed scores of every emitted token.
        keep_logits: note its logits.
    """

    pipeline: Pipeline
    sample: bool = False
    seed: int = 0
    keep_scores: bool = False
    keep_logits: bool = False

    def choose(self, scores: Tensor, position: int) -> int:
        """One token. scores: [1, V]"""
        if not self.sample:
            return int(scores.argmax(-1))
        at = torch.tensor([[self.seed], [position]], device=scores.device)
        return int(draw(scores, at[0], at[1]))


def seeds_of(seed: int | list[int] | None, prompts: int, copies: int) -> list[int]:
    """One seed per answer.

    Args:
        seed: a list has one number a prompt; an integer is the first prompt's, and each next prompt's is one more
            (with several answers a prompt, each next answer's). None draws from torch's global generator.
        prompts: N.
        copies: answers a prompt; the j-th has the prompt's seed plus j.

    Raises:
        ValueError: a list of another length.
    """
    if seed is None:
        return new_seeds(prompts * copies)
    if isinstance(seed, bool) or not isinstance(seed, int | list | tuple):
        raise ValueError(f"seed={seed!r}: expected an integer, or one for every prompt")
    if isinstance(seed, int):
        return [as_seed(seed + i) for i in range(prompts * copies)]
    if len(seed) != prompts:
        raise ValueError(f"{len(seed)} seeds for {prompts} prompts")
    return [as_seed(s + j) for s in seed for j in range(copies)]
