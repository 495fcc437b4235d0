"""Logits processors over every node in few launches; `selfspec.runs` says which, and `selfspec.steps` is the reference.

One reading of the logits makes the scores, in the order of the processors and with torch's own float32 operations. What
is banned depends on no score, so those tokens are struck out afterwards, one by one. Counts come from integer atomics,
which give the same in any order.

A node's text is its request's committed text up to `start`, and behind it the tokens on its path by depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.nodes import Nodes

BLOCK = 1024  # tokens of a program
WINDOWS = 256  # of a program
TEXT, PROMPT = 1, 2  # what a repetition penalty counts


@dataclass(frozen=True)
class Place:
    """What kernels read of the nodes.

    Attributes:
        text: [N, W] long.
        start: [N] long.
        prompt: [N] long.
        path: [N, M] long, tokens of chains with the anchor first (or of trees whose paths nobody asks for), or
            [N, M, M - 1], those of every node by depth.
        depth: [N, M] long, of any strides.
    """

    text: Tensor
    start: Tensor
    prompt: Tensor
    path: Tensor
    depth: Tensor

    @classmethod
    def of(cls, nodes: Nodes, reads: bool) -> Place:
        """That of some nodes. Of chains nothing has to be computed. reads: somebody asks for tokens of the text."""
        tree, text = nodes.tree, nodes.text
        path = nodes.path if reads and tree.parents is not None else tree.tokens
        tokens = text.tokens if text.tokens.stride(1) == 1 else text.tokens.contiguous()
        return cls(tokens, nodes.start.contiguous(), text.prompt.contiguous(), path.contiguous(), nodes.depth)

    @property
    def arguments(self) -> tuple:
        """Of `_tokens` and whoever calls it."""
        chain = self.path.dim() == 2
        steps = (self.path.stride(0), 0) if chain else self.path.stride()[:2]
        where = self.text.stride(0), *steps, *self.depth.stride(), self.depth.shape[1]
        return self.text, self.start, self.prompt, self.path, self.depth, *where, int(chain)


@dataclass(frozen=True)
class Scaling:
    """The processors that change scores, in their order; None where there is none.

    Attributes:
        repetition: the penalty, and the first position that counts; None for all of the prompt and nothing else.
        decay: [E] long ends, [G] float32 growth by tokens past a length of the answer, and that length.
        counted: presence and frequency penalties, and the first of the answer's tokens that counts.
        temperature: divides.
    """

    repetition: tuple[float, int | None] | None = None
    decay: tuple[Tensor, Tensor, int] | None = None
    counted: tuple[float, float, int] | None = None
    temperature: float | None = None


@triton.jit
def _tokens(text, own, text_stride, n, at, begin, lead, live):
    """Tokens at positions of a node's text; -1 where not live or before its beginning."""
    committed = at <= begin
    first = tl.load(text + n * text_stride + at, live & committed & (at >= 0), -1)
    behind = tl.load(own + (at - begin - 1 + lead), live & (at > begin), -1)
    return tl.where(committed, first, behind)


