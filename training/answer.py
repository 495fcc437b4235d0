"""Self-answering: the model answers prompts, and those answers are what its mask path is trained on.

    selfspec answer prompts.jsonl -o answers --model smollm2-135m-instruct

Can be killed at any time and started again with the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.adapters.io import fingerprint
from selfspec.attention import BACKENDS
from selfspec.backbone import Backbone
from selfspec.session import fitting
from selfspec.training.generate import Batch, Done, Job
from selfspec.training.prompts import Conversation, read_prompts
from selfspec.training.shards import AnswerFolder


@dataclass(frozen=True)
class AnswerOptions:
    """How prompts are answered.

    Attributes:
        max_new_tokens: cap; answers that reach it are kept, with finish_reason "length".
        temperature_mix: temperature -> share of the prompts answered at it; the others are answered greedily.
        seed: of the choice of temperatures and of all draws.
        batch: requests at a time; fewer where they would not fit into memory.
        attention: backend; None chooses Triton on CUDA where it is installed, else the reference.
        cuda_graphs: False runs step by step (for debugging).
        format: of the shards, "parquet", "jsonl" or "auto".
        shard_rows: answers a shard; a kill loses less than this many and the running batch.
    """

    max_new_tokens: int = 256
    temperature_mix: tuple[tuple[float, float], ...] = ()
    seed: int = 0
    batch: int = 2048
    attention: str | None = None
    cuda_graphs: bool = True
    format: str = "auto"
    shard_rows: int = 4096

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.batch < 1 or self.shard_rows < 1:
            raise ValueError("max_new_tokens, batch and shard_rows must be at least 1")
        if any(t <= 0 or s < 0 for t, s in self.temperature_mix) or sum(s for _, s in self.temperature_mix) > 1 + 1e-9:
            raise ValueError(f"temperatures must be above 0 and their shares sum to at most 1: {self.temperature_mix}")


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    folder: str | Path,
    options: AnswerOptions | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Answer every turn of every conversation that the folder does not hold yet.

    A row is `{id, prompt_ids, answer_ids, temperature, finish_reason}`. Where a conversation has several turns, each is
    a row of its own, `ID#1`, `ID#2` and so on, and its prompt holds the model's own answers to the turns before.

    Args:
        model: on the device where it is to run.
        tokenizer: its chat template is applied, if it has one.
        conversations: with unique ids.
        folder: for shards and manifest.
        options: how.
        quiet: print no progress.

    Returns:
        The manifest, as written to `folder/manifest.json`.
    """
    options = options or AnswerOptions()
    eos = end_tokens(model, tokenizer)
    several = {_row_id(c, t) for c in conversations if len(c.turns) > 1 for t in range(len(c.turns))}
    said: dict[str, list[int]] = {}  # answers that later turns need

    def keep(row: dict[str, Any]) -> None:
        if row["id"] in several:
            said[row["id"]] = row["answer_ids"]

    mark = fingerprint(model)
    settings = {
        "model": f"{mark['architecture']} {mark['weights'][:32]} {str(model.dtype).removeprefix('torch.')}",
        "template": hashlib.sha256((getattr(tokenizer, "chat_template", None) or "").encode()).hexdigest()[:16],
        "eos": sorted(eos),
        "max_new_tokens": options.max_new_tokens,
        "temperature_mix": [list(p) for p in options.temperature_mix],
        "seed": options.seed,
    }
    with AnswerFolder(Path(folder), settings, options.format, options.shard_rows, keep) as target:
        backbone = Backbone(model, backend=options.attention or best_attention(model))
        skipped: list[str] = []
        wanted = [_row_id(c, t) for c in conversations for t in range(len(c.turns))]
        progress = Progress(len(wanted), sum(name in target.ids for name in wanted), quiet)
        for turn in range(max((len(c.turns) for c in conversations), default=0)):
            todo = [c for c in conversations if turn < len(c.turns) and _row_id(c, turn) not in target.ids]
            ready = [c for c in todo if turn == 0 or _row_id(c, turn - 1) in said]
            skipped += [_row_id(c, turn) for c in todo if turn and _row_id(c, turn - 1) not in said]
            jobs = []
            for c, prompt in zip(ready, _prompts(tokenizer, ready, turn, said, eos), strict=True):
                name = _row_id(c, turn)
                room = (backbone.max_positions or 1 << 30) - len(prompt)
                if room < 1 or not prompt:
                    skipped.append(name)
                    continue
                temperature, seed = _draw(options, name)
                jobs.append(Job(name, prompt, min(options.max_new_tokens, room), temperature, seed))
            progress.skip(len(todo) - len(jobs))
            for done in _generate(backbone, eos, jobs, options, progress):
                row = {
                    "id": done.job.id,
                    "prompt_ids": done.job.prompt,
                    "answer_ids": done.tokens,
                    "temperature": done.job.temperature,
                    "finish_reason": done.finish_reason,
                }
                target.add(row)
                keep(row)
        progress.end()
        target.notes = {"complete": True, "skipped": skipped, "format": target.format, "attention": backbone.backend}
        target.flush()
        return target.write_manifest()


