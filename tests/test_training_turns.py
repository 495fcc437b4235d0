"""Runs that share a GPU: one trains at a time, the others load, compile and evaluate."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from filelock import FileLock, Timeout
from test_training_sweep import files  # noqa: F401
from test_training_trainer import answered, config, tiny

from selfspec.training import jobs, sweep
from selfspec.training.config import TrainConfig
from selfspec.training.trainer import WARM_STEPS, Trainer


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_waits_for_its_turn_between_its_warm_steps_and_the_others(tmp_path) -> None:
    file, answers = tmp_path / "turn.lock", answered(tiny(), 12)
    trainer = Trainer(config(tmp_path / "run", turn=str(file), max_steps=6), tiny(), answers)
    free_at_the_end = []
    trainer.evaluate = lambda _: free_at_the_end.append(not trainer.turn._lock.is_locked) or {}
    with FileLock(file):
        run = threading.Thread(target=trainer.train)
        run.start()
        until(lambda: trainer.step >= WARM_STEPS)
        time.sleep(0.5)
        assert trainer.step == WARM_STEPS and trainer.elapsed == 0.0  # waiting isn't training
    run.join(60)
    assert trainer.step == 6 and free_at_the_end and all(free_at_the_end)
    FileLock(file).acquire(timeout=5)


def test_a_run_that_waits_can_be_stopped(tmp_path) -> None:
    file = tmp_path / "turn.lock"
    trainer = Trainer(config(tmp_path / "run", turn=str(file), max_steps=6), tiny(), answered(tiny(), 12))
    with FileLock(file):
        run = threading.Thread(target=trainer.train)
        run.start()
        until(lambda: trainer.step >= WARM_STEPS)
        trainer.stop = True
        run.join(60)
        assert not run.is_alive() and trainer.step == WARM_STEPS
    assert (tmp_path / "run" / "adapter" / "selfspec.json").exists()


def test_a_run_that_fails_gives_its_turn_back(tmp_path, monkeypatch) -> None:
    trainer = Trainer(config(tmp_path, turn=str(tmp_path / "turn.lock"), fit=0), tiny(), answered(tiny(), 12))

    def fails(logs, window):
        with pytest.raises(Timeout):
            FileLock(tmp_path / "turn.lock").acquire(blocking=False)
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(trainer, "_log_step", fails)
    with pytest.raises(FloatingPointError):
        trainer.train()
    FileLock(tmp_path / "turn.lock").acquire(blocking=False)


@pytest.mark.parametrize("fields", [{"fit": 1.0}, {"profile": 2}])
def test_what_is_measured_is_measured_in_the_runs_turn(tmp_path, fields) -> None:
    """A run that was stopped while it waited measured its steps beside another's, and kept the shape that it found."""
    file = tmp_path / "turn.lock"
    trainer = Trainer(config(tmp_path / "run", turn=str(file), max_steps=6, **fields), tiny(), answered(tiny(), 12))
    with FileLock(file):
        run = threading.Thread(target=trainer.train)
        run.start()
        time.sleep(1.0)
        warm = trainer.step
        trainer.stop = True
        run.join(60)
    assert not run.is_alive() and not trainer.fitted
    assert warm == trainer.step == (0 if "fit" in fields else WARM_STEPS)


def test_a_run_that_waits_ends_when_its_time_is_up(tmp_path) -> None:
    """It waited on, and a job with a limit was killed without a checkpoint."""
    file = tmp_path / "turn.lock"
    wanted = config(tmp_path / "run", turn=str(file), max_steps=6, stop_after=1 / 60)
    with FileLock(file):
        assert Trainer(wanted, tiny(), answered(tiny(), 12)).train()["finished"] is False
    assert (tmp_path / "run" / "adapter" / "selfspec.json").exists()


def test_memory_that_another_run_holds_lowers_no_shape(tmp_path) -> None:
    """One step out of memory beside another run, and all of the row's steps were smaller."""
    file = tmp_path / "turn.lock"
    trainer = Trainer(config(tmp_path / "run", turn=str(file), max_steps=4), tiny(), answered(tiny(), 12))
    shape, real = trainer.shape, trainer._run

    def run(pack, groups, given):
        if not trainer.turn.mine:
            raise torch.OutOfMemoryError("the other run's")
        return real(pack, groups, given)

    trainer._run = run
    trainer.reshape(shape)
    assert trainer.train()["finished"] and trainer.shape == shape and not trainer.downs
    trainer._run = real
    beside = Trainer(config(tmp_path / "other", max_steps=4), tiny(), answered(tiny(), 12))
    beside._run = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("its own"))
    beside.reshape(shape)
    with pytest.raises(torch.OutOfMemoryError):
        beside.train()
    assert beside.downs


def test_evaluations_are_not_due_for_having_waited(tmp_path) -> None:
    file, seen = tmp_path / "turn.lock", []
    trainer = Trainer(
        config(tmp_path / "run", turn=str(file), max_steps=6, eval_every=0.5 / 60), tiny(), answered(tiny(), 12)
    )
    trainer.validate = lambda *_: seen.append(trainer.step) or {}
    with FileLock(file):
        run = threading.Thread(target=trainer.train)
        run.start()
        until(lambda: trainer.step >= WARM_STEPS)
        time.sleep(1.0)
    run.join(60)
    assert trainer.step == 6 and WARM_STEPS not in seen


def test_rows_ahead_are_refused_where_they_would_share_a_place_or_measure_it(files) -> None:  # noqa: F811
    for overrides, jobs_ in ((["fit=3"], None), ([], 2)):
        with pytest.raises(ValueError, match="set fit=0 and name no more jobs than GPUs"):
            sweep.run(files / "sweep.yaml", None, overrides, ahead=True, jobs=jobs_)


@pytest.mark.usefixtures("files")
def test_rows_ahead_share_the_lock_of_their_place_and_mean_the_same(files, monkeypatch) -> None:  # noqa: F811
    """Two a GPU; what is trained, and so its key and its folder, is the same as without."""
    seen: list[tuple] = []
    both = threading.Barrier(2)

    def train(folder, wanted, gpu, turns):
        if len(seen) < 2:
            seen.append((gpu, turns))
            both.wait(60)  # or it was not begun ahead
        return "no"

    assert sweep.run(files / "sweep.yaml", train=train, ahead=True) == 1
    assert seen == [(None, files / "out")] * 2
    keys = [r["key"] for r in json.loads((files / "out" / "sweep.json").read_text())["rows"]]
    assert sweep.run(files / "sweep.yaml", train=lambda folder, wanted, gpu: "no") == 1
    assert keys == [r["key"] for r in json.loads((files / "out" / "sweep.json").read_text())["rows"]]
    wanted = TrainConfig.load(None, ["model=nowhere", f"data={files / 'answers.jsonl'}", f"out={files / 'x'}"])
    assert jobs.in_a_process(files / "x", wanted, None, files / "out")
    written = json.loads((files / "x" / "config.json").read_text())
    assert written["turn"] == str(files / "out" / "gpu.lock") and not wanted.turn
    assert sweep.key_of(wanted) == sweep.key_of(TrainConfig(**(written | {"data": tuple(written["data"])})))
