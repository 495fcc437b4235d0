"""Going on from an adapter: what is taken over from it, and tau before and after in one report."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import pytest
import tiny_chat
import torch
import yaml
from test_training_trainer import answered, config, tiny

from selfspec.adapters import io
from selfspec.training import report
from selfspec.training.config import TrainConfig
from selfspec.training.trainer import Trainer

ADAPTER = {"block_size": 4, "entry": 1, "tuning": "lora", "rank": 4, "alpha": 4, "layouts": ["known", "hidden"],
           "mask_embedding": "one"}  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A model, its answers, and a run with a head."""
    folder, model = tmp_path_factory.mktemp("first"), tiny()
    answers = answered(model, 12)
    heads = ADAPTER | {"heads": ["sampler"], "head_rank": 8}
    fields = dict(adapter=heads, objectives={"ce": 1.0, "markov": 1.0}, max_steps=3)
    Trainer(config(folder / "run", **fields), model, answers).train()
    model.save_pretrained(folder / "model")
    with open(folder / "answers.jsonl", "w") as file:
        for a in answers:
            file.write(json.dumps({"id": a.id, "prompt_ids": a.prompt, "answer_ids": a.answer}) + "\n")
    return folder, model, answers


def test_init_alone_says_what_the_adapter_is(first) -> None:
    """Going on from a shipped adapter was refused until every one of its settings had been written out again."""
    init = f"init={first[0] / 'run' / 'adapter'}"
    path = TrainConfig.load(None, [init]).path
    assert (path.entry, path.rank, path.heads, path.mask_embedding) == (1, 4, ("sampler",), "one")
    assert not path.acceptance and not path.fingerprint
    changed = TrainConfig.load(None, ["adapter.head_rank=16", init, 'adapter.layouts=["known"]'])
    assert changed.path.head_rank == 16 and changed.path.layouts == ("known",) and changed.path.entry == 1
    assert TrainConfig.load(None, [init, "adapter.style=uno"]).path.entry == 0
    assert TrainConfig.load(None, ["adapter.entry=3"]).adapter == {"mask_embedding": "per_slot", "entry": 3}
    with pytest.raises(ValueError, match="no adapter at 'nowhere'"):
        TrainConfig.load(None, ["init=nowhere"])


def test_heads_bring_their_objectives_where_none_are_named(first) -> None:
    init = f"init={first[0] / 'run' / 'adapter'}"
    assert TrainConfig.load(None, [init]).objectives == {"ce": 0.5, "dpace": 0.15, "markov": 1.0}
    assert TrainConfig.load(None, [init, 'objectives={"markov":2.0}']).objectives == {"markov": 2.0}
    lengths = TrainConfig.load(None, ['adapter.heads=["length"]'])
    assert lengths.objectives == {"ce": 1.0, "dpace": 0.3, "length": 1.0}
    assert TrainConfig.load(None, ["lr=1"]).objectives == TrainConfig().objectives


def test_what_was_measured_of_an_adapter_is_not_said_of_the_next_one(first, tmp_path) -> None:
    """The rates of its smaller blocks and trees stood in the configuration of whatever was trained from it."""
    shutil.copytree(first[0] / "run" / "adapter", tmp_path / "adapter")
    told = io.read_config(tmp_path / "adapter")
    io.write_config(tmp_path / "adapter", dataclasses.replace(told, acceptance_of={"block=2": (0.5,)}))
    assert io.read_config(tmp_path / "adapter").acceptance_of
    path = TrainConfig.load(None, [f"init={tmp_path / 'adapter'}"]).path
    assert not path.acceptance and not path.acceptance_of


def test_a_head_is_added_to_an_adapter_whose_own_stay(first, tmp_path) -> None:
    """What trains the new one alone neither asks for the old one's objective nor moves it."""
    folder, model, answers = first
    fields = dict(adapter=ADAPTER | {"heads": ["sampler", "length"], "head_rank": 8}, max_steps=6)
    fields |= dict(init=str(folder / "run" / "adapter"), objectives={"length": 1.0})
    trainer = Trainer(config(tmp_path, **fields), model, answers)
    before = copy.deepcopy(trainer.path.state_dict())
    trainer.train()
    changed = {name for name, p in trainer.path.state_dict().items() if not torch.equal(p, before[name])}
    assert changed and all(name.startswith("heads.length.") for name in changed)
    with pytest.raises(ValueError, match="'sampler' has no objective"):
        config(tmp_path, **fields | {"objectives": {"length": 1.0, "ce": 1.0}})  # the path would move under it
    with pytest.raises(ValueError, match="'sampler' has no objective"):
        config(tmp_path, **fields | {"init": ""})


def test_a_run_from_an_adapter_tells_tau_before_and_after(first, tmp_path) -> None:
    folder, model, answers = first
    fields = dict(adapter=ADAPTER | {"heads": ["sampler"], "head_rank": 8}, objectives={"ce": 1.0, "markov": 1.0})
    fields |= dict(init=str(folder / "run" / "adapter"), eval={"all": str(folder / "answers.jsonl")}, max_steps=40)
    trainer = Trainer(config(tmp_path / "on", **fields), model, answers)
    want = {"valid": trainer.evaluate(trainer.valid), "eval": {"all": trainer.evaluate(answers)}}
    trainer.config.stop_after = 1e-9
    assert not trainer.train()["finished"]
    again = Trainer(config(tmp_path / "on", **fields, resume=True), model, answers)
    again.step = max(1, again.step)  # it was measured by the call before
    found = again.train()
    assert found["before"] == json.loads(json.dumps(want)) != {"valid": found["valid"], "eval": found["eval"]}
    assert json.loads((tmp_path / "on" / "report.json").read_text())["before"] == found["before"]
    said, was = report.taus(found), want["eval"]["all"]["known"]["tau"]
    assert (
        said.startswith("validation ")
        and f"all {was:.2f} -> {found['eval']['all']['known']['tau']:.2f} (known)" in said
    )


def test_a_run_from_nothing_tells_tau_after_it_alone(first, tmp_path) -> None:
    _, model, answers = first
    found = Trainer(config(tmp_path / "new", max_steps=2), model, answers).train()
    assert "before" not in found and "->" not in report.taus(found) and "(known)" in report.taus(found)
    assert report.taus({"valid": {"left_out": 3}, "eval": {}}) == ""


def test_the_command_says_both(first, tmp_path) -> None:
    folder = first[0]
    sheet = {"model": str(folder / "model"), "data": str(folder / "answers.jsonl"), "max_steps": 3, "fit": 0,
             "length": 48, "rows": 2, "anchors": 8, "valid_docs": 2, "tensorboard": False}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sheet))
    init = f"init={folder / 'run' / 'adapter'}"
    ran = tiny_chat.run("train", "--config", tmp_path / "run.yaml", init, f"out={tmp_path / 'out'}")
    assert TrainConfig().precision(cuda=True) == torch.bfloat16 and TrainConfig().precision(cuda=False) == torch.float32
    assert ran.exit_code == 0 and "tau: validation " in ran.stderr and " -> " in ran.stderr
