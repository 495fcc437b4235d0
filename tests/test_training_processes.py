"""Several processes: the same losses and weights as one, whole layers or split ones, started as a user starts them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_training_trainer import answered, tiny

from selfspec import cli
from selfspec.adapters import io
from selfspec.backbone import Backbone
from selfspec.training.config import TrainConfig
from selfspec.training.trainer import Trainer

torch.set_num_threads(1)
FIELDS = [
    "adapter.block_size=4", 'adapter.layouts=["known","hidden"]', "adapter.entry=1", "adapter.taps=[1]", "length=48",
    "anchors=8", "log_every=1", "lr=0.003", "valid_docs=2", "dtype=float32", "device=cpu", "fit=0", "max_steps=4",
    'objectives={"ce":1.0,"dpace":0.3,"kl":0.2}', "clip=0.05", "tensorboard=false", "seed=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A model of three layers and its answers."""
    folder = tmp_path_factory.mktemp("data")
    model = tiny(layers=3)
    model.save_pretrained(folder / "model")
    with open(folder / "answers.jsonl", "w") as file:
        for a in answered(model, 30):
            file.write(json.dumps({"id": a.id, "prompt_ids": a.prompt, "answer_ids": a.answer}) + "\n")
    return folder


def fields(data: Path, out: Path, *more: str) -> list[str]:
    return [f"model={data / 'model'}", f"data={data / 'answers.jsonl'}", f"out={out}", *FIELDS, *more]


def launch(out: Path, options: list[str], arguments: list[str]) -> None:
    """`accelerate launch` with two processes on the CPU."""
    command = [sys.executable, "-P", "-m", "accelerate.commands.launch", *options, "--num_processes", "2",
               "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
               "-m", "selfspec.training", *arguments]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, cwd=out)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]


def forked(arguments: list[str]) -> None:
    """Two processes without a launcher, with what it would have set."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_FSDP="true")  # fmt: skip
        sys.exit(cli.main(["train", *arguments]))

    both = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]


def steps(out: Path) -> list[dict]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [r for r in records if r["event"] == "step"]


@pytest.fixture(scope="module")
def one(data, tmp_path_factory) -> Trainer:
    """One process with all rows of a step in two forwards."""
    out = tmp_path_factory.mktemp("one")
    trainer = Trainer(TrainConfig.load(None, fields(data, out, "rows=2", "accumulate=2")))
    trainer._warm = 2
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["whole", "split"])
def test_two_processes_are_one(kind: str, data, one, tmp_path) -> None:
    if kind == "whole":
        launch(tmp_path, ["--multi_gpu"], fields(data, tmp_path, "rows=2"))
    else:
        forked(fields(data, tmp_path, "rows=2"))
    ours, want = steps(tmp_path), steps(one.out)
    assert [s["step"] for s in ours] == [s["step"] for s in want][-len(ours) :] and len(ours) == 2
    start = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert start["processes"] == 2 and start["sharded"] == (kind == "split")
    for a, b in zip(ours, want[-len(ours) :], strict=True):
        for name in ("loss", "ce", "dpace", "kl", "norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
        assert a["run"] == b["run"]
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    kept = torch.load(one.out / "checkpoint.pt", weights_only=True)
    for name, value in kept["path"].items():
        torch.testing.assert_close(state["path"][name], value, atol=1e-4, rtol=1e-3)
    assert state["cursor"] == kept["cursor"]
    # what was saved loads, alone and whole
    path = io.load(tmp_path / "adapter", one.model)
    Backbone(one.model, path)
    again = Trainer(TrainConfig.load(None, fields(data, tmp_path, "rows=2", "accumulate=2", "resume=true")))
    assert again.step == 4
    for name, value in state["path"].items():
        assert torch.equal(again.path.state_dict()[name], value)
