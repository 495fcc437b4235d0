"""The texts that a tree's nodes stand behind, as tensors of static shape: what a batched processor may know.

Node i's text is the request's committed text, whose last token is node 0, and the tokens on the path from there to i.
Nothing here reads a tensor from the host, so all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from selfspec.draft import DraftTree


@dataclass(frozen=True)
class Text:
    """What choosing needs to know of N requests beside their logits.

    Attributes:
        tokens: [N, T] long, prompt and answer so far from column 0 on; whatever stands behind them is never read.
        prompt: [N] long, tokens of each prompt.
        seed: [N] long, of each request's noise.
    """

    tokens: Tensor
    prompt: Tensor
    seed: Tensor

    def part(self, index: list[int]) -> Text:
        """Some of the requests."""
        return Text(*(pick(t, index) for t in (self.tokens, self.prompt, self.seed)))


class Nodes:
    """The nodes of N trees and the text before each one's next token.

    Args:
        tree: M nodes each.
        start: [N] long, position of node 0.
        text: of the requests.

    Attributes:
        depth: [N, M] long, 0 for node 0.
        length: [N, M] long, tokens of each node's text; also the position of the token after it.
    """

    def __init__(self, tree: DraftTree, start: Tensor, text: Text):
        self.tree, self.start, self.text = tree, start, text

    @cached_property
    def depth(self) -> Tensor:
        return self.tree.depths

    @cached_property
    def length(self) -> Tensor:
        return self.start[:, None] + 1 + self.depth

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Seeds and positions of the tokens after all nodes. [N * M] long, both"""
        return self.text.seed[:, None].expand_as(self.length).reshape(-1), self.length.reshape(-1)

    @cached_property
    def above(self) -> Tensor:
        """`above[n, i, j]`: node j is i or an ancestor of i. bool [N, M, M]"""
        n, m = self.tree.tokens.shape
        if self.tree.parents is None:
            return torch.ones(m, m, dtype=torch.bool, device=self.start.device).tril().expand(n, m, m)
        return self.tree.ancestors

    @cached_property
    def path(self) -> Tensor:
        """Tokens on each node's path by depth, 1..M-1; -1 below the node. [N, M, M - 1] long"""
        n, m = self.tree.tokens.shape
        at = torch.where(self.above, self.depth[:, None], m)  # those beside the path go to a spare column
        tokens = self.tree.tokens[:, None].expand(n, m, m)
        return tokens.new_full((n, m, m + 1), -1).scatter_(2, at, tokens)[:, :, 1:m]

    def window(self, k: int) -> Tensor:
        """The last k tokens of the committed text, then the path; -1 where there is none. [N, M, k + M - 1] long"""
        n, m = self.tree.tokens.shape
        at = self.start[:, None] + 1 + torch.arange(-k, 0, device=self.start.device)  # [N, k]
        ends = torch.where(at >= 0, self.text.tokens.gather(1, at.clamp(min=0)), -1)
        return torch.cat([ends[:, None].expand(n, m, k), self.path], 2)

    def last(self, k: int) -> Tensor:
        """The last k tokens of each node's text, -1 where it is shorter. [N, M, k] long"""
        at = self.depth[..., None] + torch.arange(k, device=self.start.device)
        return self.window(k).gather(2, at)

    def counts(self, first: Tensor, vocab: int) -> Tensor:
        """How often each token stands in each node's text, from a position on.

        Args:
            first: [N] long, the position.
            vocab: V; larger ids are not counted.

        Returns:
            [N, M, V] float32
        """
        held = self._in_text(first, self.start + 1, vocab)
        n, m = self.tree.tokens.shape
        at = self.start[:, None, None] + torch.arange(1, m, device=self.start.device)  # [N, 1, M - 1]
        counted = (self.path >= 0) & (at >= first[:, None, None])
        on_path = torch.where(counted, self.path, vocab).clamp(max=vocab)
        out = held.new_zeros(n, m, vocab + 1).scatter_add_(2, on_path, held.new_ones(1, 1, 1).expand(n, m, m - 1))
        return held[:, None] + out[..., :vocab]

    def in_prompt(self, vocab: int) -> Tensor:
        """Which tokens the prompt holds. bool [N, V]"""
        return self._in_text(torch.zeros_like(self.start), self.text.prompt, vocab) > 0

    def _in_text(self, first: Tensor, end: Tensor, vocab: int) -> Tensor:
        """Counts within the committed text, from `first` up to before `end`. [N, V] float32"""
        n, t = self.text.tokens.shape
        at = torch.arange(t, device=first.device)
        tokens = torch.where((at >= first[:, None]) & (at < end[:, None]), self.text.tokens, vocab)
        out = torch.zeros(n, vocab + 1, device=first.device)
        return out.scatter_add_(1, tokens.clamp(max=vocab), out.new_ones(1, 1).expand(n, t))[:, :vocab]


def pick(values: Tensor, index: list[int]) -> Tensor:
    """Rows of a tensor by numbers that the host knows, without sending the numbers to the device."""
    first, n = index[0], len(index)
    if index == list(range(first, first + n)):
        return values[first : first + n]
    return torch.stack([values[i] for i in index])


def part_of(tree: DraftTree, index: list[int]) -> DraftTree:
    """Some of the trees."""
    parts = (tree.tokens, tree.parents, tree.probs, tree.scores, tree.paths, tree.levels)
    return DraftTree(*(None if t is None else pick(t, index) for t in parts))  # type: ignore[arg-type]
