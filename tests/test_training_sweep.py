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
from test_training_trainer import answered, tiny
from transformers import LlamaConfig

from selfspec import hub
from selfspec.adapters import MaskPathConfig
from selfspec.plan import Plan
from selfspec.shapes import SHAPES
from selfspec.training import forwards, jobs, sweep
from selfspec.training.config import TrainConfig
from selfspec.training.forwards import Forwards
from selfspec.training.objectives import HEADS, OBJECTIVES
from selfspec.training.trainer import Trainer

SHIPPED = Path(sweep.__file__).parent / "recipes" / "ablation.yaml"
KEPT = Path(__file__).parents[1] / "benchmarks" / "training_sweep_h200.json"

FORWARDS = {"n_layers": 2, "points": [
    {"kind": kind, "requests": 1, "rows": rows, "entry": entry, "graph": True, "ms": ms}
    for kind, rows, entry, ms in (("clean", 1, 0, 1.0), ("clean", 5, 0, 2.0), ("clean", 12, 0, 2.7),
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


def hidden_price(entry: int, tau: float, acceptance: list[float | None], **rest) -> float:
    """By `FORWARDS` for blocks of 4: one group or two beside the chain, as four are more rows than it knows."""
    survival = [1.0]
    for share in acceptance:
        survival.append(survival[-1] * (share or 0.0))
    ends = [survival[k] - (survival[k + 1] if k < 3 else 0.0) for k in range(4)]
    prices = []
    for groups, together in ((1, 2.3), (2, 2.7)):
        ms = 1.75 * entry / 2 + together * (2 - entry) / 2
        prices.append(ms / (1 + (tau - 1) / (2 - sum(sorted(ends)[-groups:]))))
    return min(prices)


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


@pytest.fixture
def layers_30(monkeypatch) -> None:
    """Every model has as many layers as SmolLM2-135M."""
    monkeypatch.setattr(hub, "load_config", lambda name: LlamaConfig(num_hidden_layers=30))


def test_the_kept_ablation_lacks_nothing_but_the_rows_that_were_never_run(tmp_path, monkeypatch, layers_30) -> None:
    """Its keys were those of other paths, so that a later call would have trained all of its rows again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.json").write_text(KEPT.read_text())
    kept, ran = json.loads(KEPT.read_text()), []
    given = [f"{name}={json.dumps(kept['base'][name])}" for name in ("model", "data", "eval")]
    assert json.dumps(kept["base"]["eval"]) in SHIPPED.read_text()
    assert sweep.run(SHIPPED, None, [*given, "out=out"], pretended(ran)) == 0
    assert sorted(ran) == ["bv", "chain", "dblast", "focal", "lk_alpha", "positional", "rkl"]
    rows = table_of("out")["rows"]
    # no price has changed either, and where no round is overlapped there is none
    assert [r for r in rows if r["row"] not in ran] == kept["rows"]
    unpriced = [r["row"] for r in kept["rows"] if r["ms_token_hidden"] is None]
    assert unpriced == ["early", "last", "uniform", "uno"]
    best = next(r for r in rows if r["row"] == "linears")["fields"]
    assert all(r["fields"] == best | {"objectives": r["fields"]["objectives"]} for r in rows if r["row"] in ran)


def test_the_shipped_sweep_says_how_many_rows_it_trains(tmp_path, monkeypatch, layers_30) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []
    assert sweep.run(SHIPPED, None, ["model=m", "data=d"], pretended(ran)) == 0
    assert f"# {len(ran)} rows of 3 minutes" in SHIPPED.read_text()


def test_a_kept_group_is_worth_what_rounds_with_it_emit() -> None:
    """Rounds played one after another: an end without a group leaves the next round its anchor alone."""
    acceptance = [0.7, 0.5, None]
    ends = [0.3, 0.35, 0.35, 0.0]
    tau = sum(p * (k + 1) for k, p in enumerate(ends))
    draws = torch.multinomial(torch.tensor(ends), 100_000, True, generator=torch.Generator().manual_seed(0)).tolist()
    for groups, hung in ((1, {1}), (2, {1, 2}), (None, {0, 1, 2, 3})):
        tokens, ready = 0, True
        for end in draws:
            tokens += end + 1 if ready else 1
            ready = not ready or end in hung
        assert 1 + (tau - 1) / (2 - forwards.kept(acceptance, groups)) == pytest.approx(tokens / len(draws), rel=0.01)


def test_hidden_tokens_are_priced_by_the_groups_that_the_table_reaches() -> None:
    """Only a group on every node was priced, which is more rows than the shipped table holds: no row had a price."""
    draft = {0: {16: 1.0}}
    sets = [(2.0, [0.5] * 15), (3.0, [0.8] * 15)]
    for rows, groups in ((32, [1]), (48, [1, 2]), (79, [1, 2]), (80, [1, 2, 4]), (272, [1, 2, 4, None])):
        times = Forwards({16: 1.0, rows: 1.0 + (rows - 16) / 1600}, draft, 30)
        prices = []
        for g in groups:
            beside = 16 * (g or 16)
            tokens = [1 + (tau - 1) / (2 - forwards.kept(acceptance, g)) for tau, acceptance in sets]
            prices.append((1.0 + beside / 1600 * 20 / 30) / (sum(tokens) / 2))
        assert times.per_overlapped(16, 10, sets) == pytest.approx(min(prices), abs=1e-4)
    times = Forwards({16: 1.0, 31: 1.1}, draft, 30)
    assert times.per_overlapped(16, 10, sets) is None
    assert Forwards({16: 1.0, 32: 1.1}, draft).overlap(Plan("overlap", 16, groups=1), 10) == pytest.approx(1.1)


def test_features_from_above_the_entry_layer_have_no_price_with_a_hidden_bonus() -> None:
    times = Forwards({16: 1.0, 272: 1.5}, {0: {16: 1.0}, 10: {16: 0.7}}, 30)
    result = {"tau": 3.0, "sets": {"valid": {"hidden": {"tau": 2.0, "acceptance": [0.5] * 15}}}}
    for taps, able in (((7, 10), True), ((7, 14), False)):
        path = MaskPathConfig(entry=10, block_size=16, taps=taps, layouts=("known", "hidden"))
        priced = sweep.priced(result, path, times)
        assert (priced["ms_token_hidden"] is not None) == able and priced["ms_token"] == pytest.approx(
            1.7 / 3, abs=1e-4
        )


def test_forward_times_are_found_beside_the_sweep_or_from_the_working_directory(
    tmp_path, monkeypatch, layers_30
) -> None:
    """A sweep's own folder was never looked into: it ran in the folder above its tables alone."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file, sheet = tmp_path / "recipes" / "sweep.yaml", FORWARDS | {"n_layers": 30}
    with pytest.raises(ValueError, match=r"latency names times\.json, which is neither in .*recipes nor in .*here"):
        forwards.find("times.json", file, "m")
    Path("times.json").write_text(json.dumps(sheet))
    assert forwards.find("times.json", file, "m").clean[5] == 2.0
    sheet = sheet | {"points": [p | {"ms": 9.0} for p in sheet["points"]]}
    (tmp_path / "recipes" / "times.json").write_text(json.dumps(sheet))
    assert forwards.find("times.json", file, "m").clean[5] == 9.0


def test_forward_times_of_a_model_of_another_depth_are_refused(files) -> None:
    """They priced its rows, entry layers and all, as if they were its own."""
    (files / "forwards.json").write_text(json.dumps(FORWARDS | {"n_layers": 3}))
    result = tiny_chat.run("train", "--sweep", files / "sweep.yaml")
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and "was measured for 3 layers, and" in said and "has 2" in said
    assert not (files / "out").exists()
    (files / "forwards.json").write_text(json.dumps({"points": FORWARDS["points"]}))  # written before it was kept
    assert forwards.find("forwards.json", files / "sweep.yaml", "nowhere").n_layers is None


def test_every_kept_table_of_forward_times_says_its_layers() -> None:
    for file in (KEPT.parent).glob("forward_times*.json"):
        data = json.loads(file.read_text())
        for part in data if isinstance(data, list) else [data]:
            assert part["n_layers"] == SHAPES[part["model"].removeprefix("random:")].num_hidden_layers


def test_a_sweep_file_that_is_not_there_is_named_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"no file at .*none\.yaml"):
        sweep.run(tmp_path / "none.yaml")


def pretended(ran: list[str], taus: dict[str, float] | None = None):
    """A trainer that writes down what one leaves behind, without training; `taus` by row."""

    def train(folder: Path, wanted: TrainConfig, gpu: str | None) -> str:
        name = folder.name.rpartition("-")[0]
        ran.append(name)
        tau = (taus or {}).get(name, 1.0)
        (folder / "adapter").mkdir(parents=True)
        (folder / "log.jsonl").write_text(json.dumps({"event": "step", "anchors_s": 7}) + "\n")
        valid = {"known": {"tau": tau, "tau_t1": tau}}
        (folder / "report.json").write_text(json.dumps({"step": 3, "eval": {}, "valid": valid}))
        return ""

    return train


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


def table_of(out: str = "adapter") -> dict:
    return json.loads((Path(out) / "sweep.json").read_text())


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
