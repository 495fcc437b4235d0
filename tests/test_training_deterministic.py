"""Deterministic training: torch's switches while it runs, and the schedule that a resumed run goes on by."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal

import pytest
import tiny_chat
import torch
import torch._inductor.config as inductor
from test_training_resume import FIELDS, interrupted, runs_out, same
from test_training_trainer import answered, config, tiny

from selfspec.training import fit
from selfspec.training.batches import Shape
from selfspec.training.config import TrainConfig
from selfspec.training.data import Answer
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


MINUTES = FIELDS | {"max_steps": 0, "minutes": 1.0, "fit": 1.0, "deterministic": True}


def projected(monkeypatch, steps: int) -> None:
    """Let the dry run find that so many steps fit into a minute, in the shape that it is given."""
    cost = fit.Cost(60 / (steps + 0.5), 16)
    monkeypatch.setattr(fit, "search", lambda measure, start, *_: (start, cost, []))


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return answered(tiny(), 30)


def test_a_run_fitted_to_minutes_goes_on_by_the_same_steps(answers, monkeypatch, tmp_path) -> None:
    """The rate went by the clock, so that no two runs were alike, resumed or not."""
    projected(monkeypatch, 40)
    whole = Trainer(config(tmp_path / "whole", **MINUTES), tiny(), answers)
    assert whole.train()["finished"] and (whole.step, whole.steps) == (40, 40)
    step = random.randrange(4, 34)
    interrupted(tmp_path / "cut", answers, step, signal.SIGKILL, MINUTES)
    monkeypatch.setattr(fit, "search", None)  # not run again: the machine may be faster by now
    rest = Trainer(config(tmp_path / "cut", resume=True, **MINUTES), tiny(), answers)
    assert step - 2 <= rest.step < 40 == rest.steps
    assert rest.train()["finished"]
    same(rest, whole)


def test_a_run_killed_before_its_first_step_is_saved_keeps_its_schedule(answers, monkeypatch, tmp_path) -> None:
    projected(monkeypatch, 12)
    fields = MINUTES | {"save_every": 0}
    first = Trainer(config(tmp_path, **fields), tiny(), answers)
    first.train_step = None  # no step is taken
    with pytest.raises(TypeError):
        first.train()
    monkeypatch.setattr(fit, "search", None)
    rest = Trainer(config(tmp_path, resume=True, **fields), tiny(), answers)
    assert (rest.step, rest.steps) == (0, 12) and rest.train()["step"] == 12


def test_a_step_that_memory_ran_out_for_is_resumed_in_its_smaller_shape(answers, tmp_path) -> None:
    """A kill before the next checkpoint forgot it: the rest began with larger forwards, and added in another order."""
    fields = FIELDS | {"rows": 5, "accumulate": 1, "max_steps": 8, "save_every": 0, "deterministic": True}
    whole = Trainer(config(tmp_path / "whole", **fields), tiny(), answers)
    runs_out(whole, Shape(5, 2, 8, 4), {3})
    for _ in range(5):
        whole.train_step()
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    rest = Trainer(config(tmp_path / "cut", resume=True, **fields), tiny(), answers)
    assert rest.step == 3 and rest.shape == whole.shape == Shape(5, 2, 8, 4) and rest.downs == whole.downs
    assert rest.train()["finished"] and whole.train()["finished"]
    same(rest, whole)


def test_a_clock_without_a_dry_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"goes by steps.*give max_steps, or fit=SECONDS"):
        TrainConfig(deterministic=True, fit=0)
    TrainConfig(deterministic=True, fit=0, max_steps=3)
    TrainConfig(deterministic=True)


def test_a_run_by_the_clock_is_not_resumed_by_steps(answers, tmp_path) -> None:
    Trainer(config(tmp_path, **FIELDS), tiny(), answers).save()
    fields = FIELDS | {"resume": True, "deterministic": True}
    with pytest.raises(ValueError, match=r"deterministic=False \(now True\)"):
        Trainer(config(tmp_path, **fields), tiny(), answers)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    del state["steps"], state["schedule"]["deterministic"]  # as older checkpoints are
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"deterministic=False \(now True\)"):
        Trainer(config(tmp_path, **fields), tiny(), answers)
    assert Trainer(config(tmp_path, resume=True, **FIELDS), tiny(), answers).steps == 40
