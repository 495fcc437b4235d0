"""Sweeps: which rows they hold, what is run again, and what the table says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_chat
import torch
import yaml
from sweeps import SHIPPED, hidden_price, pretended, table_of, written

from selfspec.training import jobs, sweep
from selfspec.training.config import TrainConfig
from selfspec.training.forwards import Forwards
from selfspec.training.objectives import HEADS, OBJECTIVES
from selfspec.training.trainer import Trainer


@pytest.fixture
def files(tmp_path) -> Path:
    return written(tmp_path)


def trained(ran: list[str], fail: str = "", stop: str = ""):
    def train(folder: Path, wanted: TrainConfig, gpu: str | None) -> str:
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
        assert r["ms_token"] == pytest.approx((draft + 1.75) / r["tau"], abs=1e-4)
        [found] = r["sets"].values()
        assert r["ms_token_hidden"] == pytest.approx(hidden_price(entry, **found["hidden"]), abs=1e-4)
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


def test_a_sweep_under_a_launcher_is_refused(files, monkeypatch) -> None:
    """Every process began all rows in the same folders, and the rows took its rank for their own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = tiny_chat.run("train", "--sweep", files / "sweep.yaml")
    assert result.exit_code == 2 and not (files / "out").exists()
    assert "each takes a GPU" in result.stderr and "without accelerate launch or torchrun" in result.stderr
    monkeypatch.setenv("WORLD_SIZE", "1")  # a launcher of one process is none
    ran = tiny_chat.run("train", "--sweep", files / "none.yaml")
    assert ran.exit_code == 2 and "no file at" in ran.stderr


def test_a_row_in_a_process_of_its_own(files) -> None:
    """A crash is told by its last line; what was set on the command line reaches every row."""
    wanted = TrainConfig.load(None, ["model=nowhere", f"data={files / 'answers.jsonl'}", "fit=0", f"out={files / 'x'}"])
    error = jobs.in_a_process(files / "x", wanted)
    assert error.startswith("exit code 2: ") and "nowhere" in error
    ran: list[TrainConfig] = []
    sweep.run(files / "sweep.yaml", None, ["lr=0.5"], lambda folder, wanted, gpu: ran.append(wanted) or "no")
    assert len(ran) == 6 and all(c.lr == 0.5 and c.resume and c.path.block_size == 4 for c in ran)


def test_an_option_replaces_what_stood_inside_it() -> None:
    stage = {"name": "s", "axes": {"loss": {"kl": {"objectives": {"kl": 1.0}}}}}
    row = next(sweep.rows_of(stage, {"objectives.ce": 2.0, "lr": 1.0}))
    assert row.fields == {"objectives": {"kl": 1.0}, "lr": 1.0}


def test_the_shipped_sweep_is_valid() -> None:
    data = yaml.safe_load(SHIPPED.read_text())
    shared = TrainConfig.load(None, start=sweep._nested(data["base"])).to_dict()
    rows = [row for stage in data["stages"] for row in sweep.rows_of(stage, {})]
    assert all(sweep.settings(shared, row, "out").path for row in rows)
    table = Forwards.load(SHIPPED.parent / data["latency"])
    assert table.per_token(16, 0, 4.6) > table.per_token(16, 20, 3.9) > table.per_token(16, 22, 3.9) > 0
    assert table.ms("draft", 16, 15) == pytest.approx((table.ms("draft", 16, 10) + table.ms("draft", 16, 20)) / 2)


def test_every_objective_of_a_draft_has_a_row_in_the_shipped_sweep() -> None:
    """Seven of them had none."""
    stages = yaml.safe_load(SHIPPED.read_text())["stages"]
    used = {name for stage in stages for row in sweep.rows_of(stage, {}) for name in row.fields.get("objectives", ())}
    assert set(OBJECTIVES) - used == set(HEADS) - {"markov"}  # heads that do not draft


def test_a_sweep_file_that_is_not_there_is_named_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"no file at .*none\.yaml"):
        sweep.run(tmp_path / "none.yaml")