def _generate(
    backbone: Backbone, eos: frozenset[int], jobs: list[Job], options: AnswerOptions, progress: Progress
) -> Iterator[Done]:
    """Answer jobs in groups of similar length, the longest first: too little memory then shows at once."""
    sizes: dict[int, list[Job]] = {}
    for job in sorted(jobs, key=lambda j: -len(j.prompt)):
        need = len(job.prompt) + job.max_new_tokens
        capacity = max(512, 1 << (need - 1).bit_length())
        if need <= capacity * 3 // 4:
            capacity = capacity * 3 // 4
        sizes.setdefault(capacity, []).append(job)
    for group in sizes.values():
        longest = max(len(j.prompt) + j.max_new_tokens for j in group)
        slots = min(options.batch, len(group), fitting(backbone, longest))
        sample = any(j.temperature > 0 for j in group)
        batch = Batch(backbone, eos, slots, longest, options.max_new_tokens, sample, options.cuda_graphs)
        for done in batch.run(group):
            progress.update(len(done), batch.tokens)
            yield from done
        progress.update(0, batch.tokens, last=True)
        del batch


def best_attention(model: PreTrainedModel) -> str:
    """The fastest backend for large batches here; the reference takes what kernels do not (float64, the CPU)."""
    kernels = importlib.util.find_spec("triton") and "triton" in BACKENDS
    half = model.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return "triton" if kernels and half and model.device.type == "cuda" else "sdpa"


def _prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
    turn: int,
    said: dict[str, list[int]],
    eos: frozenset[int],
) -> list[list[int]]:
    """Token ids that stand before the answer to a turn, the model's own earlier answers fed back."""
    texts = []
    templated = bool(getattr(tokenizer, "chat_template", None))
    for c in conversations:
        messages = list(c.context)
        for t in range(turn):
            ids = said[_row_id(c, t)]
            ids = ids[:-1] if ids[-1] in eos else ids
            text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            messages += [c.turns[t], {"role": "assistant", "content": text}]
        messages.append(c.turns[turn])
        if templated:
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        else:
            texts.append("\n\n".join(m["content"] for m in messages))
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=not templated)["input_ids"]


def _row_id(conversation: Conversation, turn: int) -> str:
    return conversation.id if len(conversation.turns) == 1 else f"{conversation.id}#{turn + 1}"


def _draw(options: AnswerOptions, name: str) -> tuple[float, int]:
    """Temperature and seed of a row: the same whenever and beside whomever it is answered."""
    digest = hashlib.sha256(f"{options.seed}/{name}".encode()).digest()
    point, seed = int.from_bytes(digest[:6]) / 2.0**48, int.from_bytes(digest[8:15])
    for temperature, share in options.temperature_mix:
        if point < share:
            return temperature, seed
        point -= share
    return 0.0, seed


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Token ids that end an answer: the generation config's, else the model's, else the tokenizer's."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


