import json
from functools import partial

import pytest
import tiny
import tiny_chat
import torch

from selfspec import explain, options, shapes
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan
from selfspec.plan.cost import Costs
from selfspec.plan.latency import Latency, measure
from selfspec.plan.policy import Fixed
from selfspec.plan.simulate import Recorder, simulate
from selfspec.plan.table import LatencyTable
from selfspec.plan.tabulate import Sizes, tabulate
from selfspec.plan.views import Assignment
from selfspec.planners import planner_for
from selfspec.session import Request

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model):
    return tiny_chat.save_adapter(tmp_path_factory.mktemp("adapter"), model, layouts=("known", "hidden"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "latency"


SMALL = ["--rows", "1,4", "--requests", "1,2", "--contexts", "16"]


def test_profile_measures_keeps_and_completes(model, adapter, cache):
    argv = ["profile", model, "--adapter", adapter, "--dtype", "float32", *SMALL]
    ran = tiny_chat.run(*argv)
    assert ran.exit_code == 0 and "ms at 16" in ran.stdout and "overlap" in ran.stdout
    (file,) = cache.iterdir()
    (found,) = json.loads(tiny_chat.run(*argv, "--json").stdout)
    assert found["file"] == str(file) and found["setting"]["dtype"] == "float32" and found["n_layers"] == 2
    kinds = {(p["kind"], p["requests"], p["rows"]) for p in found["points"]}
    assert {("clean", 1, 1), ("clean", 2, 4), ("draft", 1, 4), ("overlap", 1, 4)} <= kinds
    before = LatencyTable.load(file)
    assert not tiny_chat.run(*argv).stderr  # nothing is measured twice
    wider = tiny_chat.run(*argv[:-5], "1,4,8", *argv[-4:]).stderr
    assert "clean 1 x 8" in wider and "clean 1 x 4" not in wider
    assert set(LatencyTable.load(file).points) > set(before.points)
    assert "clean 1 x 4" in tiny_chat.run(*argv, "--fresh").stderr


def test_profile_takes_sizes_without_weights(tmp_path, monkeypatch):
    config = tiny_chat.LlamaForCausalLM.from_pretrained(tiny_chat.save_model(tmp_path / "m")).config
    monkeypatch.setitem(shapes.SHAPES, "tiny", config)
    config.save_pretrained(tmp_path / "config")
    for shape in ("tiny", tmp_path / "config"):
        ran = tiny_chat.run("profile", "--shape", shape, "--entries", "0,1", *SMALL, "--json")
        both = json.loads(ran.stdout)
        assert [{p["entry"] for p in t["points"] if p["kind"] == "draft"} for t in both] == [{0}, {1}]
        assert all(t["setting"]["dtype"] == "bfloat16" for t in both)


def test_known_sizes_are_those_of_their_names():
    for name, billions in {"smollm2-135m": 0.1345, "qwen3-1.7b": 1.72, "qwen3-8b": 8.19}.items():
        model = shapes.random_model(name, torch.bfloat16, "meta")
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["profile", "--shape", "no-such"], "qwen3-8b"),
        (["profile", "no-such"], "no-such"),
        (["profile", "--entries", "-1"], "count from 0"),
        (["profile", "--rows", "0"], "at least 1"),
        (["explain", "no-such", "w1"], "no-such"),
    ],
)
def test_what_cannot_run_is_refused(argv, words):
    ran = tiny_chat.run(*argv)
    assert ran.exit_code == 2 and words in ran.stderr and not ran.stdout


