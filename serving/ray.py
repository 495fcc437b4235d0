"""A batch over a Ray cluster: Ray Data reads, spreads, retries and writes; every actor is one engine on one GPU.

Rows are made and answered by the same code as in one process, so the output is the same. A local output is written by
the driver and resumes as there. One with a scheme (`s3://bucket/folder`) becomes a folder of part files in the order of
the rows, parquet where its name ends in `.parquet`.
"""

from __future__ import annotations

import io
import itertools
import pickle
import posixpath
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

try:
    import pyarrow as pa
    import ray
    from pyarrow import fs
    from ray.data import ActorPoolStrategy, DataContext
    from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("--ray needs Ray Data: pip install 'selfspec[ray]'") from error

from selfspec import prompts
from selfspec.options import Chosen, load_model
from selfspec.serving.batch import Batcher, BatchOptions, identity, recorded
from selfspec.serving.lane import most_slots
from selfspec.serving.output import Output, apart, resumable, table_of
from selfspec.serving.source import jobs
from selfspec.terminal import Progress

BLOCK = 1024  # rows that are read at a time
ANSWERS = 10.0  # seconds in which a cluster has to answer


class Rows(FileBasedDatasource):
    """One file of prompts as pickled jobs, in order, with their ids; those that are done come without their job.

    Args:
        path: any that Ray reads.
        done: ids.
    """

    def __init__(self, path: str, done: set[str | int]):
        super().__init__(path)
        self.done = done

    def _read_stream(self, f: Any, path: str) -> Iterator[Any]:
        name = path.removesuffix(".gz")  # Ray has unzipped it
        numbered = prompts.numbered(name, io.BytesIO(f.readall()))
        found = ((pickle.dumps(j.id), b"" if j.id in self.done else pickle.dumps(j)) for j in jobs(numbered))
        while part := list(itertools.islice(found, BLOCK)):
            ids, rows = zip(*part)
            yield pa.table({"id": pa.array(ids, pa.binary()), "job": pa.array(rows, pa.binary())})


class Predictor:
    """An actor: a model and an engine of its own.

    Args:
        where: which model runs where.
        settings: how rows are answered.
        created: see `Batcher`.
    """

    def __init__(self, where: Chosen, settings: BatchOptions, created: int):
        self.batcher = Batcher(load_model(where), settings, created)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer a batch of pickled jobs; `row` is the output's line, empty where nothing was to be done."""
        asked = [pickle.loads(job) for job in batch["job"] if job]
        answered = {d.job.id: d for d in self.batcher.run(asked) if d is not None}
        done = [answered.get(pickle.loads(id)) for id in batch["id"]]
        rows, tokens = [d.line if d else b"" for d in done], [d.tokens if d else 0 for d in done]
        return {"id": list(batch["id"]), "row": rows, "tokens": tokens}


class Parts(BlockBasedFileDatasink):
    """Part files of output lines, or of parquet."""

    rows = 0

    def on_write_complete(self, write_result: Any) -> None:
        """Note how many rows there are."""
        super().on_write_complete(write_result)
        self.rows = write_result.num_rows

    def write_block_to_file(self, block: Any, file: Any) -> None:
        """Write one block's rows."""
        lines = block.to_arrow()["row"].to_pylist()
        if self.file_format == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(table_of(lines), file)
        else:
            file.write(b"".join(lines))


