"""Interruptions: kills, signals, memory running out; the rest of a run is what it would have been."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draws import draw
from test_training_trainer import answered, config, tiny

from selfspec.training import command, jobs
from selfspec.training import trainer as trainer_module
from selfspec.training.batches import Shape
from selfspec.training.command import stop_on_signal
from selfspec.training.data import Answer
from selfspec.training.trainer import Trainer

FIELDS = dict(
    adapter={"block_size": 4, "layouts": ["known", "hidden"], "prefix_splits": True, "mask_embedding": "per_slot"},
    objectives={"ce": 1.0, "dpace": 0.5}, rows=1, accumulate=2, max_steps=40, save_every=1e-9, log_every=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return answered(tiny(), 30)


@pytest.fixture(scope="module")
def unbroken(answers, tmp_path_factory) -> Trainer:
    trainer = Trainer(config(tmp_path_factory.mktemp("unbroken"), **FIELDS), tiny(), answers)
    trainer.train()
    assert trainer.packer.epoch(trainer.cursor) >= 2  # several epochs, and not at one's end
    return trainer


def same(a: Trainer, b: Trainer) -> None:
    assert (a.step, a.cursor) == (b.step, b.cursor)
    for x, y in zip([*a.params, *a.ema], [*b.params, *b.ema], strict=True):
        assert torch.equal(x, y)
    states = (t.optimizer.state_dict()["state"] for t in (a, b))
    for x, y in zip(*(s.values() for s in states), strict=True):
        assert all(torch.equal(x[k], y[k]) for k in x)


def child(out: Path, answers: list[Answer], fields: dict) -> None:
    trainer = Trainer(config(out, **fields), tiny(), answers)
    stop_on_signal(trainer)
    step = trainer.train_step
    trainer.train_step = lambda: (time.sleep(0.02), step())[1]  # time for the parent to strike
    trainer.train()


def interrupted(out: Path, answers: list[Answer], step: int, how: int, fields: dict = FIELDS) -> list[dict]:
    """Train in a process of its own, send it a signal once a step is logged, and return its log."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(out, answers, fields))
    process.start()
    log = out / "log.jsonl"
    deadline = time.monotonic() + 60
    while f'"event": "step", "step": {step},' not in (log.read_text() if log.exists() else ""):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, how)
    process.join(60)
    assert process.exitcode == (-how if how == signal.SIGKILL else 0)
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def test_killed_at_a_random_step_and_resumed(answers, unbroken, tmp_path) -> None:
    step = random.randrange(4, 34)
    interrupted(tmp_path, answers, step, signal.SIGKILL)
    rest = Trainer(config(tmp_path, resume=True, **FIELDS), tiny(), answers)
    assert step - 2 <= rest.step < 40, step
    assert rest.train()["finished"]
    same(rest, unbroken)


def test_sigterm_saves_and_ends(answers, unbroken, tmp_path) -> None:
    records = interrupted(tmp_path, answers, 7, signal.SIGTERM)
    assert records[-1]["event"] == "stopped" and records[-1]["step"] >= 7
    assert (tmp_path / "adapter" / "selfspec.json").exists()
    rest = Trainer(config(tmp_path, resume=True, **FIELDS), tiny(), answers)
    assert rest.step == records[-1]["step"]
    rest.train()
    same(rest, unbroken)


def runs_out(trainer: Trainer, fits: Shape, at: set[int]) -> None:
    """Let forwards of more than so many rows or anchors fail from some steps on, after their first half."""
    run, calls = trainer._run, []

    def fake(pack, groups, divisors):
        calls.append(None)
        if trainer.step in at and (len(pack.tokens) > fits.micro or groups.anchors.shape[1] > fits.anchors):
            run(pack, groups, divisors)  # leaves gradients behind
            raise torch.OutOfMemoryError("fake")
        return run(pack, groups, divisors)

    trainer._run = fake
    trainer.reshape(trainer.shape)


