"""Self-answering: the model answers prompts, and those answers are what its mask path is trained on.

    selfspec answer prompts.jsonl -o answers --model smollm2-135m-instruct

Can be killed at any time and started again with the same command.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import attention, hub, prompts
from selfspec.adapters.io import fingerprint
from selfspec.backbone import Backbone
from selfspec.prompts import Message, Prompt
from selfspec.room import fitting
from selfspec.terminal import Progress, refusing
from selfspec.training.generate import Batch, Done, Job
from selfspec.training.options import AnswerOptions
from selfspec.training.shards import AnswerFolder


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Prompt],
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
        options: options.
        quiet: print no progress.

    Returns:
        The manifest, as written to `folder/manifest.json`.
    """
    options = options or AnswerOptions()
    eos = end_tokens(model, tokenizer)
    several = {_row_id(c, t) for c in conversations if c.later for t in range(_turns(c))}
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
        backbone = Backbone(model, backend=options.attention or attention.best(model.device, model.dtype))
        skipped: list[str] = []
        wanted = [_row_id(c, t) for c in conversations for t in range(_turns(c))]
        done = sum(name in target.ids for name in wanted)
        with Progress(len(wanted), done, quiet) as progress:
            for turn in range(max((_turns(c) for c in conversations), default=0)):
                todo = [c for c in conversations if turn < _turns(c) and _row_id(c, turn) not in target.ids]
                ready = [c for c in todo if turn == 0 or _row_id(c, turn - 1) in said]
                skipped += [_row_id(c, turn) for c in todo if turn and _row_id(c, turn - 1) not in said]
                asked = prompts.encode_all(tokenizer, [_asked(tokenizer, c, turn, said, eos) for c in ready])
                jobs = []
                for c, prompt in zip(ready, asked, strict=True):
                    name = _row_id(c, turn)
                    room = (backbone.max_positions or 1 << 30) - len(prompt)
                    if room < 1 or not prompt:
                        skipped.append(name)
                        continue
                    temperature, seed = _draw(options, name)
                    jobs.append(Job(name, prompt, min(options.max_new_tokens, room), temperature, seed))
                progress.skip(len(todo) - len(jobs))
                for one in _generate(backbone, eos, jobs, options, progress):
                    row = {
                        "id": one.job.id,
                        "prompt_ids": one.job.prompt,
                        "answer_ids": one.tokens,
                        "temperature": one.job.temperature,
                        "finish_reason": one.finish_reason,
                    }
                    target.add(row)
                    keep(row)
            if not quiet:
                progress.show()
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
        written = 0
        for done in batch.run(group):
            progress.add(len(done), batch.tokens - written)
            written = batch.tokens
            yield from done
        del batch


def _asked(
    tokenizer: PreTrainedTokenizerBase, conversation: Prompt, turn: int, said: dict[str, list[int]], eos: frozenset[int]
) -> list[Message]:
    """The messages that stand before the answer to a turn, the model's own earlier answers fed back."""
    messages = list(conversation.messages)
    for t in range(turn):
        ids = said[_row_id(conversation, t)]
        ids = ids[:-1] if ids[-1] in eos else ids
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        messages += [{"role": "assistant", "content": text}, prompts.user(conversation.later[t])]
    return messages


def _turns(conversation: Prompt) -> int:
    return 1 + len(conversation.later)


def _row_id(conversation: Prompt, turn: int) -> str:
    return f"{conversation.id}#{turn + 1}" if conversation.later else conversation.id


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


def run(
    files: Sequence[Path],
    output: Path,
    model: str,
    device: str | None,
    dtype: str | None,
    limit: int | None,
    settings: dict[str, Any],
) -> int:
    """`selfspec answer`. `settings` are fields of `AnswerOptions`."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "auto")
    with refusing():
        options = AnswerOptions(**settings)
        conversations = prompts.read(files, limit)
        base, tokenizer = hub.load(model, dtype=dtype, device=device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through the folder's exit, which saves
    began = time.monotonic()
    manifest = answer(base, tokenizer, conversations, output, options)
    print(json.dumps({"folder": str(output), "seconds": round(time.monotonic() - began, 1), **manifest["counts"]}))
    return 0
