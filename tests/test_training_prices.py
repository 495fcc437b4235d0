"""What a sweep keeps and what it prices: the shipped ablation, its forward times, tokens with a hidden bonus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_chat
import torch
from sweeps import FORWARDS, KEPT, SHIPPED, pretended, table_of, written
from transformers import LlamaConfig

from selfspec import hub
from selfspec.adapters import MaskPathConfig
from selfspec.plan import Plan
from selfspec.shapes import SHAPES
from selfspec.training import forwards, sweep
from selfspec.training.forwards import Forwards


@pytest.fixture
def files(tmp_path) -> Path:
    return written(tmp_path)


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
