import json
from collections import Counter

import pytest
import tiny_chat
import torch

from selfspec import bench, measure, options, runners
from selfspec.model import SelfSpecModel
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
    argv += ["--max-new-tokens", "8", "--concurrency", "1,2", "--repeats", "2"]
    argv += ["--baseline", "hf,hf-compile,hf-lookup,hf-bfloat16"]
    ran = tiny_chat.run("bench", *argv, "--json", out)
    assert ran.exit_code == 0  # a baseline that cannot run here fails its row only
    data = json.loads(out.read_text())
    assert data["kind"] == "bench" and data["complete"] and [s["concurrency"] for s in data["suites"]] == [1, 2]
    for suite in data["suites"]:
        ar, sequential, hf, compiled, lookup, half = suite["results"]
        assert [r["name"] for r in (ar, sequential, hf)] == ["ar", "sequential", "hf"]
        assert set(compiled) == {"name", "error"} and "on the CPU" in compiled["error"]
        if suite["concurrency"] > 1:
            assert "batch_size = 1" in lookup["error"]
        else:
            assert lookup["match_rate_to_ar"] == 1 and lookup["tokens"] == ar["tokens"]
        assert ar["match_rate_to_ar"] == sequential["match_rate_to_ar"] == hf["match_rate_to_ar"] == 1
        assert ar["tau"] == ar["tpf"] == 1 and sequential["tau"] >= 1 and "tau" not in half
        assert {"ar", "hf", "hf-bfloat16"} <= set(ar["speedup"]) and ar["speedup"]["ar"]["median"] == 1
        assert sequential["overlap"] == ar["overlap"] == {} and "overlap" not in hf
        assert sequential["ceiling"] == 4 and sum(sequential["accepted"].values()) == sequential["rounds"]
        assert {"draft", "verify", "rest", "between"} <= set(sequential["round_ms"]) and "round_ms" not in hf
        for r in (ar, sequential, hf, half):
            for ms in (r["ms_per_token"], r["tokens_per_second_request"]):
                assert 0 < ms["min"] <= ms["median"] <= ms["max"]
            assert r["tokens"] == ar["tokens"] or r is half  # bfloat16 may say something else
    printed = ran.stdout
    assert "ms/token" in printed and "x hf-bfloat16" in printed and "acceptance by position" in printed
    assert "hf-compile: FAILED: NotImplementedError" in printed and "ar: ms a round: draft" in printed


def test_all_modes_are_those_that_the_adapter_can_run(model, adapter):
    """The adapter was trained with a known bonus only: it cannot overlap."""
    drafting = SelfSpecModel.from_pretrained(model, adapter)
    assert bench.possible(drafting, options.FAST) == ["ar", "lookup", "sequential", "tree", "auto"]
    assert bench.possible(SelfSpecModel.from_pretrained(model, None), options.FAST) == ["ar", "lookup", "auto"]


def test_slots_stay_full_from_the_queue(model):
    """An ended request's successor joins while the others run; a static batch would wait for the longest."""
    decoder = SelfSpecModel.from_pretrained(model, None, dtype=torch.float32)
    runner, running = runners.engine_runner(decoder, "ar"), []

    class Seen(measure.Watch):
        def step(self, emitted):
            emitted = list(emitted)
            running.append(sorted(i for i, _ in emitted))
            super().step(emitted)

    caps = iter([3, 9, 3, 3])
    real = runners.Request
    runners_request = lambda prompt, cap, eos: real(prompt, next(caps))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners, "Request", runners_request)
        watch = Seen(torch.device("cpu"))
        outputs, _ = runner.run([[5], [6, 7], [8], [9]], 9, 2, watch)
    assert list(map(len, outputs)) == [3, 9, 3, 3]
    assert running == [[0, 1]] * 3 + [[1, 2]] * 3 + [[1, 3]] * 3
    assert watch.steps == 8 and set(watch.last) == {0, 1, 2, 3} and watch.prefill > 0


def test_a_failing_runner_is_one_row_and_the_others_go_on(capsys):
    def broken(prompts, cap, slots, watch):
        raise RuntimeError("no such kernel")

    log = []
    ways = [clockwork("ar", log), measure.Runner("tree", torch.device("cpu"), broken, 4), clockwork("hf", log)]
    *_, (done, _, _) = measure.interleave(ways, [[1], [2]], concurrency=1, cap=3, repeats=2)
    rows = [bench.result(m, done) for m in done]
    assert rows[1] == {"name": "tree", "error": "RuntimeError: no such kernel"}
    assert rows[0]["answers"] == 2 and set(rows[2]["speedup"]) == {"ar", "hf"} and log.count("ar") == 5
    bench.show("suite", 1, rows)
    assert "tree: FAILED: RuntimeError: no such kernel" in capsys.readouterr().out


