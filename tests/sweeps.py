"""A sweep to try on a tiny model, its prices by hand, and a trainer that only pretends."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from test_training_trainer import answered, tiny

from selfspec.training import sweep
from selfspec.training.config import TrainConfig

SHIPPED = Path(sweep.__file__).parent / "recipes" / "ablation.yaml"
KEPT = Path(__file__).parents[1] / "benchmarks" / "training_sweep_h200.json"

FORWARDS = {"n_layers": 2, "points": [
    {"kind": kind, "requests": 1, "rows": rows, "entry": entry, "graph": True, "ms": ms}
    for kind, rows, entry, ms in (("clean", 1, 0, 1.0), ("clean", 5, 0, 2.0), ("clean", 12, 0, 2.7),
                                  ("draft", 3, 0, 3.0), ("draft", 5, 0, 5.0),
                                  ("draft", 3, 2, 1.0), ("draft", 5, 2, 1.0))
]}  # fmt: skip


def written(tmp_path: Path) -> Path:
    """A folder with a model, its answers, a sweep of both and forward times."""
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


def table_of(out: str = "adapter") -> dict:
    return json.loads((Path(out) / "sweep.json").read_text())