class Progress:
    """One line on stderr: answers, rate, time left. Redrawn on a terminal, else repeated now and then."""

    def __init__(self, total: int, done: int, quiet: bool = False):
        self.total, self.done, self.quiet = total, done, quiet
        self.answered = self.earlier = self.tokens = 0  # in this run; tokens of finished groups; and of this one too
        self.began = self.shown = time.monotonic()
        self.redraw = sys.stderr.isatty()

    def skip(self, count: int) -> None:
        """Prompts that cannot be answered."""
        self.total -= count

    def update(self, answers: int, tokens: int, last: bool = False) -> None:
        """Book answers, and the tokens emitted so far by the running batch."""
        self.done, self.answered, self.tokens = self.done + answers, self.answered + answers, self.earlier + tokens
        if last:
            self.earlier = self.tokens
        if not self.quiet and time.monotonic() - self.shown > (0.2 if self.redraw else 5):
            self._show()

    def end(self) -> None:
        """The last line."""
        if not self.quiet:
            self._show("\n")

    def _show(self, end: str = "") -> None:
        self.shown = time.monotonic()
        seconds = max(self.shown - self.began, 1e-9)
        left = (self.total - self.done) * seconds / self.answered if self.answered else float("nan")
        line = f"{self.done:,}/{self.total:,} answers · {self.tokens / seconds:,.0f} tokens/s · {_clock(left)} left"
        print(f"\r{line}\x1b[K" if self.redraw else line, end=end if self.redraw else "\n", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return "?" if seconds != seconds else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _mix(text: str) -> tuple[tuple[float, float], ...]:
    """`0.7=0.2,1.0=0.1` -> ((0.7, 0.2), (1.0, 0.1))"""
    pairs = [part.split("=") for part in text.split(",") if part]
    try:
        return tuple((float(t), float(s)) for t, s in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0.7=0.2,1.0=0.1 (temperature=share)") from None


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `selfspec answer`."""
    d = AnswerOptions()
    p = argparse.ArgumentParser(prog="selfspec answer", description="Let a model answer prompts.")
    p.add_argument("prompts", nargs="+", help=".jsonl[.gz] or .parquet (prompt, turns or messages), or .txt")
    p.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="an earlier run is resumed")
    p.add_argument("--model", required=True, help="folder, hub name, .gguf file or the name of an embedded model")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", help="default: bfloat16 on CUDA, else the checkpoint's")
    p.add_argument("--temperature-mix", type=_mix, default=(), metavar="T=SHARE,...", help="the others are greedy")
    p.add_argument("--max-new-tokens", type=int, default=d.max_new_tokens)
    p.add_argument("--batch", type=int, default=d.batch, help="requests at a time (default %(default)s)")
    p.add_argument("--limit", type=int, help="answer no more than this many prompts")
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument(
        "--format", choices=("auto", "parquet", "jsonl"), default=d.format, help="default: what pyarrow allows"
    )
    p.add_argument("--shard-rows", type=int, default=d.shard_rows)
    p.add_argument("--attention", choices=sorted(BACKENDS), help="default: triton on CUDA where it is installed")
    p.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false")
    return p


def main(argv: list[str] | None = None) -> int:
    """`selfspec answer`. Returns the exit code."""
    from selfspec.hub import load

    args = build_parser().parse_args(argv)
    options = AnswerOptions(**{f: getattr(args, f) for f in AnswerOptions.__dataclass_fields__})
    conversations = read_prompts(args.prompts, args.limit)
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "auto")
    model, tokenizer = load(args.model, dtype=dtype, device=args.device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through the folder's exit, which saves
    began = time.monotonic()
    manifest = answer(model, tokenizer, conversations, args.output, options)
    print(json.dumps({"folder": str(args.output), "seconds": round(time.monotonic() - began, 1), **manifest["counts"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
