"""Answers a file of prompts, row by row: resumable, and a bad row ends nobody else's.

The rows go through one engine; as many wait in it as keep its slots filled, so that a file of any length needs little
memory. A row with several turns comes back to the engine once a turn is answered.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec import options, prompts
from selfspec.adapters.io import fingerprint
from selfspec.model import SelfSpecModel
from selfspec.serving import metrics
from selfspec.serving.answers import Answer, line_of
from selfspec.serving.engine import Engine
from selfspec.serving.lane import most_slots
from selfspec.serving.output import Output, apart, resumable
from selfspec.serving.params import Builder, merged, stops_of
from selfspec.serving.source import Job, jobs
from selfspec.serving.ticket import Ticket
from selfspec.stats import Stats, rates
from selfspec.terminal import Progress, say


@dataclass(frozen=True)
class BatchOptions:
    """How rows are answered.

    Attributes:
        params: generation settings of rows that say nothing else; by default greedy and transformers' own.
        system: a system message for conversations that have none.
        seed: of sampled rows without one of their own.
        mode: see `SelfSpecModel.generate`, as for the next two and `lengths`.
        block_size: likewise.
        tree_nodes: likewise.
        slots: rows at a time, at most; by default 256 on CUDA and 32 elsewhere.
        memory: bytes that keys and values may take; by default most of what is free.
        name: the model's, in OpenAI's form.
        lengths: the length rule of drafted chains.
    """

    params: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    seed: int = 0
    mode: str | None = None
    block_size: int | None = None
    tree_nodes: int | None = None
    slots: int | None = None
    memory: int | None = None
    name: str = "selfspec"
    lengths: str | None = None


@dataclass(eq=False)
class Done:
    """A row's answer: its line in the output, and how many tokens it has."""

    job: Job
    line: bytes
    tokens: int


class Batcher:
    """Answers jobs with one engine.

    Args:
        model: with its tokenizer.
        settings: how.
        created: for OpenAI's form, see `line_of`.

    Raises:
        ValueError: a plan or a default that the model cannot serve.
    """

    def __init__(self, model: SelfSpecModel, settings: BatchOptions, created: int = 0):
        self.model, self.settings, self.created = model, settings, created
        plan = model.policy(settings.mode, settings.block_size, settings.tree_nodes, lengths=settings.lengths)
        self.builder = Builder(model, settings.params, settings.seed)
        self.engine = Engine(model, plan, settings.slots, settings.memory)
        self._asked: dict[Ticket, _Conversation] = {}

    def run(self, source: Iterable[Job]) -> Iterator[Done | None]:
        """Answer jobs. Yields each one's answer when it is whole, and None between two rounds."""
        source, exhausted = iter(source), False
        while not exhausted or self.engine.busy:
            while not exhausted and self.engine.waiting < self.engine.slots + 16:
                job = next(source, None)
                exhausted = job is None
                if job is not None and (done := self._ask(_Conversation(job, self.settings.system))):
                    yield done
            for event in self.engine.step() if self.engine.busy else ():
                if event.finish_reason is not None and (done := self._answered(event.ticket)):
                    yield done
            yield None

    def _ask(self, talk: _Conversation) -> Done | None:
        """Queue the next turn of a conversation; what is wrong with it ends it."""
        job = talk.job
        if job.error is not None:
            return self._done(talk, job.error)
        try:
            prompt = talk.encoded(self.model.tokenizer)
            request = self.builder.request(prompt, job.params, str(job.id))
            self._asked[self.engine.add(request)] = talk
        except Exception as error:  # a template's or a tokenizer's own complaint as well as ours
            return self._done(talk, f"line {job.line}: {error or type(error).__name__}")
        return None

    def _answered(self, ticket: Ticket) -> Done | None:
        """One turn is answered: ask the next, or end the conversation."""
        talk, request = self._asked.pop(ticket), ticket.request
        if ticket.error is not None:
            return self._done(talk, f"line {talk.job.line}: {ticket.error}")
        answer = talk.answer
        answer.prompt_tokens += len(request.prompt)
        answer.completion_tokens += len(request.output)
        answer.finish_reason = request.finish_reason
        tokens = request.output[:-1] if request.output[-1] in request.eos else request.output
        text = self.model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        stops = stops_of(merged(self.settings.params, talk.job.params))
        text = text[: min((at for s in stops if (at := text.find(s)) >= 0), default=len(text))]
        answer.texts.append(text)
        return self._ask(talk) if talk.next_turn(text) else self._done(talk)

    def _done(self, talk: _Conversation, error: str | None = None) -> Done:
        talk.answer.error = error
        line = line_of(talk.job, talk.answer, self.settings.name, self.created)
        return Done(talk.job, line, talk.answer.completion_tokens)


class _Conversation:
    """A job on its way, turn by turn."""

    def __init__(self, job: Job, system: str | None):
        self.job, self.answer, self.messages, self.later = job, Answer(), list(job.messages), list(job.later)
        if system and self.messages and self.messages[0]["role"] != "system":
            self.messages.insert(0, {"role": "system", "content": system})

    def encoded(self, tokenizer: Any) -> list[int]:
        """Token ids of the conversation so far."""
        return tokenizer(self.job.text).input_ids if self.job.text else prompts.encode(tokenizer, self.messages)

    def next_turn(self, text: str) -> bool:
        """Note an answer. Returns whether the user says something more."""
        if not self.later:
            return False
        self.messages += [{"role": "assistant", "content": text}, prompts.user(self.later.pop(0))]
        return True


