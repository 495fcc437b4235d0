"""Answered jobs as lines of the output file."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from selfspec.serving.source import URLS, Job

# fields of the output itself; custom_id tells OpenAI's lines from ours
OURS = ("id", "text", "answers", "finish_reason", "usage", "error", "line", "custom_id")
OPENAIS = ("id", "custom_id", "response", "error")


@dataclass
class Answer:
    """What came of a job.

    Attributes:
        texts: an answer for every turn.
        finish_reason: of the last one, "stop" or "length".
        prompt_tokens: of all turns.
        completion_tokens: likewise.
        error: why there is none.
    """

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


def line_of(job: Job, answer: Answer, model: str, created: int) -> bytes:
    """The output line, with its end.

    Args:
        job: what was asked.
        answer: what came of it.
        model: its name, for OpenAI's form.
        created: the run's start in seconds since 1970, likewise.
    """
    make = _own if job.url is None else _openai
    try:
        return _dump(make(job, answer, model, created))
    except (TypeError, ValueError, RecursionError) as error:  # an extra field that JSON has no form for
        job.extras = {}
        return _dump(
            make(job, Answer(error=f"line {job.line}: its fields cannot be written as JSON ({error})"), model, 0)
        )


def _own(job: Job, answer: Answer, model: str, created: int) -> dict[str, Any]:
    extras = _extras(job, OURS)
    if answer.error is not None:
        return {"id": job.id, "error": answer.error, "line": job.line, **extras}
    several = {"answers": answer.texts} if job.later else {}
    return {
        "id": job.id,
        "text": answer.texts[-1],
        **several,
        "finish_reason": answer.finish_reason,
        "usage": _usage(answer),
        **extras,
    }


def _openai(job: Job, answer: Answer, model: str, created: int) -> dict[str, Any]:
    name = hashlib.sha256(str(job.id).encode("utf-8", "surrogatepass")).hexdigest()[:24]
    extras = _extras(job, OPENAIS)
    out: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": job.id, "response": None, "error": None}
    if answer.error is not None:
        return {**out, "error": {"code": "invalid_request", "message": answer.error, "line": job.line}, **extras}
    chat = job.url == URLS[0]
    text = {"message": {"role": "assistant", "content": answer.texts[-1]}} if chat else {"text": answer.texts[-1]}
    choice = {"index": 0, **text, "logprobs": None, "finish_reason": answer.finish_reason}
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": _usage(answer),
    }
    return {**out, "response": {"status_code": 200, "request_id": name, "body": body}, **extras}


def _extras(job: Job, taken: tuple[str, ...]) -> dict[str, Any]:
    """Other fields of the input; one that has the name of one of the output's own is kept under another name."""
    return {f"input_{k}" if k in taken else k: v for k, v in job.extras.items()}


def _usage(answer: Answer) -> dict[str, int]:
    n, m = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}


def _dump(row: dict[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair: no UTF-8 has it, JSON's escapes do
        return json.dumps(row, allow_nan=False, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """What parquet knows beyond JSON."""
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
