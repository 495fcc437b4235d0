"""The rows of a sweep as processes: several at once where there are several GPUs, one each."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from selfspec.training.config import TrainConfig

Train = Callable[[Path, TrainConfig, str | None], str]
RUNNING: set[subprocess.Popen] = set()


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        stage: that it belongs to.
        name: the options that it combines.
        fields: as on the command line, dotted where they are nested.
    """

    stage: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What a row asks for.

    Attributes:
        row: the first that asks for it.
        key: of what is trained (`sweep.key_of`).
        folder: where.
        wanted: the configuration; None where there can be none.
    """

    row: Row
    key: str
    folder: Path
    wanted: TrainConfig | None


def places(device: str, jobs: int | None = None) -> list[str | None]:
    """Where rows are trained: a GPU, as CUDA_VISIBLE_DEVICES names it, for each that runs at once.

    Args:
        device: the field; only "auto" and "cuda" leave a choice.
        jobs: how many run at once; None is one for each GPU, and one where there is none.

    Returns:
        None in the place of a name where a row's process is left to find its device.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}: expected 1 or more")
    gpus: list[str] = []
    if device in ("auto", "cuda"):
        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = (visible.split(",") if visible else list(map(str, range(count))))[:count]
    return [gpus[i % len(gpus)] if gpus else None for i in range(jobs or len(gpus) or 1)]


def together(
    jobs: Sequence[Job], train: Train, where: Sequence[str | None], late: Callable[[], bool]
) -> Generator[tuple[Job, str]]:
    """Train, one job in each place at a time.

    Args:
        jobs: in the order in which they are begun.
        train: trains one and returns an error or "".
        where: of `places`.
        late: no further one is begun once this says so.

    Yields:
        Each that has ended, with its error or "".
    """
    waiting, free = deque(jobs), deque(where)
    running: dict[Future[str], tuple[Job, str | None]] = {}
    with ThreadPoolExecutor(len(where)) as pool:
        try:
            while True:
                while waiting and free and not late():
                    job, place = waiting.popleft(), free.popleft()
                    assert job.wanted is not None
                    running[pool.submit(train, job.folder, job.wanted, place)] = job, place
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job, place = running.pop(future)
                    free.append(place)
                    yield job, future.result()
        except BaseException:
            for process in list(RUNNING):
                process.terminate()  # it saves, and the next call goes on from there
            raise


def in_a_process(folder: Path, wanted: TrainConfig, gpu: str | None = None, turns: Path | None = None) -> str:
    """Train a row in a process of its own.

    Args:
        folder: of the row.
        wanted: what to train.
        gpu: as CUDA_VISIBLE_DEVICES names it; None leaves the device to the process.
        turns: folder of the lock files by which rows of one place train one at a time; None where none share a place.

    Returns:
        "", or how it ended and its last words.
    """
    if turns is not None:
        wanted = dataclasses.replace(wanted, turn=str(turns / f"gpu{gpu or ''}.lock"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(wanted.to_dict(), indent=1))
    command = [sys.executable, "-P", "-m", "selfspec.training", "--config", str(folder / "config.json")]
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        RUNNING.add(process)
        code = process.wait()
        RUNNING.discard(process)
    if code == 0 and finished(folder):
        return ""
    said = (folder / "output.txt").read_text().strip().splitlines()
    return f"exit code {code}: {' '.join(said[-3:]) or 'it said nothing'}"


def finished(folder: Path) -> bool:
    """Whether a row's training came to its end."""
    return (folder / "report.json").exists()