def run_on_ray(
    where: Chosen,
    source: str,
    target: str,
    settings: BatchOptions,
    *,
    address: str = "auto",
    gpus: float | None = None,
    actors: int | None = None,
    ordered: bool = True,
    overwrite: bool = False,
    chunk: int = 64,
    quiet: bool = False,
) -> dict[str, Any]:
    """Answer every row of a file on a Ray cluster; see `selfspec.serving.run_batch`.

    Args:
        where: which model; every actor loads it.
        source: a file that every node can read, or a path with a scheme.
        target: a local file, or a folder with a scheme.
        settings: how rows are answered.
        address: of the cluster; "auto" takes the running one, or starts one here.
        gpus: per actor; by default 1 where the model runs on cuda.
        actors: by default one for every GPU.
        ordered: answers in the order of the rows.
        overwrite: begin anew whatever is there.
        chunk: rows a write.
        quiet: show no progress.

    Raises:
        ValueError: source or target cannot be used, or no actor would fit the cluster.
    """
    if source == "-" or target == "-":
        raise ValueError("stdin and stdout are not files that a cluster can read and write: give paths")
    connect(address)
    gpus = gpus if gpus is not None else float(where.device.startswith("cuda"))
    have = int(ray.cluster_resources().get("GPU", 0) // gpus) if gpus else 1
    actors = actors or have
    if not actors:
        raise ValueError(f"the cluster has no GPU for an actor of {gpus:g}; pass --device cpu, or less --gpus")
    cores = int(ray.cluster_resources().get("CPU", 0))
    if actors >= cores:
        raise ValueError(f"{actors} actors on {cores} CPU cores leave none to read the rows: lower --actors")
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = ordered
    rows = 4 * (
        settings.slots or most_slots(torch.device(where.device))
    )  # an engine's slots are refilled from these; they are lost with an actor

    def answered(done: set[str | int], created: int) -> Any:
        return (
            ray.data.read_datasource(Rows(source, done))
            .repartition(target_num_rows_per_block=rows)
            .map_batches(
                Predictor,
                fn_constructor_args=(where, settings, created),
                batch_size=rows,
                compute=ActorPoolStrategy(size=actors),
                num_cpus=1,
                num_gpus=gpus or None,
            )
        )

    if "://" in target:
        return _to_parts(answered, target)
    apart(source, target)
    mark, expected = (None, None) if "://" in source else identity(source)
    record = ray.get(ray.remote(_recorded).remote(where, settings, mark, ordered))
    with resumable(Output(target, record, ordered, overwrite, chunk), expected, quiet) as out:
        if out.complete:
            return {**out.counts, "resumed": out.counts["rows"], "engine": None}
        before = out.counts["rows"]
        with Progress(expected or before, before, quiet) as progress:
            for i, row in enumerate(answered(set(out.done), out.created).iter_rows()):
                id = pickle.loads(row["id"])
                progress.total = max(progress.total, i + 1)
                if row["row"]:
                    out.put(i, id, row["row"])
                    progress.add(1, int(row["tokens"]))
                else:
                    out.skip(i, id)
                out.tick()
        out.finish({"ray": dict(ray.cluster_resources()), "actors": actors})
        return {**out.counts, "resumed": before, "engine": None}


def connect(address: str) -> None:
    """Join a cluster, unless this process has joined one already."""
    if ray.is_initialized():
        return
    quietly: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # Ray itself tries for minutes, and says nothing
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWERS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        ray.init(address=address, **quietly)
    except ConnectionError:
        if address != "auto":
            raise ValueError(f"no Ray cluster answers at {address}") from None
        ray.init(address="local", **quietly)


def _recorded(where: Chosen, settings: BatchOptions, mark: str | None, ordered: bool) -> dict[str, Any]:
    return recorded(load_model(replace(where, device="cpu")), settings, mark, ordered)


def _to_parts(answered: Any, target: str) -> dict[str, Any]:
    kind = "parquet" if target.rstrip("/").endswith(".parquet") else "jsonl"
    system, path = fs.FileSystem.from_uri(target)
    found = system.get_file_info(fs.FileSelector(path, recursive=False, allow_not_found=True))
    if found:
        raise ValueError(f"{posixpath.join(target, '')} holds files already: write into another folder")
    parts = Parts(target, file_format=kind)
    answered(set(), 0).write_datasink(parts)
    return {"rows": parts.rows, "resumed": 0, "engine": None}
