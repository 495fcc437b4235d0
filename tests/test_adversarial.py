"""The benchmark of bad drafts: what it damages, and that it says what came of it."""

import json
from pathlib import Path

import pytest
import tiny
import tiny_chat
import torch

from selfspec import SelfSpecModel
from selfspec.measure import Measured, timed


@pytest.fixture
def adversarial(tmp_path, monkeypatch):
    """The benchmark; it keeps no latency table of these models."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import adversarial

    return adversarial


def test_it_says_how_fast_and_whether_texts_are_equal(adversarial, tmp_path, capsys):
    model = tiny_chat.save_model(tmp_path / "model")
    adapter = tiny_chat.save_adapter(tmp_path / "adapter", model)
    before = {f.name: f.read_bytes() for f in Path(adapter).iterdir()}
    out = tmp_path / "out.json"
    argv = ["--model", model, "--adapter", adapter, "--device", "cpu", "--json", str(out)]
    argv += [
        "--max-new-tokens",
        "6",
        "--limit",
        "3",
        "--easy",
        "1",
        "--length",
        "5",
        "--repeats",
        "2",
        "--slots",
        "1,2",
    ]
    adversarial.main(argv)
    rows = json.loads(out.read_text())["rows"]
    assert [(r["case"], r["slots"]) for r in rows] == [(c, n) for c in adversarial.CASES for n in (1, 2)]
    for r in rows:
        assert r["answers"] == 3 and r["different"] == [] and r["match_rate_to_ar"] == 1.0
        assert r["worst"] > 0 and 0 < r["speedup"]["ar"]["min"] <= r["speedup"]["ar"]["median"]
    assert capsys.readouterr().out.count("3 of 3") == 6
    assert {f.name: f.read_bytes() for f in Path(adapter).iterdir()} == before
    with pytest.raises(SystemExit, match="not drafts"):
        adversarial.main(["--cases", "random,drafts"])


def test_it_damages_a_copy(adversarial, tmp_path):
    """Every tensor keeps its numbers in another order; the adapter and the model that were loaded stay as they are."""
    folder = tiny_chat.save_model(tmp_path / "model")
    whole = SelfSpecModel.from_pretrained(folder, tiny_chat.save_adapter(tmp_path / "adapter", folder))
    kept = [p.clone() for m in (whole.path, whole.model) for p in m.parameters()]
    broken = adversarial.damaged(whole, str(tmp_path / "adapter"), 0)
    assert broken.model is whole.model
    for a, b in zip(kept, [p for m in (whole.path, whole.model) for p in m.parameters()], strict=True):
        assert torch.equal(a, b)
    moved = 0
    for a, b in zip(whole.path.parameters(), broken.path.parameters(), strict=True):
        assert torch.equal(a.flatten().sort().values, b.flatten().sort().values)
        moved += not torch.equal(a, b)
    assert moved
    with pytest.raises(SystemExit, match="no adapter to damage"):
        adversarial.damaged(whole, "none", 0)


def test_a_text_that_differs_is_named(adversarial, capsys):
    def one(name, outputs, decode):
        runner = adversarial.engine_runner(SelfSpecModel(tiny.model_of()), "ar", name=name)
        runs = [[timed(runner, [[5], [6]], 3)] for _ in range(2)]
        for (run,), seconds in zip(runs, decode, strict=True):
            run.outputs, run.decode = outputs, seconds
        return Measured(runner, runs)

    done = [one("ar", [[1, 2, 3], [4, 5, 6]], (1.0, 1.0)), one("auto", [[1, 2, 3], [4, 5, 7]], (2.0, 2.0))]
    found = adversarial.row("random", 2, done)
    assert found["different"] == [1] and found["worst"] == 0.5 and found["match_rate_to_ar"] == 0.5
    adversarial.show(found)
    assert "1 of 2  under 0.95" in capsys.readouterr().out
    done[1].error = "RuntimeError: no"
    assert adversarial.row("random", 2, done)["error"] == "auto: RuntimeError: no"
