import gzip
import json

import pytest
import tiny_chat
import torch

from selfspec import check, choose, prompts, sampling
from selfspec.reference import Judge, first_difference, until_eos

LENGTH = ["--max-new-tokens", "8"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model):
    return tiny_chat.save_adapter(tmp_path_factory.mktemp("adapter"), model)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny_chat.save_prompts(tmp_path_factory.mktemp("prompts") / "few.jsonl")


def run(tmp_path, *argv):
    out = tmp_path / "report.json"
    result = tiny_chat.run("check", *argv, *LENGTH, "--json", out)
    return result, json.loads(out.read_text())


@pytest.mark.parametrize("dtype, lengths", [("float32", None), ("float64", None), ("float64", "product:threshold=0.9")])
def test_every_mode_and_batch_gives_the_text_of_hugging_face(tmp_path, model, adapter, file, dtype, lengths):
    argv = ["--model", model, "--adapter", adapter, "--prompts", file, "--dtype", dtype]
    argv += ["--lengths", lengths] if lengths else []
    result, data = run(tmp_path, *argv, "--batch", "1,2", "--mode", "ar,sequential,tree")
    assert data["settings"]["lengths"] == ({"sequential": lengths} if lengths else {})
    assert result.exit_code == 0 and data["complete"] and data["mismatches"] == 0
    wanted = {(mode, batch) for mode in ("ar", "sequential", "tree") for batch in (1, 2)}
    assert {(r["mode"], r["batch"]) for r in data["runs"]} == wanted
    assert all(r["prompts"] == 5 and r["matched_prompts"] + r["ties"] == 5 for r in data["runs"])
    assert data["prompts"] == 30 and data["tokens"] > 0 and data["tau"] >= 1 and not data["control"]
    assert "match rate" in result.stdout


def test_a_wrong_decoder_is_a_mismatch(tmp_path, model, file, monkeypatch):
    monkeypatch.setattr(choose, "best", lambda scores: (scores.argmax(-1) + 1) % scores.shape[-1])
    result, data = run(tmp_path, "--model", model, "--prompts", file)
    assert result.exit_code == 1 and data["mismatches"] == 5 and data["ties"] == 0 and data["match_rate"] == 0
    first = data["first_mismatches"][0]
    assert first["prompt"] == "p0" and first["position"] == 0
    assert first["expected"] == first["top"][0] and first["found"] == first["expected"] + 1
    assert "MISMATCH: p0" in result.stdout


def test_a_tie_is_proved_by_float64(tmp_path, file, monkeypatch):
    def twins(model):  # tokens 32.. have the very logits of tokens 0..31
        model.lm_head.weight[32:] = model.lm_head.weight[:32]

    folder = tiny_chat.save_model(tmp_path / "twins", edit=twins, eos=None)
    monkeypatch.setattr(choose, "best", lambda scores: scores[..., :32].argmax(-1) + 32)
    result, data = run(tmp_path, "--model", folder, "--prompts", file)
    assert result.exit_code == 0 and data["ties"] > 0 and data["mismatches"] == 0 and data["match_rate"] < 1
    assert all(m["verdict"] == "tie" and m["gap"] < 1e-4 for m in data["first_mismatches"])
    assert "tie: p" in result.stdout
    result, data = run(tmp_path, "--model", folder, "--prompts", file, "--dtype", "float64")
    assert result.exit_code == 1 and data["ties"] == 0  # float64 gets no such excuse


