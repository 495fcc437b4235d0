"""Sweeps: which rows they hold, what is run again, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_chat
import torch
import yaml
from test_training_trainer import answered, tiny

from selfspec.training import sweep
from selfspec.training.config import TrainConfig
from selfspec.training.trainer import Trainer

FORWARDS = {"points": [
    {"kind": kind, "requests": 1, "rows": rows, "entry": entry, "graph": True, "ms": ms}
    for kind, rows, entry, ms in (("clean", 1, 0, 1.0), ("clean", 5, 0, 2.0),
                                  ("draft", 3, 0, 3.0), ("draft", 5, 0, 5.0),
                                  ("draft", 3, 2, 1.0), ("draft", 5, 2, 1.0))
]}  # fmt: skip


@pytest.fixture
def files(tmp_path) -> Path:
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    with open(tmp_path / "answers.jsonl", "w") as file:
        for a in answered(model, 12):
            file.write(json.dumps({"id": a.id, "prompt_ids": a.prompt, "answer_ids": a.answer}) + "\n")
    (tmp_path / "forwards.json").write_text(json.dumps(FORWARDS))
    base = {"model": str(tmp_path / "model"), "data": str(tmp_path / "answers.jsonl"), "out": str(tmp_path / "out"),
            "max_steps": 3, "fit": 0, "length": 48, "rows": 2, "anchors": 8, "log_every": 1, "dtype": "float32",
            "valid_docs": 2, "tensorboard": False, "adapter.block_size": 4,
            "adapter.layouts": ["known", "hidden"]}  # fmt: skip
    stages = [
        {"name": "path", "axes": {
            "entry": {"e0": {"adapter.entry": 0}, "e1": {"adapter.entry": 1}},
            "tuning": {"copy": {}, "lora": {"adapter.tuning": "lora", "adapter.rank": 4}}}},
        {"name": "objectives", "axes": {
            "loss": {"ce": {"objectives": {"ce": 1.0}}, "kl": {"objectives": {"kl": 1.0}}}}},
    ]  # fmt: skip
    sheet = {"base": base, "stages": stages, "latency": str(tmp_path / "forwards.json")}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sheet))
    return tmp_path


def trained(ran: list[str], fail: str = "", stop: str = ""):
    def train(folder: Path, wanted: TrainConfig) -> str:
        ran.append(folder.name.rpartition("-")[0])
        if fail and fail in folder.name:
            return "exit code 1: it broke"
        if stop and stop in folder.name:
            raise KeyboardInterrupt
        torch.set_num_threads(1)
        Trainer(wanted).train()
        return ""

    return train


def test_rows_are_crossed_and_the_best_goes_on(files, capsys) -> None:
    ran: list[str] = []
    assert sweep.run(files / "sweep.yaml", train=trained(ran)) == 0
    table = json.loads((files / "out" / "sweep.json").read_text())
    rows = table["rows"]
    assert ran == ["e0-copy", "e0-lora", "e1-copy", "e1-lora", "ce", "kl"]
    for r in rows:
        assert all(r[name] >= 1 for name in ("tau", "tau_t1", "tau_hidden", "tau_t1_hidden")) and r["steps"] == 3
        assert r["anchors_s"] > 0 and r["mb"] > 0
        entry = r["fields"]["adapter.entry"]
        draft = {0: 4.0, 1: 2.5}[entry]  # four rows: between three and five, and so is the entry
        assert r["ms_token"] == pytest.approx((draft + 1.75) / r["tau"], abs=1e-4) and r["ms_token_hidden"] is None
    best = min(rows[:4], key=lambda r: r["ms_token"])
    assert all(r["fields"].items() >= best["fields"].items() for r in rows[4:])
    shown = capsys.readouterr().out
    assert all(r["row"] in shown for r in rows) and "ms token" in shown
    again: list[str] = []
    assert sweep.run(files / "sweep.yaml", train=trained(again)) == 0
    assert not again and json.loads((files / "out" / "sweep.json").read_text()) == table


def test_a_row_that_fails_is_a_row_with_its_error(files, capsys) -> None:
    ran: list[str] = []
    assert sweep.run(files / "sweep.yaml", train=trained(ran, fail="e1-copy")) == 1
    rows = {r["row"]: r for r in json.loads((files / "out" / "sweep.json").read_text())["rows"]}
    assert len(rows) == 6 and rows["e1-copy"]["error"] == "exit code 1: it broke" and "tau" in rows["kl"]
    assert "it broke" in capsys.readouterr().err
    again: list[str] = []
    sweep.run(files / "sweep.yaml", train=trained(again, fail="nothing"))
    assert again[0] == "e1-copy" and set(again) <= {"e1-copy", "ce", "kl"}  # the best may be another now


def test_a_stopped_sweep_goes_on_with_the_row_it_was_at(files) -> None:
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sweep.run(files / "sweep.yaml", train=trained(ran, stop="e1-copy"))
    again: list[str] = []
    assert sweep.run(files / "sweep.yaml", train=trained(again)) == 0
    assert ran == ["e0-copy", "e0-lora", "e1-copy"] and again == ["e1-copy", "e1-lora", "ce", "kl"]


def test_a_wrong_row_is_refused_before_anything_runs(files) -> None:
    sheet = yaml.safe_load((files / "sweep.yaml").read_text())
    sheet["stages"][1]["axes"]["loss"]["kl"] = {"objectives": {"kll": 1.0}}
    (files / "sweep.yaml").write_text(yaml.safe_dump(sheet))
    result = tiny_chat.run("train", "--sweep", files / "sweep.yaml")
    assert result.exit_code == 2 and "stage objectives, row kl: unknown objective 'kll'" in result.stderr
    assert not (files / "out").exists()


def test_a_row_in_a_process_of_its_own(files) -> None:
    """A crash is told by its last line; what was set on the command line reaches every row."""
    wanted = TrainConfig.load(None, ["model=nowhere", f"data={files / 'answers.jsonl'}", "fit=0", f"out={files / 'x'}"])
    error = sweep.in_a_process(files / "x", wanted)
    assert error.startswith("exit code 2: ") and "nowhere" in error
    ran: list[TrainConfig] = []
    sweep.run(files / "sweep.yaml", None, ["lr=0.5"], lambda folder, wanted: ran.append(wanted) or "no")
    assert len(ran) == 6 and all(c.lr == 0.5 and c.resume and c.path.block_size == 4 for c in ran)


def test_an_option_replaces_what_stood_inside_it() -> None:
    stage = {"name": "s", "axes": {"loss": {"kl": {"objectives": {"kl": 1.0}}}}}
    row = next(sweep.rows_of(stage, {"objectives.ce": 2.0, "lr": 1.0}))
    assert row.fields == {"objectives": {"kl": 1.0}, "lr": 1.0}


def test_the_shipped_sweep_is_valid() -> None:
    file = Path(sweep.__file__).parent / "recipes" / "ablation.yaml"
    data = yaml.safe_load(file.read_text())
    shared = TrainConfig.load(None, start=sweep._nested(data["base"])).to_dict()
    rows = [row for stage in data["stages"] for row in sweep.rows_of(stage, {})]
    assert len(rows) >= 45 and len({r.folder for r in rows}) == len(rows)
    for row in rows:
        sweep.settings(shared, row, "out")
    table = sweep.Forwards.load(Path(__file__).parents[1] / "benchmarks" / "forward_times_h200.json")
    assert table.per_token(16, 0, 4.6) > table.per_token(16, 20, 3.9) > 0
    assert table.ms("draft", 16, 15) == pytest.approx((table.ms("draft", 16, 10) + table.ms("draft", 16, 20)) / 2)


def test_a_sweep_file_that_is_not_there_is_named_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"no file at .*none\.yaml"):
        sweep.run(tmp_path / "none.yaml")