@pytest.fixture
def star(tmp_path, monkeypatch) -> Path:
    """A sweep of three stages, where options without fields are rows of earlier ones."""
    monkeypatch.chdir(tmp_path)
    stages = [
        {"name": "entry", "axes": {"entry": {"e0": {"adapter.entry": 0}, "e1": {"adapter.entry": 1}}}},
        {"name": "tuning", "axes": {"tuning": {"copy": {}, "again": {"lr": 6e-4},
                                               "lora": {"adapter.tuning": "lora", "adapter.rank": 4}}}},
        {"name": "loss", "axes": {"loss": {"same": {"objectives": {"dpace": 0.3, "ce": 1.0}},
                                           "kl": {"objectives": {"kl": 1.0}}}}},
    ]  # fmt: skip
    (tmp_path / "star.yaml").write_text(
        yaml.safe_dump({"base": {"model": "m", "data": "d"}, "stages": stages}, sort_keys=False)
    )
    return tmp_path / "star.yaml"


def test_a_configuration_is_trained_once_and_listed_where_it_stands(star, capsys) -> None:
    """An option that changes nothing, or says a default in other words, is the row that it equals."""
    ran: list[str] = []
    assert sweep.run(star, train=pretended(ran, {"e0": 2.0, "lora": 1.5})) == 0
    assert ran == ["e0", "e1", "lora", "kl"]
    same = {r["row"]: r.get("same_as") for r in table_of()["rows"]}
    assert same == {"e0": None, "e1": None, "copy": "entry e0", "again": "entry e0", "lora": None, "same": "entry e0",
                    "kl": None}  # fmt: skip
    assert all(r["tau"] == 2.0 for r in table_of()["rows"] if r.get("same_as"))
    assert "copy (as entry e0)" in capsys.readouterr().out


def test_configurations_are_equal_by_what_they_mean() -> None:
    plain = TrainConfig(objectives={"ce": 1.0, "dpace": 0.3})
    same = TrainConfig(objectives={"ce": {"weight": 1.0}, "dpace": 0.3}, out="elsewhere", device="cpu", resume=True)
    assert sweep.key_of(plain) == sweep.key_of(same)
    for other in (TrainConfig(lr=1e-3), TrainConfig(adapter={"mask_embedding": "one"}),
                  TrainConfig(objectives={"ce": 1.0}), TrainConfig(data="d"), TrainConfig(minutes=3)):  # fmt: skip
        assert sweep.key_of(other) != sweep.key_of(plain)


def test_a_sweep_goes_on_with_its_sweep_json_alone(star, tmp_path, capsys) -> None:
    """On another machine, in another folder: what stands there is taken over, and nothing else is."""
    assert sweep.run(star, train=pretended([], {"e1": 3.0})) == 0
    wanted = table_of()["rows"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "sweep.json").write_text((tmp_path / "adapter" / "sweep.json").read_text())
    ran: list[str] = []
    assert sweep.run(star, None, ["out=there", "device=cpu"], pretended(ran)) == 0
    assert not ran and table_of("there")["rows"] == wanted and not (tmp_path / "there" / "entry").exists()
    assert sweep.run(star, None, ["out=there", "lr=5e-3"], pretended(ran, {"e1": 3.0})) == 0
    assert ran == ["e0", "e1", "lora", "kl"]  # another lr is another training; "again" is the old e1
    assert [r["row"] for r in table_of("there")["others"]] == ["e0", "lora", "kl"]
    assert sweep.run(star, None, ["out=there"], pretended(ran)) == 0
    assert len(ran) == 4 and table_of("there")["rows"] == wanted


def test_a_row_with_another_base_is_not_taken_for_a_finished_one(star) -> None:
    """A row's folder was named by its own fields alone, so a longer sweep into the same folder trained nothing."""
    assert sweep.run(star, train=pretended([])) == 0
    ran: list[str] = []
    assert sweep.run(star, None, ["minutes=50"], pretended(ran)) == 0
    assert ran == ["e0", "e1", "lora", "kl"]


def test_no_row_is_begun_after_the_limit(star, monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])
    ran: list[str] = []
    fake = pretended(ran)

    def train(*given) -> str:
        now[0] += 240  # four minutes a row
        return fake(*given)

    assert sweep.run(star, train=train, until=9, only=[]) == 0
    assert ran == ["e0", "e1", "lora"]
    shown = capsys.readouterr()
    assert "stage loss: 1 of 2 rows are not trained yet" in shown.err and "lora" in shown.out
    assert [r["row"] for r in table_of()["rows"]] == ["e0", "e1", "copy", "again", "lora", "same"]
    assert sweep.run(star, train=pretended(ran), until=0) == 0 and ran == ["e0", "e1", "lora"]
    assert sweep.run(star, train=pretended(ran)) == 0 and ran == ["e0", "e1", "lora", "kl"]


