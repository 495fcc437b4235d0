"""`selfspec generate` and `selfspec chat`: answers in the terminal, written by self-speculation."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from selfspec import prompts
from selfspec.model import SelfSpecModel
from selfspec.options import Chosen, Sampled, check_modes, load_model
from selfspec.past import FIELD, Past
from selfspec.prompts import Message
from selfspec.stats import Stats, rates
from selfspec.terminal import refuse, refusing, say


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: without special tokens.
        stats: what speculation did.
        decode: seconds after the first token.
        whole: seconds, the prefill included.
        past: to continue the conversation with.
    """

    text: str
    stats: Stats
    decode: float
    whole: float
    past: Past | None = None

    def line(self) -> str:
        """Tau, rates of overlapped rounds, forwards and time, for a person."""
        s = self.stats
        forwards = f"{s.rounds} verify + {s.drafts:.1f} draft forwards"
        ms = 1e3 * self.decode / s.tokens if s.tokens else 0.0
        tau = f"tau {s.tau:.2f}{rates(s.overlap)}"
        return f"{tau}, {s.tokens + 1} tokens from {forwards}, {ms:.1f} ms/token, {self.whole:.1f} s in all"


class Clock(BaseStreamer):
    """Passes tokens on and notes when the first one came.

    Args:
        inner: shows them; None shows nothing.
    """

    def __init__(self, inner: BaseStreamer | None):
        self.inner, self.puts, self.first = inner, 0, time.perf_counter()

    def put(self, value: Tensor) -> None:
        """The prompt, then tokens."""
        self.puts += 1
        if self.puts == 2:
            self.first = time.perf_counter()
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """The answer is whole."""
        if self.inner is not None:
            self.inner.end()


@dataclass(frozen=True)
class Settings:
    """How answers are decoded; None is the model's default.

    Attributes:
        choice: further arguments of `generate`: how tokens are chosen.
        seed: to draw them with; None is greedy.
    """

    cap: int = 256
    mode: str | None = None
    block_size: int | None = None
    tree_nodes: int | None = None
    lengths: str | None = None
    choice: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `generate`."""
        how = {"mode": self.mode, "block_size": self.block_size, "tree_nodes": self.tree_nodes, "lengths": self.lengths}
        return {**how, **self.choice, "do_sample": self.seed is not None, "seed": self.seed}


def respond(
    model: SelfSpecModel, messages: list[Message], settings: Settings, show: bool = True, past: Past | None = None
) -> Answer:
    """Answer a conversation.

    Args:
        model: with its tokenizer.
        messages: the last one is the user's.
        settings: how.
        show: stream the text to stdout.
        past: of an earlier answer in this conversation.
    """
    ids = torch.tensor([prompts.encode(model.tokenizer, messages)])
    readable = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    shown = TextStreamer(model.tokenizer, skip_prompt=True, **readable) if show else None
    clock, began = Clock(shown), time.perf_counter()
    out = model.generate(
        ids,
        max_new_tokens=settings.cap,
        streamer=clock,
        past_key_values=past,
        return_dict_in_generate=True,
        **settings.arguments,
    )
    now = time.perf_counter()
    assert isinstance(out, GenerateDecoderOnlyOutput)
    text = model.tokenizer.decode(out.sequences[0, ids.shape[1] :], **readable)
    return Answer(text, model.stats, now - clock.first, now - began, getattr(out, FIELD))


def fitted(model: SelfSpecModel, messages: list[Message], cap: int) -> tuple[list[Message], int]:
    """A conversation that fits the model's context: its oldest exchanges are forgotten, then the answer is shortened.

    Args:
        model: with its tokenizer.
        messages: the last one is the user's.
        cap: tokens that the answer may have.

    Returns:
        The messages that are left, and the cap that is left (at least 1).

    Raises:
        ValueError: the last message alone is too long.
    """
    limit = model.backbone.max_positions
    head, body = (messages[:1], messages[1:]) if messages[0]["role"] == "system" else ([], messages)
    while limit is not None and len(body) > 1 and len(prompts.encode(model.tokenizer, head + body)) + cap > limit:
        body = body[2:] or body[-1:]  # a question and its answer go
    n = len(prompts.encode(model.tokenizer, head + body))
    if limit is not None and n >= limit:
        raise ValueError(f"this message has {n} tokens, the model's context {limit}; shorten it")
    return head + body, cap if limit is None else min(cap, limit - n)


def ready(
    options: Chosen, mode: str | None, cap: int, drawn: Sampled, seed: int | None
) -> tuple[SelfSpecModel, Settings]:
    """The model and settings that the options name; what cannot run ends here."""
    with refusing():
        choice = drawn.choice(seed, secrets.randbits(32))  # without a seed another text each time
        model = load_model(options)
        check_modes(model, (mode,) if mode else None, options)
        settings = Settings(cap, mode, options.block_size, options.tree_nodes, options.lengths, *choice)
        if drawn.given:  # one token, so that values which transformers refuses are refused before any text
            plain = {"mode": "ar", "block_size": None, "tree_nodes": None, "lengths": None}
            model.generate([[0]], max_new_tokens=1, **{**settings.arguments, **plain})
    if model.path is None:
        say("no adapter fits this model: drafts are looked up in the text, and most tokens cost a forward")
    return model, settings


def generate(
    prompt: str,
    options: Chosen,
    system: str | None,
    mode: str | None,
    max_new_tokens: int,
    drawn: Sampled,
    seed: int | None,
    stats: bool,
) -> int:
    """`selfspec generate`: answer one prompt, on stdout."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        refuse("the prompt is empty")
    model, settings = ready(options, mode, max_new_tokens, drawn, seed)
    start = [{"role": "system", "content": system}] if system else []
    with refusing():
        messages, cap = fitted(model, [*start, prompts.user(text)], settings.cap)
    answer = respond(model, messages, replace(settings, cap=cap))
    if stats:
        say(answer.line())
    return 0


def chat(
    options: Chosen,
    system: str | None,
    mode: str | None,
    max_new_tokens: int,
    drawn: Sampled,
    seed: int | None,
    stats: bool,
) -> int:
    """`selfspec chat`: talk to a model."""
    model, settings = ready(options, mode, max_new_tokens, drawn, seed)
    start = [{"role": "system", "content": system}] if system else []
    messages: list[Message] = list(start)
    past = None  # what the last turn left in the cache; of the conversation so far, only what is new is read
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            messages = list(start)
        elif text:
            try:
                kept, cap = fitted(model, [*messages, prompts.user(text)], settings.cap)
            except ValueError as error:
                say(str(error))
                continue
            if len(kept) <= len(messages):
                say("(the oldest part of the conversation no longer fits the context)")
            answer = respond(model, kept, replace(settings, cap=cap), past=past)
            if settings.seed is not None:  # a question that is asked again is answered anew
                settings = replace(settings, seed=settings.seed + 1)
            past = answer.past
            messages = [*kept, {"role": "assistant", "content": answer.text}]
            if stats:
                say(answer.line())
