"""Runs that share a GPU: one trains at a time, the others load, compile and evaluate."""

from __future__ import annotations

import json
import threading
import time

import pytest
from filelock import FileLock, Timeout
from test_training_sweep import files  # noqa: F401
from test_training_trainer import answered, config, tiny

from selfspec.training import jobs, sweep
from selfspec.training.config import TrainConfig
from selfspec.training.trainer import WARM_STEPS, Trainer
from selfspec.training.turn import Turn


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
    Turn(str(file)).take(lambda: False)


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
