"""Deterministic training: torch's switches while it runs, and the schedule that a resumed run goes on by."""

from __future__ import annotations

import json
import os

import pytest
import tiny_chat
import torch
import torch._inductor.config as inductor
from test_training_trainer import answered, config, tiny

from selfspec.training.config import TrainConfig
from selfspec.training.deterministic import WORKSPACE, deterministic
from selfspec.training.trainer import Trainer


def switches() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        inductor.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get(WORKSPACE),
    )


ON = (True, False, True, False, ":4096:8")


@pytest.fixture
def before(monkeypatch):
    """A process's own settings, which are not torch's first ones."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield switches()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_switches_are_on_while_it_trains_and_as_before_afterwards(wanted: bool, before, tmp_path) -> None:
    trainer = Trainer(config(tmp_path, deterministic=wanted, max_steps=2), tiny(), answered(tiny(), 12))
    seen, run = [], trainer._run
    trainer._runner = lambda *given: (seen.append(switches()), run(*given))[1]
    trainer.train()
    assert seen == [ON if wanted else before] * 2 and switches() == before


def test_an_exception_leaves_the_switches_as_before(before, tmp_path) -> None:
    trainer = Trainer(config(tmp_path, deterministic=True), tiny(), answered(tiny(), 12))
    seen = []

    def broken(*given):
        seen.append(switches())
        raise FloatingPointError

    trainer._runner = broken
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert seen == [ON] and switches() == before


def test_what_a_process_had_set_itself_comes_back(before, monkeypatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    mine = switches()
    with deterministic():
        assert switches() == (*ON[:4], ":16:8")
        with deterministic():  # the command's, and the trainer's own
            assert switches() == (*ON[:4], ":16:8")
        assert switches() == (*ON[:4], ":16:8")
    assert switches() == mine


def test_the_command_sets_them_before_anything_is_loaded(before, monkeypatch, tmp_path) -> None:
    """cuBLAS looks for its workspace at the first product, which the loading computes."""
    model, seen = tiny(), []
    model.save_pretrained(tmp_path / "model")
    with open(tmp_path / "answers.jsonl", "w") as file:
        for a in answered(model, 12):
            file.write(json.dumps({"id": a.id, "prompt_ids": a.prompt, "answer_ids": a.answer}) + "\n")
    made, trained = Trainer.__init__, Trainer.train
    monkeypatch.setattr(Trainer, "__init__", lambda self, given: (seen.append(switches()), made(self, given))[1])
    monkeypatch.setattr(Trainer, "train", lambda self: (seen.append(switches()), trained(self))[1])
    fields = [f"model={tmp_path / 'model'}", f"data={tmp_path / 'answers.jsonl'}", f"out={tmp_path / 'out'}",
              "adapter.block_size=4", "length=48", "rows=2", "anchors=8", "max_steps=2", "fit=0",
              "deterministic=true"]  # fmt: skip
    assert tiny_chat.run("train", *fields).exit_code == 0
    assert seen == [ON, ON] and switches() == before


@pytest.mark.parametrize("fields", [{"attention": "flash"}, {"compile_mode": "max-autotune-no-cudagraphs"}])
def test_kernels_that_differ_from_run_to_run_are_refused(fields: dict) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=f"{name}={value}.*deterministic=true takes"):
        TrainConfig(deterministic=True, max_steps=1, **fields)
    TrainConfig(max_steps=1, **fields)