def test_a_single_run_reports_its_own_figures_and_every_mismatch(tmp_path, model, adapter, file, monkeypatch):
    argv = ["--model", model, "--adapter", adapter, "--prompts", file, "--mode", "sequential", "--batch-size", 2]
    result, data = run(tmp_path, *argv, "--limit", 4)
    (only,) = data["runs"]
    assert result.exit_code == 0 and only["batch"] == 2 and data["prompts"] == 4 and data["first_mismatches"] == []
    for key in ("prompts", "tokens", "matched_prompts", "match_rate", "tau", "tpf"):
        assert data[key] == only[key] and data[key] > 0
    assert data["overlap"] == only["overlap"] == {}
    assert data["matched_prompts"] == 4 and data["match_rate"] == 1
    monkeypatch.setattr(choose, "best", lambda scores: (scores.argmax(-1) + 1) % scores.shape[-1])
    result, data = run(tmp_path, *argv, "--limit", 4)
    assert result.exit_code == 1 and [m["prompt"] for m in data["first_mismatches"]] == ["p0", "p1", "p2", "p3"]
    for m in data["first_mismatches"]:
        assert {"prompt", "position", "expected", "found", "top", "gap"} <= set(m) and m["gap"] > 0


def test_several_files_are_several_sets(tmp_path, model, file):
    other = tiny_chat.save_prompts(tmp_path / "other.jsonl", 2)
    for argv in (["--prompts", file, other], ["--prompts", file, "--prompts", other]):
        result, data = run(tmp_path, "--model", model, *argv, "--mode", "ar", "--limit", 3)
        assert result.exit_code == 0
        assert [(r["suite"], r["prompts"]) for r in data["runs"]] == [("few.jsonl", 3), ("other.jsonl", 2)]


def test_half_precision_has_its_control(tmp_path, model, file):
    result, data = run(tmp_path, "--model", model, "--prompts", file, "--dtype", "bfloat16")
    assert [c["batch"] for c in data["control"]] == [8] and data["control"][0]["prompts"] == 5
    assert result.exit_code == (1 if data["mismatches"] else 0)