def test_out_of_memory_lowers_the_forward_and_the_training_stays_the_same(answers, tmp_path) -> None:
    """The rows of a step are spread over more forwards; a resumed run starts with what fitted."""
    fields = FIELDS | {"rows": 5, "accumulate": 1, "max_steps": 8}
    whole = Trainer(config(tmp_path / "a", **fields), tiny(), answers)
    whole.train()
    first = Trainer(config(tmp_path / "b", **fields), tiny(), answers)
    runs_out(first, Shape(5, 2, 8, 4), {3})
    losses = []
    for _ in range(5):
        losses.append(float(first.train_step()["loss"]))
    assert first.shape == Shape(5, 2, 8, 4)
    assert first.downs == [{"step": 3, "micro": 5, "anchors": 8}, {"step": 3, "micro": 3, "anchors": 8}]
    first.stop = True
    first.train()
    log = [json.loads(line) for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()]
    assert [r["micro"] for r in log if r["event"] == "out_of_memory"] == [3, 2]
    rest = Trainer(config(tmp_path / "b", resume=True, **fields), tiny(), answers)
    assert rest.shape == Shape(5, 2, 8, 4) and rest.downs == first.downs
    rest.train()
    for a, b in zip(whole.params, rest.params, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_out_of_memory_with_one_row_lowers_the_anchors_and_then_gives_up(answers, tmp_path) -> None:
    trainer = Trainer(config(tmp_path, **FIELDS), tiny(), answers)
    runs_out(trainer, Shape(2, 1, 3, 4), {0})
    trainer.train_step()
    assert trainer.shape == Shape(2, 1, 2, 4)  # 8, 4, 2
    runs_out(trainer, Shape(2, 0, 0, 4), {1})
    with pytest.raises(torch.OutOfMemoryError, match="single draft group"):
        trainer.train_step()


def test_another_schedule_is_refused(answers, tmp_path) -> None:
    trainer = Trainer(config(tmp_path, **FIELDS), tiny(), answers)
    trainer.train_step()
    trainer.save()
    with pytest.raises(ValueError, match=r"max_steps=40 \(now 50\)"):
        Trainer(config(tmp_path, resume=True, **(FIELDS | {"max_steps": 50})), tiny(), answers)


def test_draws_depend_on_document_and_epoch_alone(answers, tmp_path) -> None:
    """Whatever stands beside a document, however many rows a step has: the same anchors, layouts and splits."""
    drawn: list[dict] = []
    for rows, prefetch in ((1, 0), (3, 2)):
        fields = config(tmp_path, **(FIELDS | {"rows": rows, "anchors": 200, "prefetch": prefetch}))
        trainer, seen = Trainer(fields, tiny(), answers), {}
        for index in range(9 // rows):
            pack, groups = draw(trainer, index)
            size = groups.labels.shape[2]
            for row in range(rows):
                for a, slot in enumerate(groups.anchors[row].tolist()):
                    if groups.layout.group[row, a * size] < 0:
                        continue
                    key = (int(pack.keys[row, slot]), int(pack.positions[row, slot]))
                    seen[key] = (
                        groups.rows.tokens[row, a * size : (a + 1) * size].tolist(),
                        groups.labels[row, a].tolist(),
                    )
        drawn.append(seen)
    assert drawn[0] == drawn[1] and len(drawn[0]) > 100
    assert len({(k, tuple(v[0])) for k, v in drawn[0].items()}) == len(drawn[0])


def test_a_gpus_host_lays_out_batches_on_one_thread(monkeypatch):
    done = []

    class Fake:
        world = SimpleNamespace(main=False, close=lambda: None)

        def __init__(self, settings):
            self.device = torch.device(settings.device)

        def train(self):
            done.append("trained")

    def trained(device: str) -> list:
        done.clear()
        command.main(["model=m", "data=d", f"device={device}"])
        return list(done)

    monkeypatch.setattr(trainer_module, "Trainer", Fake)
    monkeypatch.setattr(torch, "set_num_threads", done.append)
    monkeypatch.setattr(command, "stop_on_signal", lambda trainer: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert trained("cpu") == ["trained"]  # there the layers themselves run on them
    assert trained("cuda") == [1, "trained"]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert trained("cuda") == ["trained"]  # the user's word stands


def test_a_sweeps_row_has_the_threads_of_any_training(monkeypatch, tmp_path):
    """It was told to take all cores, and laid out its batches forty times as slowly beside a neighbour."""
    seen = {}

    class Ended(subprocess.Popen):
        def __init__(self, command, env, **kwargs):
            seen.update(env)
            super().__init__([sys.executable, "-c", ""], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert jobs.in_a_process(tmp_path, config(tmp_path, **FIELDS), "0").startswith("exit code 0")
    assert seen["CUDA_VISIBLE_DEVICES"] == "0" and "OMP_NUM_THREADS" not in seen
