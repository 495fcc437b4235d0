"""What went wrong with batch files when somebody tried to break them: each fault by its name."""

import io
import json
import sys
from pathlib import Path

import pytest
import tiny_chat
from test_batch import CAP, made, run

from selfspec.serving import appender, run_batch
from selfspec.serving.batch import Batcher


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
