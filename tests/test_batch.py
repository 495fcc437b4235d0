"""Batch files: rows of all kinds, errors, resuming after kills at any moment, a full disk."""

import errno
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_chat
import torch
from test_batch_output import unzipped
from tiny import build

from selfspec import SelfSpecModel, prompts
from selfspec.serving import appender, run_batch
from selfspec.serving.appender import OutputError
from selfspec.serving.batch import BatchOptions
from selfspec.serving.output import Output
from selfspec.serving.source import jobs

CAP = BatchOptions({"max_new_tokens": 12}, slots=4)


def made(folder):
    """A tiny model with an adapter."""
    name = tiny_chat.save_model(folder / "m")
    return SelfSpecModel.from_pretrained(name, tiny_chat.save_adapter(folder / "a", name), dtype=torch.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"))


def run(model, rows, tmp_path, settings=CAP, out="out.jsonl", **how):
    """Answer rows (objects, or lines as they stand). Returns the output's rows by id."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    run_batch(model, tmp_path / "in.jsonl", tmp_path / out, settings, quiet=True, **how)
    found = [json.loads(line) for line in (tmp_path / out).read_bytes().splitlines()]
    return {r.get("custom_id") or r["id"]: r for r in found}


def text(model, ids, **how):
    """What generate answers to a prompt."""
    how = {"max_new_tokens": 12, "do_sample": False, **how}
    out = model.generate([ids], tokenizer=model.tokenizer, **how)[0, len(ids) :]
    return model.tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def asked(model, *said):
    return prompts.encode(model.tokenizer, [prompts.user(s) for s in said])


def test_rows_are_what_generate_answers(model, tmp_path):
    rows = [
        {"id": "a", "prompt": "w1 w2 w3", "label": {"x": [1, None]}, "text": "mine"},
        {"prompt": "w4 w5"},
        {"id": 7, "messages": [{"role": "user", "content": "w9"}], "max_tokens": 2},
        {"id": "t", "turns": ["w1 w7", "w2", "w3"]},
        {"id": "hot", "prompt": "w8 w8", "temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"id": "stop", "prompt": "w1 w2 w3", "max_new_tokens": 20, "repetition_penalty": 1.3},
    ]
    out = run(model, rows, tmp_path)
    assert list(out) == ["a", "line-2", 7, "t", "hot", "stop"]
    assert out["a"]["text"] == text(model, asked(model, "w1 w2 w3"))
    assert out["a"]["label"] == {"x": [1, None]} and out["a"]["input_text"] == "mine"
    assert out["line-2"]["text"] == text(model, asked(model, "w4 w5"))
    assert out[7]["text"] == text(model, asked(model, "w9"), max_new_tokens=2)
    assert out[7]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert out[7]["finish_reason"] == "length"
    first = text(model, asked(model, "w1 w7"))
    talk = [prompts.user("w1 w7"), {"role": "assistant", "content": first}, prompts.user("w2")]
    second = text(model, prompts.encode(model.tokenizer, talk))
    assert out["t"]["answers"][:2] == [first, second] and out["t"]["text"] == out["t"]["answers"][2]
    drawn = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    assert out["hot"]["text"] == text(model, asked(model, "w8 w8"), **drawn)
    assert out["stop"]["text"] == text(model, asked(model, "w1 w2 w3"), max_new_tokens=20, repetition_penalty=1.3)


def test_stop_ends_an_answer_and_is_not_part_of_it(tmp_path):
    from test_stops import words  # one letter a token

    model = SelfSpecModel(build("Llama", torch.float32), None, words())
    whole = text(model, model.tokenizer("abc").input_ids)
    rows = [{"id": k, "prompt": "abc", k: whole[3:5]} for k in ("stop", "stop_strings")]
    rows.append({"id": "two", "prompt": "abc", "stop": [whole[3:5], whole[2:5]]})  # both end at the same letter
    out = run(model, rows, tmp_path)
    at = whole.index(whole[3:5])
    assert len(whole) == 12 and out["stop"]["finish_reason"] == "stop"
    assert out["stop"]["text"] == whole[:at] and out["stop_strings"]["text"] == whole[: at + 2]
    assert out["two"]["text"] == whole[: min(at, whole.index(whole[2:5]))]


def test_sampled_rows_do_not_depend_on_their_neighbours(model, tmp_path):
    rows = [{"id": i, "prompt": "w1 w3", "temperature": 1.0} for i in range(9)]
    many = run(model, rows, tmp_path)
    few = run(model, rows[::2], tmp_path, BatchOptions(CAP.params, slots=1, mode="ar"), out="few.jsonl")
    assert all(many[i] == few[i] for i in few) and len({r["text"] for r in many.values()}) > 5
    other = run(model, rows, tmp_path, BatchOptions(CAP.params, seed=1), out="other.jsonl")
    assert other != many


def test_a_bad_row_is_an_error_and_the_others_go_on(model, tmp_path):
    rows = [
        b'\xef\xbb\xbf{"id": "first", "prompt": "w1"}',
        b'{"id": "cut", "prompt": "w',
        b'{"id": "latin", "prompt": "\xe9"}',
        b"[1, 2]",
        b"",
        {"id": "empty", "prompt": ""},
        {"id": "no prompt"},
        {"id": "zero", "prompt": "w1", "max_tokens": 0},
        {"id": "text cap", "prompt": "w1", "max_tokens": "5"},
        {"id": "huge", "prompt": "w1 " * 100_000},
        {"id": "wide", "prompt": "w1", "max_tokens": 300},
        {"id": "beams", "prompt": "w1", "num_beams": 4},
        {"id": "cold", "prompt": "w1", "temperature": -1},
        {"id": "top", "prompt": "w1", "top_p": 7, "temperature": 1},
        {"id": "first", "prompt": "w2"},
        {"id": None, "prompt": "w3"},
        {"id": [1], "prompt": "w3"},
        {"id": "roles", "messages": [{"role": "user"}]},
        b'{"id": "nan", "prompt": "w1", "x": NaN}',
        b'{"id": "half", "prompt": "w1 \\ud800", "x": "\\ud800"}',
        b'{"id": "deep", "prompt": "w1", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        {"id": "last", "prompt": "w1"},
    ]
    out = run(model, rows, tmp_path)
    errors = {i: r["error"] for i, r in out.items() if "error" in r}
    for name, words in {
        "line-2": "line 2: not JSON", "line-3": "line 3: not UTF-8", "line-4": "line 4: expected an object",
        "empty": "line 6: expected a non-empty string `prompt`", "no prompt": "line 7: expected",
        "zero": "line 8: max_new_tokens=0", "text cap": "line 9: max_tokens='5': expected a whole number",
        "huge": "line 10: a prompt of 100002 tokens", "wide": "line 11: a prompt of 3 tokens and 300 new",
        "beams": "line 12: not supported in this release: num_beams=4", "cold": "line 13: temperature=-1",
        "top": "line 14:", "line-15": "line 15: the id 'first' stands in an earlier", "line-17": "line 17: the id must",
        "roles": "line 18: `messages` must", "nan": "line 19: its fields cannot", "line-21": "line 21: not JSON",
    }.items():  # fmt: skip
        assert words in errors.pop(name), name
    errors.pop("half", None)  # whether half a character can be encoded is the tokenizer's business
    assert not errors and out["last"]["text"] == out["first"]["text"] and "text" in out["line-16"]
    assert len(out) == 21


def test_openai_files_are_answered_in_their_own_form(model, tmp_path):
    chat = {"model": "any", "messages": [{"role": "user", "content": [{"type": "text", "text": "w1 w2 w3"}]}]}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    rows = [
        {"custom_id": "c", **line, "body": {**chat, "max_tokens": 5, "temperature": 0, "seed": 3}},
        {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w1 w2", "max_tokens": 4}},
        {"custom_id": "n", **line, "body": {**chat, "n": 2}},
        {"custom_id": "l", **line, "body": {**chat, "logprobs": True}},
        {"custom_id": "e", **line, "url": "/v1/embeddings", "body": chat},
        {"custom_id": "hot", **line, "body": {**chat, "temperature": 1, "seed": 4}},
    ]
    out = run(model, rows, tmp_path)
    body = out["c"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == text(model, asked(model, "w1 w2 w3"), max_new_tokens=5)
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 5 and not out["c"]["error"]
    raw = model.tokenizer("w1 w2").input_ids
    assert out["p"]["response"]["body"]["choices"][0]["text"] == text(model, raw, max_new_tokens=4)
    drawn = text(model, asked(model, "w1 w2 w3"), do_sample=True, temperature=1.0, top_k=0, seed=4)
    assert out["hot"]["response"]["body"]["choices"][0]["message"]["content"] == drawn
    for name, words in {"n": "one answer", "l": "logprobs", "e": "/v1/embeddings"}.items():
        assert out[name]["response"] is None and words in out[name]["error"]["message"]
    again = run(model, rows, tmp_path)  # complete: nothing is done again, and the times stand
    assert again == out


@pytest.mark.parametrize("out", ["o.jsonl.gz", "o.parquet", "u.jsonl", "-"])
def test_every_form_holds_the_same_rows(model, tmp_path, monkeypatch, capfdbinary, out):
    file = tiny_chat.save_prompts(tmp_path / "in.jsonl", 9)
    run_batch(model, file, tmp_path / "plain.jsonl", CAP, quiet=True)
    want = [json.loads(x) for x in (tmp_path / "plain.jsonl").read_bytes().splitlines()]
    lines = Path(file).read_bytes()
    if out == "-":
        stdin, stdout = io.TextIOWrapper(io.BytesIO(lines)), io.TextIOWrapper(io.BytesIO())
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        run_batch(model, "-", "-", CAP, quiet=True)
        got = [json.loads(x) for x in stdout.buffer.getvalue().splitlines()]
    elif out == "o.parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist([json.loads(x) for x in lines.splitlines()]), tmp_path / "in.parquet")
        run_batch(model, tmp_path / "in.parquet", tmp_path / out, CAP, quiet=True)
        got = pq.read_table(tmp_path / out).to_pylist()
        assert not (tmp_path / "o.parquet.rows.jsonl").exists()
    elif out == "o.jsonl.gz":
        (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines))
        run_batch(model, tmp_path / "in.jsonl.gz", tmp_path / out, CAP, quiet=True, chunk=2)
        got = [json.loads(x) for x in gzip.decompress((tmp_path / out).read_bytes()).splitlines()]
    else:
        run_batch(model, file, tmp_path / out, CAP, quiet=True, ordered=False)
        got = [json.loads(x) for x in (tmp_path / out).read_bytes().splitlines()]
        assert got != want  # as they came
        got.sort(key=lambda r: int(r["id"][1:]))
    assert got == want


def test_other_settings_another_input_or_foreign_files_are_refused(model, tmp_path):
    file, out = tiny_chat.save_prompts(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run_batch(model, file, out, CAP, quiet=True)
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"other settings .params"):
        run_batch(model, file, out, BatchOptions({"max_new_tokens": 5}), quiet=True)
    with pytest.raises(ValueError, match=r"other settings .*ordered"):
        run_batch(model, file, out, CAP, ordered=False, quiet=True)
    more = tiny_chat.save_prompts(tmp_path / "more.jsonl", 4)
    with pytest.raises(ValueError, match=r"other settings .*input"):
        run_batch(model, more, out, CAP, quiet=True)
    assert out.read_bytes() == before
    assert run_batch(model, more, out, CAP, overwrite=True, quiet=True)["rows"] == 4
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="how it was made"):
        run_batch(model, file, tmp_path / "mine.jsonl", CAP, quiet=True)
    with pytest.raises(ValueError, match="no prompt file"):
        run_batch(model, tmp_path / "none.jsonl", out, CAP, quiet=True)
    with Output(tmp_path / "held.jsonl", {}), pytest.raises(RuntimeError, match="another process"):
        Output(tmp_path / "held.jsonl", {})


def test_an_input_that_breaks_off_keeps_what_was_answered(model, tmp_path):
    whole = gzip.compress(b"".join(json.dumps({"id": i, "prompt": f"w{i % 50}"}).encode() + b"\n" for i in range(600)))
    (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    few = BatchOptions({"max_new_tokens": 2}, slots=64)
    with pytest.raises(prompts.PromptError, match="cannot be read as gzipped"):
        run_batch(model, tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl", few, quiet=True)
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) > 20


class Disk:
    """os.pwrite on a disk with so many bytes left: the last write is cut short, as a real one is."""

    def __init__(self, monkeypatch, left):
        self.left, self.write = left, os.pwrite
        monkeypatch.setattr(appender.os, "pwrite", self)

    def __call__(self, file, data, at):
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = min(len(data), self.left)
        self.left -= n
        return self.write(file, bytes(data)[:n], at)


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.gz"])
def test_a_full_disk_is_said_and_the_run_can_go_on(model, tmp_path, monkeypatch, name):
    file = tiny_chat.save_prompts(tmp_path / "in.jsonl", 9)
    run_batch(model, file, tmp_path / f"whole{name}", CAP, quiet=True)
    with monkeypatch.context() as patch:
        Disk(patch, 500)
        with pytest.raises(OutputError, match=r"No space left on device\. What was finished is safe"):
            run_batch(model, file, tmp_path / name, CAP, quiet=True, chunk=1)
    kept = (tmp_path / name).read_bytes()
    assert len(kept) <= 500 and (not kept or unzipped(tmp_path / name).endswith(b"}\n"))
    counts = run_batch(model, file, tmp_path / name, CAP, quiet=True)
    assert 0 < counts["resumed"] < 9
    assert (tmp_path / name).read_bytes().startswith(kept)
    assert unzipped(tmp_path / name) == unzipped(tmp_path / f"whole{name}")


def test_the_command_resumes_after_kill_9(tmp_path):
    """The whole command, killed as soon as rows are there."""
    m = tiny_chat.save_model(tmp_path / "m")
    file, out = tiny_chat.save_prompts(tmp_path / "in.jsonl", 24), tmp_path / "out.jsonl"
    argv = ["batch", file, str(out), "--model", m, "--dtype", "float32", "--max-new-tokens", "16", "--slots", "2"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "selfspec.cli", *argv, "--chunk-rows", "1"], stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (out.exists() and out.stat().st_size):
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = out.read_bytes()
    ran = tiny_chat.run(*argv, "--json", tmp_path / "report.json")
    assert ran.exit_code == 0 and "24 rows" in ran.stderr and "were there before" in ran.stderr
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert [json.loads(x)["id"] for x in out.read_bytes().splitlines()] == [f"p{i}" for i in range(24)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rows"] == 24 and 0 < report["resumed"] < 24 and report["engine"]["tau"] >= 1
    again = tiny_chat.run(*argv)
    assert again.exit_code == 0 and "24 were there before" in again.stderr
    other = tiny_chat.run(*argv[:-2], "--seed", "1")
    assert other.exit_code == 2 and "other settings" in other.stderr


def test_ids_are_unique_whatever_the_rows_say():
    rows = [{"id": "line-2", "prompt": "a"}, {"prompt": "b"}, {"id": 1, "prompt": "c"}, {"id": "1", "prompt": "d"}]
    found = list(jobs(enumerate([*rows, {"id": 1, "prompt": "e"}], 1)))
    assert [j.id for j in found] == ["line-2", "line-2-", 1, "1", "line-5"]
    assert [bool(j.error) for j in found] == [False, False, False, False, True]


@pytest.mark.parametrize("how", [{"params": {"top_p": 7.0}}, {"memory": 3}, {"mode": "no-such-mode"}])
def test_refused_settings_leave_nothing_that_forbids_the_right_ones(model, tmp_path, how):
    with pytest.raises(ValueError, match=r"top_p|memory|mode"):
        run(model, [{"prompt": "w1 w2"}], tmp_path, BatchOptions(**how))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]
    assert run(model, [{"prompt": "w1 w2"}], tmp_path)["line-1"]["text"]


def test_a_small_file_takes_no_memory_for_hundreds_of_rows(model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "w1 w2"}\n{"prompt": "w3"}')
    how = BatchOptions({"max_new_tokens": 2}, slots=256)
    peak = run_batch(model, tmp_path / "in.jsonl", tmp_path / "o.jsonl", how, quiet=True)["engine"]["memory"]["peak"]
    one = BatchOptions({"max_new_tokens": 2}, slots=1)
    least = run_batch(model, tmp_path / "in.jsonl", tmp_path / "p.jsonl", one, quiet=True)["engine"]["memory"]["peak"]
    assert 0 < peak <= 2 * least


def test_a_table_or_an_address_is_not_taken_for_json_lines(model, tmp_path):
    with pytest.raises(ValueError, match=r"out\.csv: expected a name that ends in \.jsonl"):
        run(model, [{"prompt": "w1"}], tmp_path, out="out.csv")
    with pytest.raises(ValueError, match=r"s3://bucket/in\.jsonl is an address"):
        run_batch(model, "s3://bucket/in.jsonl", tmp_path / "out.jsonl")
