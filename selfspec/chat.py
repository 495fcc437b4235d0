"""`selfspec generate` and `selfspec chat`: answers in the terminal, written by self-speculation."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from selfspec import options, prompts
from selfspec.model import SelfSpecModel
from selfspec.prompts import Message
from selfspec.stats import Stats


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: without special tokens.
        stats: what speculation did.
        decode: seconds after the first token.
        whole: seconds, the prefill included.
    """

    text: str
    stats: Stats
    decode: float
    whole: float

    def line(self) -> str:
        """Tau, forwards and time, for a person."""
        s = self.stats
        forwards = f"{s.rounds} verify + {s.drafts:.1f} draft forwards"
        ms = 1e3 * self.decode / s.tokens if s.tokens else 0.0
        return f"tau {s.tau:.2f}, {s.tokens + 1} tokens from {forwards}, {ms:.1f} ms/token, {self.whole:.1f} s in all"


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
    """How answers are decoded; None is the model's default."""

    cap: int = 256
    mode: str | None = None
    block_size: int | None = None
    tree_nodes: int = 16


def respond(model: SelfSpecModel, messages: list[Message], settings: Settings, show: bool = True) -> Answer:
    """Answer a conversation.

    Args:
        model: with its tokenizer.
        messages: the last one is the user's.
        settings: how.
        show: stream the text to stdout.
    """
    ids = torch.tensor([prompts.encode(model.tokenizer, messages)])
    readable = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    shown = TextStreamer(model.tokenizer, skip_prompt=True, **readable) if show else None
    clock, began = Clock(shown), time.perf_counter()
    out = model.generate(
        ids,
        do_sample=False,
        max_new_tokens=settings.cap,
        streamer=clock,
        mode=settings.mode,
        block_size=settings.block_size,
        tree_nodes=settings.tree_nodes,
    )
    now = time.perf_counter()
    text = model.tokenizer.decode(out[0, ids.shape[1] :], **readable)
    return Answer(text, model.stats, now - clock.first, now - began)


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


def build_parser(command: str) -> argparse.ArgumentParser:
    """The options of `generate` or `chat`."""
    say = {"generate": "Answer one prompt.", "chat": "Talk to a model; /reset forgets, /exit or end-of-file ends."}
    parser = argparse.ArgumentParser(prog=f"selfspec {command}", description=say[command])
    if command == "generate":
        parser.add_argument("prompt", help="what to answer; - reads it from stdin")
    options.add_model_options(parser, "bfloat16")
    parser.add_argument("--system", metavar="TEXT", help="a system message (the chat template's own)")
    parser.add_argument("--mode", help="ar, sequential, tree, overlap, overlap+tree (sequential with an adapter)")
    parser.add_argument("--max-new-tokens", type=options.positive, default=256, help="per answer (%(default)s)")
    parser.add_argument("--stats", action="store_true", help="print tau, forwards and time after an answer, on stderr")
    return parser


def ready(command: str, args: argparse.Namespace) -> tuple[SelfSpecModel, Settings]:
    """The model and settings that the options name; what cannot run ends here."""

    def build() -> SelfSpecModel:
        model = options.load_model(args)
        options.check_modes(model, args.mode and [args.mode], args.block_size, args.tree_nodes)
        return model

    model = options.refuse_unready(command, build)
    if model.path is None:
        print("no adapter fits this model: it decodes plainly, one token a forward", file=sys.stderr)
    return model, Settings(args.max_new_tokens, args.mode, args.block_size, args.tree_nodes)


def generate(argv: list[str]) -> int:
    """One answer on stdout."""
    args = build_parser("generate").parse_args(argv)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        print("selfspec generate: the prompt is empty", file=sys.stderr)
        return 2
    model, settings = ready("generate", args)
    start = [{"role": "system", "content": args.system}] if args.system else []
    try:
        messages, cap = fitted(model, [*start, prompts.user(text)], settings.cap)
    except ValueError as error:
        print(f"selfspec generate: {error}", file=sys.stderr)
        return 2
    answer = respond(model, messages, Settings(cap, settings.mode, settings.block_size, settings.tree_nodes))
    if args.stats:
        print(answer.line(), file=sys.stderr)
    return 0


def chat(argv: list[str]) -> int:
    """The interactive loop. The whole conversation is read again at every turn."""
    args = build_parser("chat").parse_args(argv)
    model, settings = ready("chat", args)
    start = [{"role": "system", "content": args.system}] if args.system else []
    messages: list[Message] = list(start)
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
                print(error, file=sys.stderr)
                continue
            if len(kept) <= len(messages):
                print("(the oldest part of the conversation no longer fits the context)", file=sys.stderr)
            answer = respond(model, kept, Settings(cap, settings.mode, settings.block_size, settings.tree_nodes))
            messages = [*kept, {"role": "assistant", "content": answer.text}]
            if args.stats:
                print(answer.line(), file=sys.stderr)