def test_only_the_stages_that_are_asked_for_are_trained(star, capsys) -> None:
    ran: list[str] = []
    with pytest.raises(ValueError, match="stage entry: 2 of 2 rows are not trained yet, and stage loss starts from"):
        sweep.run(star, train=pretended(ran), only=["loss"])
    with pytest.raises(ValueError, match="no stage los; it has entry, tuning, loss"):
        sweep.run(star, train=pretended(ran), only=["los"])
    assert not ran
    assert sweep.run(star, train=pretended(ran, {"e1": 2.0}), only=["entry"]) == 0 and ran == ["e0", "e1"]
    assert sweep.run(star, train=pretended(ran, {"lora": 3.0}), only=["tuning", "loss"]) == 0
    assert ran == ["e0", "e1", "lora", "kl"]
    assert table_of()["rows"][-1]["fields"]["adapter.entry"] == 1
    assert sweep.run(star, train=pretended(ran), only=["entry"]) == 0
    assert len(ran) == 4 and len(table_of()["rows"]) == 7  # what is known of the others is listed all the same


def test_rows_of_a_stage_run_at_once_on_gpus_of_their_own(star, monkeypatch) -> None:
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    ran: list[str] = []
    both, fake, seen = threading.Barrier(2, timeout=20), pretended(ran), []

    def train(folder: Path, wanted: TrainConfig, gpu: str | None) -> str:
        seen.append((folder.parent.name, gpu))
        if folder.parent.name == "entry":
            both.wait()  # neither ends before the other has begun
        return fake(folder, wanted, gpu)

    assert sweep.run(star, train=train) == 0
    assert sorted(seen[:2]) == [("entry", "GPU-a"), ("entry", "GPU-b")] and sorted(ran[:2]) == ["e0", "e1"]
    assert [r["row"] for r in table_of()["rows"]][:2] == ["e0", "e1"]


def test_one_that_breaks_ends_the_others_processes(star, monkeypatch) -> None:
    """A sweep that is told to end leaves no training behind."""
    begun = threading.Event()

    def train(folder: Path, wanted: TrainConfig, gpu: str | None) -> str:
        if folder.name.startswith("e1"):
            assert begun.wait(20)
            raise KeyboardInterrupt
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        jobs.RUNNING.add(process)
        begun.set()
        try:
            return str(process.wait())
        finally:
            jobs.RUNNING.discard(process)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(star, train=train, jobs=2)
    assert time.monotonic() - began < 30


def test_places_are_the_gpus_that_are_visible(monkeypatch) -> None:
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 0)
    assert jobs.places("auto") == [None] and jobs.places("cpu", 3) == [None] * 3
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 2)
    assert jobs.places("auto") == ["0", "1"] and jobs.places("cuda", 3) == ["0", "1", "0"]
    assert jobs.places("cuda:1") == [None] and jobs.places("cpu") == [None]
    with pytest.raises(ValueError, match="jobs=0"):
        jobs.places("auto", 0)


def test_a_row_that_does_not_suit_what_it_starts_from_is_a_row_with_its_error(star) -> None:
    """It ended the whole sweep, after the stages before it had been trained."""
    sheet = yaml.safe_load(star.read_text())
    head = {"adapter.heads": ["sampler"], "objectives": {"markov": 1.0}}
    sheet["stages"][2]["axes"]["loss"]["head"] = head
    sheet["stages"].append({"name": "more", "axes": {"more": {"kl": {"objectives": {"kl": 1.0}}, "plain": {}}}})
    star.write_text(yaml.safe_dump(sheet, sort_keys=False))
    for _ in range(2):
        assert sweep.run(star, train=pretended([], {"head": 5.0})) == 1
        wrong, plain = table_of()["rows"][-2:]
        assert "'sampler' has no objective" in wrong["error"] and plain["same_as"] == "loss head"
        assert len(table_of()["rows"]) == 10 and not table_of()["others"]


def test_options_of_a_sweep_are_refused_without_one() -> None:
    for option in (["--only", "entry"], ["--until-minutes", "3"], ["--jobs", "2"], ["--ahead"]):
        result = tiny_chat.run("train", "model=m", "data=d", *option)
        assert result.exit_code == 2 and "options of a sweep" in result.stderr
