import json
from collections import Counter

import pytest
import tiny_chat
import torch

from selfspec import bench, measure
from selfspec.stats import Stats

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model):
    return tiny_chat.save_adapter(tmp_path_factory.mktemp("adapter"), model)


def test_one_report_holds_every_setting(tmp_path, model, adapter):
    file = tiny_chat.save_prompts(tmp_path / "few.jsonl", 3)
    out = tmp_path / "bench.json"
    argv = ["--model", model, "--adapter", adapter, "--prompts", file, "--modes", "sequential", "--dtype", "float32"]
    argv += ["--max-new-tokens", "8", "--batch", "1,2", "--repeats", "2", "--baseline", "hf-float32,hf-bfloat16"]
    ran = tiny_chat.run("bench", *argv, "--json", out)
    assert ran.exit_code == 0
    data = json.loads(out.read_text())
    assert data["complete"] and [s["batch"] for s in data["suites"]] == [1, 2]
    for suite in data["suites"]:
        ar, sequential, hf, half = suite["results"]
        assert [r["name"] for r in suite["results"]] == ["ar", "sequential", "hf-float32", "hf-bfloat16"]
        assert ar["match_rate_to_ar"] == sequential["match_rate_to_ar"] == hf["match_rate_to_ar"] == 1
        assert ar["tau"] == ar["tpf"] == 1 and sequential["tau"] >= 1 and "tau" not in half
        assert set(ar["speedup"]) == {"ar", "hf-float32", "hf-bfloat16"} and ar["speedup"]["ar"]["median"] == 1
        assert sequential["ceiling"] == 4 and sum(sequential["accepted"].values()) == sequential["rounds"]
        for r in suite["results"]:
            ms = r["ms_per_token"]
            assert 0 < ms["min"] <= ms["median"] <= ms["max"]
            assert r["tokens"] == ar["tokens"] or r is half  # bfloat16 may say something else
    printed = ran.stdout
    assert "ms/token" in printed and "x hf-bfloat16" in printed and "acceptance by position" in printed


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--baseline", "vllm"], "hf-float32"),
        (["--suite", "builtin", "--prompts", "x.jsonl"], "either --suite or --prompts"),
        (["--batch", "1,x"], "'x' is not a whole number"),
        (["--modes", ","], "names nothing"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_what_cannot_run_is_refused(model, argv, words):
    result = tiny_chat.run("bench", "--model", model, *argv)
    assert result.exit_code == 2 and words in result.stderr and not result.stdout


def test_acceptance_by_position_comes_from_the_histogram():
    stats = Stats(accepted=Counter({1: 4, 2: 4, 4: 2}))
    assert measure.conditional_acceptance(stats) == pytest.approx([6 / 10, 2 / 6, 1.0])
    assert measure.conditional_acceptance(Stats()) == []


def clockwork(name, seconds, log):
    """A runner that answers each prompt with three tokens, and writes down that it ran."""

    def run(prompts, cap, first):
        log.append(name)
        first()
        return [[1, 2, 3][:cap] for _ in prompts], []

    return measure.Runner(name, torch.device("cpu"), run)


def test_runners_take_turns_and_the_first_one_changes():
    log = []
    runners = [clockwork("a", 1, log), clockwork("b", 2, log)]
    *_, (done, answers, tokens) = measure.interleave(runners, [[1], [2]], batch=1, cap=3, repeats=2)
    assert log == list("ababbabaab")  # warm-up, then the repeats
    assert (answers, tokens) == (1, 3) and [len(r) for r in done[0].repeats] == [2, 2]


def test_decode_only_leaves_out_the_prefill_and_its_token():
    one = measure.Timed([[1, 2, 3], [4]], prefill=5.0, decode=4.0)
    m = measure.Measured(clockwork("a", 1, []), [[one]])
    assert m.seconds_per_token() == [2.0] and m.seconds_per_token(end_to_end=True) == [9 / 4]
    assert measure.ratio([4.0, 9.0], [2.0, 3.0]) == {"median": 2.5, "min": 2.0, "max": 3.0}


def test_the_first_token_is_noted_once(model):
    hf = tiny_chat.LlamaForCausalLM.from_pretrained(model)
    seen = []
    outputs, stats = measure.hf_runner(hf, "hf").run([[5, 6], [7]], 4, lambda: seen.append(1))
    assert seen == [1] and stats == [] and all(1 <= len(o) <= 4 for o in outputs)
    assert bench.match_rate(outputs, outputs) == 1