def test_the_exit_code_says_that_an_own_mode_failed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(runners, "Request", lambda *_: 1 / 0)
    file = tiny_chat.save_prompts(tmp_path / "few.jsonl", 1)
    argv = ["--model", model, "--adapter", "none", "--prompts", file, "--max-new-tokens", 2, "--repeats", 1]
    ran = tiny_chat.run("bench", *argv)
    assert ran.exit_code == 1 and "ar: FAILED: ZeroDivisionError" in ran.stdout and "hf " in ran.stdout


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--baseline", "vllm"], "expected hf, hf-compile"),
        (["--baseline", "hf-lookup-int8"], "'hf-lookup-int8' is unknown"),
        (["--suite", "builtin", "--prompts", "x.jsonl"], "either --suite or --prompts"),
        (["--concurrency", "1,x"], "'x' is not a whole number"),
        (["--modes", ","], "names nothing"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_what_cannot_run_is_refused(model, argv, words):
    result = tiny_chat.run("bench", "--model", model, *argv)
    assert result.exit_code == 2 and words in result.stderr and not result.stdout


def test_acceptance_by_position_comes_from_the_histogram():
    assert Stats(accepted=Counter({1: 4, 2: 4, 4: 2})).acceptance == pytest.approx([6 / 10, 2 / 6, 1.0])
    assert Stats().acceptance == []


def clockwork(name, log):
    """A runner that answers each prompt with three tokens, and writes down that it ran."""

    def run(prompts, cap, slots, watch):
        log.append(name)
        watch.step((i, 1) for i in range(len(prompts)))
        return [[1, 2, 3][:cap] for _ in prompts], []

    return measure.Runner(name, torch.device("cpu"), run)


def test_runners_take_turns_and_the_first_one_changes():
    log = []
    ways = [clockwork("a", log), clockwork("b", log)]
    *_, (done, answers, tokens) = measure.interleave(ways, [[1], [2]], concurrency=1, cap=3, repeats=2)
    assert log == list("ababbabaab")  # warm-up, then the repeats
    assert (answers, tokens) == (1, 3) and [len(r) for r in done[0].repeats] == [2, 2]
    log.clear()
    *_, (done, answers, tokens) = measure.interleave(ways, [[1], [2], [3]], 2, 3, 2, warm_up=None)
    assert log == list("abababba") and (answers, tokens) == (3, 9)  # whole queues, twice to warm up


def test_decode_only_leaves_out_the_prefill_and_its_tokens():
    one = measure.Timed([[1, 2, 3], [4]], prefill=5.0, decode=4.0, firsts=2)
    m = measure.Measured(clockwork("a", []), [[one]])
    assert m.seconds_per_token() == [2.0] and m.seconds_per_token(end_to_end=True) == [9 / 4]
    assert measure.ratio([4.0, 9.0], [2.0, 3.0]) == {"median": 2.5, "min": 2.0, "max": 3.0}


def test_a_round_is_split_into_its_parts_and_what_lies_between():
    """Requests that run together share the seconds, so the parts add up to the batch's time, not to each one's."""
    stats = [Stats(seconds=Counter(prefill=9.0, draft=0.5, verify=1.0)) for _ in range(2)]
    runs = [measure.Timed([[1] * 6] * 2, 9.0, 4.0, 2, stats=stats, steps=5)]
    got = measure.Measured(clockwork("a", []), [runs]).round_ms()
    assert got == {"draft": [pytest.approx(200)], "verify": [pytest.approx(400)], "between": [pytest.approx(200)]}


def test_a_request_is_clocked_from_its_first_tokens_to_its_last(monkeypatch):
    """Several tokens may come first (a looked-up chain): they are not decoded in no time."""
    ticks = iter([0.0, 10.0, 12.0, 16.0, 17.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))

    def run(prompts, cap, slots, watch):
        watch.step([(0, 2), (1, 1)])
        watch.step([(0, 1), (1, 1)])
        watch.step([(0, 5)])
        watch.prefill = 10.0
        return [[1] * 8, [1] * 2], []

    got = measure.timed(measure.Runner("a", torch.device("cpu"), run), [[1], [2]], 8, 2)
    assert got.speeds == [6 / 6, 1 / 2] and got.firsts == 3 and got.steps == 2
    assert (got.prefill, got.decode) == (10.0, 7.0)


def test_static_batches_note_their_first_tokens_once(model):
    hf = tiny_chat.LlamaForCausalLM.from_pretrained(model)
    watch = measure.Watch(torch.device("cpu"))
    outputs, stats = runners.hf_runner(hf, "hf").run([[5, 6], [7], [8]], 4, 2, watch)
    assert stats == [] and len(outputs) == 3 and all(1 <= len(o) <= 4 for o in outputs)
    assert [n for _, n in watch.first.values()] == [1, 1, 1] and 0 < watch.prefill < watch.last[2] - watch.begin
    assert watch.first[0] == watch.first[1] and watch.last[0] == watch.last[1] <= watch.first[2][0]