@triton.jit(do_not_specialize=["n_nodes", "vocab", "first", "skip", "text_stride"])
def _tally(
    text, start, prompt, path, depth, text_stride, path_n, path_m, depth_n, depth_m, n_nodes, lead, counts, vocab,
    first, skip, BLOCK: tl.constexpr, HELD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """How often a stretch of the committed text holds each token, from a place on: for both penalties."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(start + n), tl.load(prompt + n)
    token = tl.load(text + n * text_stride + at, at <= begin, -1)
    good = (token >= 0) & (token < vocab)
    one = tl.full([BLOCK], 1, tl.int32)
    out = counts + n * ((HELD > 0) + COUNTED) * vocab
    if HELD > 0:
        held = good & (at < end) if HELD == 2 else good & (at >= first)
        tl.atomic_add(out + token, one, held)
        out += vocab
    if COUNTED:
        tl.atomic_add(out + token, one, good & (at >= end + skip))


@triton.jit(do_not_specialize=["n_nodes", "vocab", "first", "skip", "text_stride", "after", "ends", "longest"])
def _scale(
    text, start, prompt, path, depth, text_stride, path_n, path_m, depth_n, depth_m, n_nodes, lead, counts, vocab,
    first, skip, logits, stride_n, stride_m, out, end_ids, growth, after, ends, longest, penalty, presence, frequency,
    temperature, BLOCK: tl.constexpr, HELD: tl.constexpr, COUNTED: tl.constexpr, DECAYS: tl.constexpr,
    TEMPERED: tl.constexpr,
):  # fmt: skip
    """A stretch of a row's scores."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, i = row // n_nodes, row % n_nodes
    live = token < vocab
    s = tl.load(logits + n * stride_n + i * stride_m + token, live, 0.0).to(tl.float32)
    if (HELD > 0) or COUNTED or DECAYS:
        begin, end = tl.load(start + n), tl.load(prompt + n)
        deep = tl.load(depth + n * depth_n + i * depth_m)
    if (HELD > 0) or COUNTED:
        planes = counts + n * ((HELD > 0) + COUNTED) * vocab + token
        held = tl.zeros([BLOCK], tl.int32)
        count = tl.zeros([BLOCK], tl.int32)
        if HELD > 0:
            held = tl.load(planes, live, 0)
        if COUNTED:
            count = tl.load(planes + (HELD > 0) * vocab, live, 0)
        if (HELD == 1) or COUNTED:
            for d in range(deep):
                hit = tl.load(path + n * path_n + i * path_m + d + lead) == token
                at = begin + 1 + d
                if HELD == 1:
                    held += (hit & (at >= first)).to(tl.int32)
                if COUNTED:
                    count += (hit & (at >= end + skip)).to(tl.int32)
    if HELD > 0:
        s = tl.where(held > 0, tl.where(s < 0, s * penalty, tl.div_rn(s, penalty)), s)
    if DECAYS:
        past = begin + 1 + deep - end - after
        by = tl.load(growth + tl.minimum(tl.maximum(past, 0), longest))
        for e in range(ends):
            hit = (token == tl.load(end_ids + e)) & (past > 0) & (tl.abs(s) < float("inf"))
            s = tl.where(hit, s + tl.abs(s) * by, s)
    if COUNTED:
        s = s - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
    if TEMPERED:
        s = tl.div_rn(s, temperature)
    tl.store(out + row * vocab + token, s, live)


@triton.jit(do_not_specialize=["n_nodes", "vocab", "k", "text_stride"])
def _grams(
    text, start, prompt, path, depth, text_stride, path_n, path_m, depth_n, depth_m, n_nodes, lead, scores, vocab, k,
    BLOCK: tl.constexpr, IN_PROMPT: tl.constexpr,
):  # fmt: skip
    """Strikes out the last token of every window of k + 1 whose others end the node's text."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, i = row // n_nodes, row % n_nodes
    begin = tl.load(start + n)
    length = begin + 1 + tl.load(depth + n * depth_n + i * depth_m)
    end = length
    if IN_PROMPT:
        end = tl.load(prompt + n)
    if tl.program_id(1) * BLOCK < end:
        own = path + n * path_n + i * path_m
        match = (at >= k) & (at < end)
        for j in range(k):
            there = _tokens(text, own, text_stride, n, at - k + j, begin, lead, match)
            one = length - k + j + tl.zeros([BLOCK], tl.int64)
            match = match & (there == _tokens(text, own, text_stride, n, one, begin, lead, match))
        token = _tokens(text, own, text_stride, n, at, begin, lead, match)
        tl.store(scores + row * vocab + token, -float("inf"), match & (token >= 0) & (token < vocab))


@triton.jit(do_not_specialize=["n_nodes", "vocab", "size", "k", "text_stride"])
def _strike(
    text, start, prompt, path, depth, text_stride, path_n, path_m, depth_n, depth_m, n_nodes, lead, scores, vocab,
    table, size, k, BLOCK: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Strikes out tokens. A line of the table: one, the answer's lengths (from, to) and the k tokens before it."""
    row, line = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, i = row // n_nodes, row % n_nodes
    hit = line < size
    table += line.to(tl.int64) * (3 + k)
    if KNOWN:
        begin = tl.load(start + n)
        length = begin + 1 + tl.load(depth + n * depth_n + i * depth_m)
        emitted = length - tl.load(prompt + n)
        hit = hit & (emitted >= tl.load(table + 1, hit, 0)) & (emitted < tl.load(table + 2, hit, 0))
        own = path + n * path_n + i * path_m
        for j in range(k):
            wanted = tl.load(table + 3 + j, hit, -1)
            one = length - k + j + tl.zeros([BLOCK], tl.int64)
            hit = hit & ((wanted < 0) | (wanted == _tokens(text, own, text_stride, n, one, begin, lead, hit)))
    token = tl.load(table, hit, -1)
    tl.store(scores + row * vocab + token, -float("inf"), hit & (token >= 0) & (token < vocab))


def scale(logits: Tensor, how: Scaling, place: Place | None) -> Tensor:
    """Scores of every node.

    Args:
        logits: [N, M, V]
        how: what is done to them.
        place: the nodes; None if only a temperature is asked for.

    Returns:
        [N, M, V] float32, new
    """
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    n, m, vocab = logits.shape
    out = torch.empty(n, m, vocab, dtype=torch.float32, device=logits.device)
    penalty, first = how.repetition or (1.0, 0)
    held = 0 if how.repetition is None else PROMPT if first is None else TEXT
    presence, frequency, skip = how.counted or (0.0, 0.0, 0)
    ends, growth, after = how.decay or (out, out, 0)
    counted, counts = int(how.counted is not None), out
    nodes = (out,) * 5 + (0,) * 5 + (m, 0) if place is None else place.arguments
    kinds = {"BLOCK": BLOCK, "HELD": held, "COUNTED": counted}
    if held or counted:
        assert place is not None
        counts = torch.zeros(n, int(held > 0) + counted, vocab, dtype=torch.int32, device=logits.device)
        stretches = triton.cdiv(place.text.shape[1], BLOCK)
        _tally[(n, stretches)](*nodes, counts, vocab, first or 0, skip, **kinds)
    _scale[(n * m, triton.cdiv(vocab, BLOCK))](
        *nodes, counts, vocab, first or 0, skip, logits, *logits.stride()[:2], out, ends, growth, after, len(ends),
        len(growth) - 1, penalty, presence, frequency, 1.0 if how.temperature is None else how.temperature, **kinds,
        DECAYS=how.decay is not None, TEMPERED=how.temperature is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def grams(scores: Tensor, place: Place, size: int, in_prompt: bool) -> None:
    """Strike out what would end an n-gram that the text (the prompt) holds already. scores: [N, M, V], in place"""
    n, m, vocab = scores.shape
    blocks = triton.cdiv(place.text.shape[1] + m - 1, WINDOWS)
    _grams[(n * m, blocks)](*place.arguments, scores, vocab, size - 1, BLOCK=WINDOWS, IN_PROMPT=in_prompt)


def strike(scores: Tensor, table: Tensor, place: Place | None) -> None:
    """Strike out the tokens of a table where its conditions hold.

    Args:
        scores: [N, M, V] float32, in place.
        table: [S, 3 + K] long: a token, the answer's lengths from which and before which it is banned, and the K tokens
            that have to stand before it, below 0 for any.
        place: the nodes; None where every line holds always.
    """
    n, m, vocab = scores.shape
    size, block = len(table), min(WINDOWS, triton.next_power_of_2(len(table)))
    nodes = (scores,) * 5 + (0,) * 5 + (m, 0) if place is None else place.arguments
    _strike[(n * m, triton.cdiv(size, block))](
        *nodes, scores, vocab, table, size, table.shape[1] - 3, BLOCK=block, KNOWN=place is not None
    )