def test_partial_reports_are_written(tmp_path, model, file, monkeypatch):
    seen = []
    monkeypatch.setattr(check, "SAVE_EVERY", -1.0)
    monkeypatch.setattr(check, "write", lambda path, data: seen.append(data))
    result = tiny_chat.run("check", "--model", model, "--prompts", file, *LENGTH, "--json", tmp_path / "x.json")
    assert result.exit_code == 0
    assert len(seen) == 11 and [d["complete"] for d in seen] == [False] * 10 + [True]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--mode", "sequential"], "drafts with an adapter"),
        (["--mode", "nonsense"], "nonsense"),
        (["--prompts", "no/such.jsonl"], "no prompt file at no/such.jsonl"),
        (["--adapter", "no-such"], "no adapter at"),
        (["--lengths", "product"], "prunes drafted chains"),
        (["--max-new-tokens", "5000"], "p0 has"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(model, file, argv, words):
    result = tiny_chat.run("check", "--model", model, "--prompts", file, *argv)
    assert result.exit_code == 2 and words in result.stderr and not result.stdout
    assert result.stderr.startswith("selfspec: ") and result.stderr.count("\n") == 1


def test_where_answers_differ():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert until_eos([5, 2, 2], frozenset([2])) == [5, 2] and until_eos([5], frozenset()) == [5]


def test_an_answer_cut_short_is_never_a_tie(model):
    hf = tiny_chat.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    finding = Judge(hf).compare([5, 6], [7, 8], [7])
    assert finding is not None and finding.found is None and not finding.tie


def test_prompt_files(tmp_path):
    rows = [
        {"prompt": "w1"},
        {"id": 7, "turns": ["w2", "w3"]},
        {"messages": [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]},
    ]
    with gzip.open(tmp_path / "some.jsonl.gz", "wt") as out:
        out.write("\n".join(map(json.dumps, rows)) + "\n\n")
    found = prompts.read(tmp_path / "some.jsonl.gz")
    assert [p.id for p in found] == ["some/0", "7", "some/2"]
    assert [p.messages[-1]["content"] for p in found] == ["w1", "w2", "w4"] and found[1].later == ("w3",)
    assert len(prompts.read(tmp_path / "some.jsonl.gz", limit=2)) == 2
    (tmp_path / "more.txt").write_text("w6\n\nw7\n")
    both = prompts.read([tmp_path / "some.jsonl.gz", tmp_path / "more.txt"], limit=4)
    assert both == [*found, prompts.Prompt("more/0", (prompts.user("w6"),))]
    with_template, plain = tiny_chat.tokenizer(), tiny_chat.tokenizer(template=False)
    words = with_template.convert_ids_to_tokens(prompts.encode(with_template, found[0].messages))
    assert words == ["user:", "w1", "assistant:"]
    assert plain.convert_ids_to_tokens(prompts.encode(plain, found[0].messages)) == ["w1"]


def test_parquet_prompts_are_read_as_lines_are(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"prompt": "w1", "turns": None}, {"prompt": "w2", "turns": ["w2", "w3"]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "some.parquet")
    first, second = prompts.read(tmp_path / "some.parquet")
    assert first == prompts.Prompt("some/0", (prompts.user("w1"),))
    assert second == prompts.Prompt("some/1", (prompts.user("w2"),), ("w3",))
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(prompts.PromptError, match=r"bad\.parquet"):
        prompts.read(tmp_path / "bad.parquet")


@pytest.mark.parametrize("line", ["", "{", "[]", '{"prompt": 3}', '{"turns": []}', '{"messages": [{"role": "user"}]}'])
def test_a_bad_prompt_file_says_where(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text('\n{"prompt": "good"}\n' + line if line else line)
    with pytest.raises(prompts.PromptError, match=r"bad\.jsonl, line 3" if line else r"bad\.jsonl holds no"):
        prompts.read(file)


SAMPLED = {
    "temperature": ["--temperature", "0.8", "--seed", "3"],
    "cuts": ["--top-p", "0.9", "--top-k", "20", "--min-p", "0.02"],
    "seed": ["--seed", "5"],
    "greedy with a penalty": ["--repetition-penalty", "1.2"],
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_answers_are_those_of_plain_decoding(tmp_path, model, adapter, file, name):
    argv = ["--model", model, "--adapter", adapter, "--prompts", file, "--batch", "1,2", "--mode", "sequential,tree"]
    result, data = run(tmp_path, *argv, *SAMPLED[name], "--limit", "3")
    assert result.exit_code == 0 and data["match_rate"] == 1 and data["prompts"] == 12
    (reference,) = data["reference"]
    assert reference["mode"] == ("hf" if "penalty" in name else "ar") and reference["prompts"] == 3
    assert data["settings"]["seed"] == {"temperature": 3, "cuts": 0, "seed": 5}.get(name)


def test_a_wrong_draw_is_a_mismatch_and_a_tie_of_draws_is_proved(tmp_path, model, adapter, file, monkeypatch):
    """Noise of another seed in speculation; and two tokens whose perturbed scores are equal."""
    real = sampling.draw

    def other(scores, seed, position):
        return real(scores, seed + (len(scores) > 1), position)  # rounds of more than one node

    for where in (choose, sampling):
        monkeypatch.setattr(where, "draw", other)
    argv = ["--model", model, "--adapter", adapter, "--prompts", file, "--temperature", "1.5", "--top-k", "0"]
    result, data = run(tmp_path, *argv, "--mode", "sequential")
    assert result.exit_code == 1 and data["mismatches"] > 0 and data["ties"] == 0
    assert "plain decoding has" in result.stdout
    hf = tiny_chat.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    twins = lambda text, logits: torch.where(torch.arange(64) < 2, 50.0, logits)  # noqa: E731
    assert Judge(hf).compare([5, 6], [7, 0], [7, 1], twins).tie and not Judge(hf).compare([5, 6], [7, 0], [7, 1]).tie


def test_values_that_generate_refuses_are_refused_before_any_work(model, file):
    result = tiny_chat.run("check", "--model", model, "--prompts", file, "--temperature", "-1")
    assert result.exit_code == 2 and "temperature" in result.stderr and not result.stdout