def test_explain_shows_table_estimate_and_choices(model, adapter):
    argv = ["explain", model, "w1 w2 w3", "--adapter", adapter, "--dtype", "float32", "--max-new-tokens", "20"]
    found = json.loads(tiny_chat.run(*argv, "--seconds", "1", "--json").stdout)
    assert found["table"][0]["plan"] == "ar" and {"verify_ms", "draft_ms"} <= set(found["table"][0])
    assert any("tree" in r["plan"] for r in found["table"]) and "known 0 0" in found["estimate"]
    assert sum(r["emitted"] for r in found["rounds"]) == len(found["output"]) - 1
    assert found["rounds"][0]["why"] == "first" and all(r["ms"] > 0 for r in found["rounds"])
    plain = tiny_chat.run(*argv)
    assert plain.exit_code == 0 and "best now" in plain.stdout and "% of the time for probes" in plain.stdout


def test_a_text_does_not_depend_on_the_plans(model, adapter):
    loaded = SelfSpecModel.from_pretrained(model, adapter, dtype=torch.float64)
    prompt = [6, 7, 8, 9]
    expected = loaded.generate([prompt], max_new_tokens=24, mode="ar")[0, 4:].tolist()
    planner = planner_for(loaded.bodies, seconds=0.5)

    class Anything(Fixed):
        def __init__(self):
            self.plans, self.turn = planner.plans, 0

        def round(self, active):
            self.turn += 1
            return [Assignment(tuple(active), self.plans[7 * self.turn % len(self.plans)])] if active else []

    request = Request(prompt, 24, frozenset([2]))
    assert len(list(explain.rounds(loaded, Anything(), request))) > 1
    assert request.output == expected


def test_the_simulator_foretells_real_rounds(model, adapter):
    """Same plan, same rounds, one by one; and a smaller block never accepts what the larger one did not."""
    loaded = SelfSpecModel.from_pretrained(model, adapter, dtype=torch.float64)
    planner = planner_for(loaded.bodies, seconds=0.5)
    for plan in [p for p in planner.plans if p.mode in ("ar", "lookup", "sequential", "overlap")]:
        recorder, real = Recorder(), []
        request = Request([6, 7, 8, 9, 7, 8], 40, frozenset())
        for chosen, emitted, _ in explain.rounds(loaded, Fixed(plan), request):
            recorder.note(chosen, [sum(real)], emitted)
            real += emitted
        (trace,) = recorder.traces()
        assert trace.tokens == sum(real) == 39 and trace.prompt == 6
        out = simulate(Fixed(plan), planner.costs, [trace])
        assert out.rounds == len(real) and sorted(out.accepted.elements()) == sorted(real)


def test_the_simulator_foretells_time():
    """Rounds cost about what the table of their forwards, measured in the same moment, says."""
    hf = tiny.build("Llama", torch.float32, hidden_size=256, intermediate_size=1024, max_position_embeddings=512)
    loaded = SelfSpecModel(hf, tiny.path_of(hf, block_size=8, noise=0.0))
    plan, sizes = Plan("sequential", 8), Sizes((1, 8), (1,), (32,), (8,))
    ratios = []
    for _ in range(3):  # a shared machine may be three times slower a second later
        table = tabulate(loaded.backbone, sizes, measured=partial(measure, repeats=9))
        recorder, seconds, done = Recorder(), 0.0, 0
        for chosen, emitted, spent in explain.rounds(loaded, Fixed(plan), Request([5] * 16, 24)):
            recorder.note(chosen, [done], emitted)
            done, seconds = done + sum(emitted), seconds + spent
        ratios.append(1e3 * seconds / simulate(Fixed(plan), Costs(table), recorder.traces()).ms)
    assert 0.6 < sorted(ratios)[1] < 2.0


def test_latencies_of_a_bad_file_are_measured_again(model, adapter, cache):
    argv = ["profile", model, "--adapter", adapter, *SMALL]
    assert tiny_chat.run(*argv).exit_code == 0
    (file,) = cache.iterdir()
    file.write_text("{")
    assert "clean 1 x 1" in tiny_chat.run(*argv).stderr and LatencyTable.load(file).points
    assert isinstance(LatencyTable.load(file).points[0], Latency) and options.layers("0, 3") == (0, 3)
