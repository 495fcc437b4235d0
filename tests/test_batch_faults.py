"""What went wrong with batch files when somebody tried to break them: each fault by its name."""

import gzip
import io
import json
import re
import socket
import sys
from pathlib import Path

import pytest
import tiny_chat
from test_batch import CAP, made, run

from selfspec.serving import appender, run_batch
from selfspec.serving.batch import Batcher, identity
from selfspec.serving.params import checked, merged, stops_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", ["in.jsonl", "link.jsonl", "out.jsonl"])
def test_overwriting_the_input_by_its_answers_is_refused(model, tmp_path, name):
    """`selfspec batch same.jsonl same.jsonl --overwrite` ended with an empty file, and said that all was well."""
    file = Path(tiny_chat.save_prompts(tmp_path / "in.jsonl", 3))
    (tmp_path / "link.jsonl").symlink_to(file)
    (tmp_path / "out.jsonl.waiting").symlink_to(file)  # what the run itself writes beside its output
    with pytest.raises(ValueError, match="is the input, and writing"):
        run_batch(model, file, tmp_path / name, CAP, overwrite=True, quiet=True)
    assert len(file.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("text", ['{"half', "{}", "[]", '{"settings": 1}', '{"settings": {}}', "\udcff"])
def test_a_damaged_manifest_is_no_traceback(model, tmp_path, text):
    file, out = tiny_chat.save_prompts(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    run_batch(model, file, out, CAP, quiet=True)
    (tmp_path / "out.jsonl.manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        run_batch(model, file, out, CAP, quiet=True)
    assert run_batch(model, file, out, CAP, overwrite=True, quiet=True)["rows"] == 2


def test_an_output_row_without_id_is_no_traceback(model, tmp_path):
    file, out = tiny_chat.save_prompts(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    run_batch(model, file, out, CAP, quiet=True)
    manifest = tmp_path / "out.jsonl.manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    out.write_text('{"x": 1}\n')
    with pytest.raises(ValueError, match="damaged before byte 9: a row has no id"):
        run_batch(model, file, out, CAP, quiet=True)
    assert out.read_text() == '{"x": 1}\n'
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        run_batch(model, file, tmp_path / "folder.jsonl", CAP, quiet=True)


def test_settings_that_a_row_has_no_place_for_are_not_ignored(model, tmp_path):
    bad = {
        "num_return_sequences": 3, "output_scores": True, "return_dict_in_generate": True, "max_length": 3,
        "presence_penalty": "a", "frequency_penalty": float("inf"), "response_format": "json",
    }  # fmt: skip
    rows = [{"id": name, "prompt": "w1", "temperature": 1.0, name: value} for name, value in bad.items()]
    rows.append({"id": "fine", "prompt": "w1", "num_return_sequences": 1, "output_logits": False, "max_length": None})
    out = run(model, rows, tmp_path)
    assert out.pop("fine")["text"]
    assert all(f"line {i}: {name}=" in out[name]["error"] for i, name in enumerate(out, 1)) and len(out) == len(bad)


@pytest.mark.parametrize("signal_", [KeyboardInterrupt(), SystemExit(143)])
def test_ctrl_c_says_where_a_batch_stands_and_how_it_goes_on(tmp_path, monkeypatch, signal_):
    """It said `Aborted.`, and nothing of what was safe."""
    m, file, out = tiny_chat.save_model(tmp_path / "m"), tiny_chat.save_prompts(tmp_path / "in.jsonl", 9), "out.jsonl"
    argv = ["batch", file, tmp_path / out, "--model", m, "--dtype", "float32", "--max-new-tokens", "6", "--slots", "2"]

    def interrupted(self, source, real=Batcher.run):
        for i, done in enumerate(d for d in real(self, source) if d is not None):
            yield done
            if i == 3:
                raise signal_

    with monkeypatch.context() as patch:
        patch.setattr(Batcher, "run", interrupted)
        ran = tiny_chat.run(*argv)
    assert ran.exit_code == getattr(signal_, "code", 130)
    assert f"stopped: 4 of 9 rows are safe in {tmp_path / out}; the same command goes on" in ran.stderr
    ran = tiny_chat.run(*argv)
    assert ran.exit_code == 0 and "9 rows" in ran.stderr and "4 were there before" in ran.stderr
    assert [json.loads(x)["id"] for x in (tmp_path / out).read_bytes().splitlines()] == [f"p{i}" for i in range(9)]


def test_a_signal_right_after_a_write_repeats_no_row(model, tmp_path, monkeypatch):
    """The rows had been written, were still booked as fresh, and were written once more on the way out."""
    file, calls = tiny_chat.save_prompts(tmp_path / "in.jsonl", 9), []

    def append(self, rows, real=appender.Appender.append):
        real(self, rows)
        calls.append(len(rows))
        if sum(calls) >= 3 and calls[-1]:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(appender.Appender, "append", append)
    with pytest.raises(KeyboardInterrupt):
        run_batch(model, file, tmp_path / "out.jsonl", CAP, quiet=True, ordered=False, chunk=1)
    run_batch(model, file, tmp_path / "out.jsonl", CAP, quiet=True, ordered=False)
    ids = [json.loads(x)["id"] for x in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert sorted(ids) == [f"p{i}" for i in range(9)]


def test_a_report_in_a_missing_folder_is_refused_before_the_work(tmp_path):
    ran = tiny_chat.run("batch", "in.jsonl", "out.jsonl", "--json", tmp_path / "none" / "report.json")
    assert ran.exit_code == 2 and "there is no folder" in ran.stderr


def test_the_commands_sampling_options_are_a_rows_defaults(tmp_path):
    """`selfspec batch` had no --min-p and no --repetition-penalty."""
    argv = ["--model", tiny_chat.save_model(tmp_path / "m"), "--dtype", "float32", "--quiet"]
    how = {"temperature": 0.9, "top_p": 0.9, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2}
    (tmp_path / "a.jsonl").write_text('{"id": 1, "prompt": "w1 w2"}\n')
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": 1, "prompt": "w1 w2", **how, "max_tokens": 9}) + "\n")
    options = [x for k, v in how.items() for x in (f"--{k.replace('_', '-')}", v)]
    for name, more in (("a", [*options, "--max-new-tokens", 9]), ("b", [])):
        files = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-out.jsonl"
        assert tiny_chat.run("batch", *files, *argv, *more).exit_code == 0
    assert (tmp_path / "a-out.jsonl").read_text() == (tmp_path / "b-out.jsonl").read_text()


def test_other_rows_on_stdin_are_not_taken_for_a_finished_run(model, tmp_path, monkeypatch):
    """An output that was complete was said to be the answer to whatever came in next."""
    rows = Path(tiny_chat.save_prompts(tmp_path / "in.jsonl", 3)).read_bytes().splitlines(keepends=True)

    def piped(n):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"".join(rows[:n]))))
        return run_batch(model, "-", tmp_path / "out.jsonl", CAP, quiet=True)["resumed"]

    assert [piped(2), piped(2)] == [0, 2]
    with pytest.raises(ValueError, match="complete with 2 rows, and stdin has 3"):
        piped(3)


NESTED = {"prompt": "w1", "max_tokens": 2}


@pytest.mark.parametrize(
    "extra",
    [{}, {"a": {}}, [{}], [], [[]], "\ud800", {"\ud800": 1}, json.loads("[" * 40 + "]" * 40), 2**70, [1, "a"]],
    ids=repr,
)
def test_a_field_that_parquet_has_no_form_for_does_not_cost_the_run_its_output(model, tmp_path, extra):
    """An empty object, or half a character, ended hours of work in a traceback, again at every resumption."""
    pq = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({**NESTED, "id": i, "x": extra, "\udfff": i}) + "\n" for i in range(2)))
    assert run_batch(model, file, tmp_path / "o.parquet", CAP, quiet=True)["rows"] == 2
    rows = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert [r["id"] for r in rows] == [r["\\udfff"] for r in rows] == [0, 1] and all(r["text"] for r in rows)
    assert all(extra == (r["x"] if r["x"] == extra else json.loads(r["x"])) for r in rows)