def run_batch(
    model: SelfSpecModel,
    source: str | Path,
    target: str | Path,
    settings: BatchOptions | None = None,
    *,
    ordered: bool = True,
    overwrite: bool = False,
    chunk: int = 64,
    metrics_port: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Answer every row of a file. Killed at any time and called again, it goes on where it was.

    Args:
        model: with its tokenizer.
        source: JSON Lines, gzipped where the name ends in `.gz`, parquet, `.txt` with a prompt a line, or "-" for JSON
            Lines on stdin. A row has `prompt`, `messages` or `turns`, perhaps an `id`, generation settings and further
            fields; or it is a request in OpenAI's batch form.
        target: `.jsonl`, `.jsonl.gz`, `.parquet`, or "-" for stdout.
        settings: how rows are answered.
        ordered: answers in the order of the rows; otherwise as they come.
        overwrite: begin anew whatever is there.
        chunk: rows a write.
        metrics_port: of a Prometheus endpoint while it runs.
        quiet: show no progress.

    Returns:
        Counts of rows, and the engine's figures (`selfspec.serving.metrics.snapshot`).

    Raises:
        ValueError: source or target cannot be used, or the target was made with other settings.
        OutputError: the disk is full; what was finished is safe, and the same call goes on from there.
    """
    settings = settings or BatchOptions()
    apart(source, target)
    mark, expected = identity(source)
    slots = settings.slots or most_slots(model.backbone.device)
    enough = slots if expected is None else max(1, min(slots, expected))  # no room for rows that never come
    batcher = Batcher(model, replace(settings, slots=enough))  # first: what it refuses leaves no output
    opened = Output(target, recorded(model, settings, mark, ordered), ordered, overwrite, chunk)
    with resumable(opened, expected, quiet) as out:
        if out.complete:
            found = out.counts["rows"] if mark else sum(1 for _ in rows_of(source))
            if found != out.counts["rows"]:  # all that can be told of an input that nobody has kept
                raise ValueError(
                    f"{target} is complete with {out.counts['rows']:,} rows, and stdin has {found:,}; write elsewhere, "
                    "or overwrite it"
                )
            return {**out.counts, "resumed": out.counts["rows"], "engine": None}
        before = out.counts["rows"]
        batcher.created = out.created
        endpoint = None if metrics_port is None else metrics.serve(batcher.engine, metrics_port)
        if endpoint is not None and not quiet:
            say(f"metrics at http://{endpoint.server_name}:{endpoint.server_port}/metrics")
        try:
            with Progress(expected or before, before, quiet) as progress:
                answer_all(batcher.run, rows_of(source), out, progress, lambda: batcher.engine.metrics.stats)
        finally:
            if endpoint is not None:
                endpoint.shutdown()
                endpoint.server_close()  # the port is free again
        summary = metrics.snapshot(batcher.engine)
        out.finish(summary)
        return {**out.counts, "resumed": before, "engine": summary}


def rows_of(source: str | Path) -> Iterator[Job]:
    """The jobs of a file, or of stdin."""
    stdin = sys.stdin.buffer if str(source) == "-" else None
    return jobs(prompts.numbered("stdin.jsonl" if stdin else source, stdin))


def answer_all(run: Any, source: Iterable[Job], out: Output, progress: Progress, stats: Any) -> None:
    """Answer the jobs that an output lacks, and write them.

    Args:
        run: see `Batcher.run`.
        source: all jobs.
        out: the output.
        progress: shows how far it is.
        stats: says what speculation did so far.
    """
    index: dict[str | int, int] = {}  # of the jobs that are being answered
    count = itertools.count()

    def missing() -> Iterator[Job]:
        for job in source:
            i = next(count)
            progress.total = max(progress.total, i + 1)
            if job.id in out.done:
                out.skip(i, job.id)
            else:
                index[job.id] = i
                yield job

    for done in run(missing()):
        if done is not None:
            out.put(index.pop(done.job.id), done.job.id, done.line)
            progress.note = note_of(stats())
            progress.add(1, done.tokens)
        out.tick()


def note_of(stats: Stats) -> str:
    """Tau, the share of first drafts that were accepted, and the rates of overlapped rounds."""
    first = stats.acceptance[0] if stats.acceptance else 0.0
    return f"tau {stats.tau:.2f}, acceptance {first:.2f}{rates(stats.overlap)}" if stats.rounds else ""


def recorded(model: SelfSpecModel, settings: BatchOptions, mark: str | None, ordered: bool) -> dict[str, Any]:
    """What the bytes of an output depend on; not how many rows are answered at a time."""
    base = fingerprint(model.model)
    template = getattr(model.tokenizer, "chat_template", None) or ""
    kept = {k: v for k, v in asdict(settings).items() if k not in ("slots", "memory")}
    return {
        "model": f"{base['architecture']} {base['weights'][:32]} {options.dtype_name(model.backbone.dtype)}",
        "adapter": None if model.path is None else _hash(repr(model.path.config).encode()),
        "template": _hash(template.encode()),
        "input": mark,
        "ordered": ordered,
        **kept,
    }


def identity(source: str | Path) -> tuple[str | None, int | None]:
    """A hash of the input, so that a run is never resumed with another one, and its rows; None for stdin.

    Raises:
        ValueError: there is no such file, or it is an address.
    """
    if str(source) == "-":
        return None, None
    if "://" in str(source):
        raise ValueError(f"{source} is an address, which only a batch on Ray reads (--ray); expected a file")
    path, digest, lines, end = Path(source), hashlib.sha256(), 0, b"\n"
    if not path.is_file():
        raise ValueError(f"no prompt file at {path}")
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            lines, end = lines + block.count(b"\n"), block[-1:]
    plain = path.suffix not in (".gz", ".parquet")
    return digest.hexdigest()[:32], lines + (end != b"\n") if plain else None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
