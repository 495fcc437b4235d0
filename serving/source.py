"""Rows of a batch file as jobs: their own form and OpenAI's; every row gets one id that no other has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from selfspec import prompts
from selfspec.prompts import Message, PromptError, Row
from selfspec.serving.params import PARAMETERS

URLS = ("/v1/chat/completions", "/v1/completions")
OPENAI_FIELDS = {"custom_id", "method", "url", "body"}
TEXT_FIELDS = {"id", "prompt", "messages", "turns"}
IDLE_FIELDS = {"model", "user", "metadata", "store"}  # of an OpenAI body; they say nothing about the text


@dataclass(eq=False)
class Job:
    """One row to be answered.

    Attributes:
        line: where it stands in the file, from 1.
        id: a string or a number, as the answer will have it.
        messages: the conversation up to the first answer that is asked for.
        text: the prompt as it stands, without chat template, instead of messages.
        later: further things that the user says, each after an answer.
        params: generation settings of this row.
        extras: its other fields, which the answer carries too.
        url: of an OpenAI request; None for a row of our own form.
        error: why it cannot be answered.
    """

    line: int
    id: str | int
    messages: tuple[Message, ...] = ()
    text: str | None = None
    later: tuple[str, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    url: str | None = None
    error: str | None = None


def jobs(rows: Iterable[tuple[int, Row | PromptError]]) -> Iterator[Job]:
    """Read rows as jobs. A row without id is called `line-N`; so is one whose id stands earlier already, as an error.

    Args:
        rows: line numbers and rows, or what is wrong with them (`selfspec.prompts.numbered`).
    """
    seen: set[str | int] = set()
    for line, row in rows:
        job = job_of(line, row)
        named = row.get("custom_id" if job.url else "id") if isinstance(row, dict) else None
        if job.id in seen and job.id == named:
            job.error = job.error or f"line {line}: the id {job.id!r} stands in an earlier line already"
            job.id = _nameless(line)
        while job.id in seen:
            job.id = f"{job.id}-"
        seen.add(job.id)
        yield job


def job_of(line: int, row: Row | PromptError) -> Job:
    """One row as a job; whatever is wrong with it becomes the job's error."""
    if isinstance(row, PromptError):
        return Job(line, _nameless(line), error=str(row))
    openai = "custom_id" in row and "body" in row
    id = row.get("custom_id" if openai else "id")
    good = isinstance(id, str | int) and not isinstance(id, bool)
    job = Job(line, id if good else _nameless(line), url=str(row.get("url", URLS[0])) if openai else None)  # type: ignore[arg-type]
    try:
        if id is not None and not good:
            raise ValueError(f"the id must be a string or a whole number, not {id!r}")
        (_openai if openai else _own)(job, row)
    except ValueError as error:
        job.error = f"line {line}: {error}"
    return job


def _own(job: Job, row: Row) -> None:
    row = {k: v for k, v in row.items() if v is not None}  # parquet has every column in every row
    job.params = {k: v for k, v in row.items() if k in PARAMETERS}
    job.extras = {k: v for k, v in row.items() if k not in PARAMETERS | TEXT_FIELDS}
    _read(job, row)


def _openai(job: Job, row: Row) -> None:
    body, method = row["body"], row.get("method", "POST")
    if job.url not in URLS or method != "POST":
        raise ValueError(f"{method} {job.url}: expected POST and one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"`body` must be an object, not {body!r}")
    # what is switched off is not asked for; a setting that is false means something
    body = {k: v for k, v in body.items() if v is not None and (v is not False or k in PARAMETERS)}
    job.extras = {k: v for k, v in row.items() if k not in OPENAI_FIELDS}
    if body.pop("n", 1) != 1:
        raise ValueError("n: a row has one answer; write the row n times, with other seeds")
    text = "messages" if job.url == URLS[0] else "prompt"
    unknown = sorted(set(body) - PARAMETERS - IDLE_FIELDS - {text})
    if unknown:
        raise ValueError(f"not supported in this release: {', '.join(unknown)}")
    job.params = {"top_k": 0, **{k: v for k, v in body.items() if k in PARAMETERS}}  # OpenAI knows no top_k
    if text == "prompt":
        job.text = body.get("prompt")
        if not isinstance(job.text, str) or not job.text:
            raise ValueError("`prompt` must be a non-empty string")
    else:
        _read(job, {"messages": _flat(body.get("messages"))})


def _read(job: Job, row: Row) -> None:
    try:
        found = prompts.prompt_of(row, "", "")
    except PromptError as error:
        raise ValueError(str(error).removeprefix(": ")) from error
    job.messages, job.later = found.messages, found.later


def _flat(messages: Any) -> Any:
    """Messages whose content is a list of text parts, as one text."""
    if not isinstance(messages, list):
        raise ValueError("`messages` must be a list")
    out = []
    for m in messages:
        parts = m.get("content") if isinstance(m, dict) else None
        if isinstance(parts, list):
            if not all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts
            ):
                raise ValueError("`content` may hold text parts only")
            m = {**m, "content": "".join(p["text"] for p in parts)}
        out.append(m)
    return out


def _nameless(line: int) -> str:
    return f"line-{line}"