@pytest.mark.parametrize("body", [None, {"prompt": "w1", "max_tokens": 2}])
def test_fields_of_the_input_do_not_take_the_place_of_the_outputs(model, tmp_path, body):
    """A row's own `custom_id` named its answer when a run was resumed: the row was answered twice, or the file was
    called damaged. `response` and `error` of an OpenAI row replaced its answer, and a text there was a traceback.
    """
    mine = {"custom_id": "c", "id": "mine", "response": "text", "error": {"x": 1}, "usage": "u", "line": 0, "text": "t"}
    rows = [{**NESTED, **mine, "id": "a"}, {**NESTED, **mine, "id": "b", "custom_id": [1], "max_tokens": 0}]
    if body is not None:
        rows = [{**mine, "body": body}, {**mine, "custom_id": "d", "body": {"prompt": 3}}]
        rows = [{**r, "url": "/v1/completions"} for r in rows]
    out = tmp_path / "out.jsonl"
    found = run(model, rows, tmp_path)
    manifest = tmp_path / "out.jsonl.manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    before = out.read_bytes()
    assert run_batch(model, tmp_path / "in.jsonl", out, CAP, quiet=True)["resumed"] == 2 and out.read_bytes() == before
    good, bad = map(json.loads, before.splitlines())
    if body is None:
        assert good["text"] and good["usage"]["completion_tokens"] == 2 and "max_new_tokens=0" in bad["error"]
        assert (good["input_custom_id"], bad["input_custom_id"], good["response"]) == ("c", [1], "text")
    else:
        assert good["response"]["status_code"] == 200 and good["error"] is None and bad["error"]["code"]
        assert good["input_response"] == bad["input_response"] == "text" and good["usage"] == "u"
    assert len(found) == 2


def test_a_setting_that_is_false_in_an_openai_row_is_not_ignored(model, tmp_path):
    """`do_sample: false` beside a temperature was dropped as if it were `stream: false`, and the row was sampled."""
    bodies = [{"temperature": 2.0, "do_sample": False, "stream": False}, {}, {"temperature": 2.0, "seed": 1}]
    line = {"method": "POST", "url": "/v1/completions"}
    rows = [{"custom_id": str(i), **line, "body": {"prompt": "w1 w2", **b}} for i, b in enumerate(bodies)]
    out = run(model, rows, tmp_path)
    texts = [out[str(i)]["response"]["body"]["choices"][0]["text"] for i in range(3)]
    assert texts[0] == texts[1] != texts[2]


def test_no_stop_at_all_and_whole_numbers_of_a_table_are_understood(model, tmp_path):
    """`stop: []` was an error of transformers' about unusual characters; a table's column of whole numbers with gaps
    holds floats, and every row of it was refused.
    """
    rows = [{"id": "none", "prompt": "w1 w2", "stop": [], "stop_strings": [], "max_tokens": 5.0}]
    rows += [{"id": "plain", "prompt": "w1 w2", "max_tokens": 5}, {"id": "half", "prompt": "w1", "max_tokens": 2.5}]
    bad = {"stop": [None], "stop_strings": 5, "eos_token_id": "x", "suppress_tokens": 5, "do_sample": "no"}
    rows += [{"id": k, "prompt": "w1", k: v} for k, v in bad.items()]
    out = run(model, rows, tmp_path)
    assert out["none"]["text"] == out["plain"]["text"] and out["plain"]["usage"]["completion_tokens"] == 5
    assert "max_tokens=2.5: expected a whole number" in out["half"]["error"]
    assert all(f"{k}={v!r}: expected" in out[k]["error"] for k, v in bad.items())


def test_a_rows_own_stop_strings_replace_the_commands_stop():
    """They were refused as a second name for the same thing."""
    for own in ({"stop_strings": ["b"]}, {"stop": ["b"]}, {"stop": "b", "stop_strings": None}):
        assert checked(merged({"stop": ["a"], "top_k": 3}, own))["stop_strings"] in (["b"], "b")
    assert stops_of(merged({"stop": ["a"]}, {"stop_strings": ["b"]})) == []
    kept = merged({"stop": ["a"], "max_new_tokens": 9}, {"stop": None, "max_tokens": 2})
    assert kept == {"stop": ["a"], "max_tokens": 2}


@pytest.mark.parametrize(
    "data, words",
    [
        (gzip.compress(b"{}", mtime=0), "is gzipped: expected"),
        (b"PAR1\0\n", "is a parquet file"),
        (b"\xff\xfe", "UTF-16"),
    ],
    ids=["gzip", "parquet", "utf-16"],
)
def test_a_file_of_another_kind_is_not_taken_for_bad_lines(model, tmp_path, monkeypatch, data, words):
    """`cat rows.jsonl.gz | selfspec batch - OUT` made a finished output of nothing but errors."""
    (tmp_path / "in.jsonl").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    for source, name in ((tmp_path / "in.jsonl", "a.jsonl"), ("-", "b.jsonl")):
        with pytest.raises(ValueError, match=words):
            run_batch(model, source, tmp_path / name, CAP, quiet=True)
        assert not (tmp_path / name).read_bytes()


def test_a_last_line_without_its_end_is_counted(tmp_path):
    """A run said `2 of 1 rows are safe`."""
    for text, rows in (("a", 1), ("a\n", 1), ("a\nb", 2), ("", 0)):
        (tmp_path / "in.txt").write_text(text)
        assert identity(tmp_path / "in.txt")[1] == rows


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl", "out.jsonl.waiting", "link.jsonl"])
def test_a_report_does_not_replace_the_input_or_the_answers(tmp_path, name):
    """`--json` with the name of either left a report there."""
    file = Path(tiny_chat.save_prompts(tmp_path / "in.jsonl", 2))
    (tmp_path / "link.jsonl").symlink_to(file)
    before = file.read_bytes()
    ran = tiny_chat.run("batch", file, tmp_path / "out.jsonl", "--model", "none", "--json", tmp_path / name)
    assert ran.exit_code == 2 and "the report would take its place" in ran.stderr and file.read_bytes() == before


def test_the_metrics_port_is_said_free_afterwards_and_checked(model, tmp_path, capsys):
    """A second run in the same process found the port taken; port 0 was not told; 70000 was a traceback."""
    pytest.importorskip("prometheus_client")
    file = tiny_chat.save_prompts(tmp_path / "in.jsonl", 1)
    run_batch(model, file, tmp_path / "a.jsonl", CAP, metrics_port=0)
    port = int(re.search(r"metrics at http://\S+:(\d+)/metrics", capsys.readouterr().err)[1])
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
    with pytest.raises(ValueError, match="metrics port 70000"):
        run_batch(model, file, tmp_path / "b.jsonl", CAP, metrics_port=70000, quiet=True)
    ran = tiny_chat.run("batch", file, tmp_path / "c.jsonl", "--metrics-port", "70000")
    assert ran.exit_code == 2 and "less than or equal to 65535" in ran.stderr
