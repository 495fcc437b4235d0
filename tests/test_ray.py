"""A batch on a real Ray cluster of two local nodes: an actor is killed, and the output is that of one process."""

import contextlib
import json
import socket
import threading
import time

import psutil
import pytest
import tiny_chat
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from selfspec import SelfSpecModel  # noqa: E402
from selfspec.options import Chosen  # noqa: E402
from selfspec.serving import run_batch  # noqa: E402
from selfspec.serving.batch import BatchOptions  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]
SETTINGS = BatchOptions({"max_new_tokens": 6}, slots=2)


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    name = tiny_chat.save_model(folder / "m")
    adapter = tiny_chat.save_adapter(folder / "a", name)
    rows = [{"id": f"r{i}", "prompt": f"w{i % 50} w{(7 * i) % 50}", "extra": i} for i in range(48)]
    rows[5] = {"prompt": 3}
    rows[6]["temperature"] = 1.0
    rows[8]["id"] = "r7"
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    model = SelfSpecModel.from_pretrained(name, adapter, dtype=torch.float32)
    run_batch(model, source, folder / "one.jsonl", SETTINGS, quiet=True)
    return folder, Chosen(name, adapter, "float32", threads=1), str(source)


def kill_an_actor(target, killed, over):
    """SIGKILL one of the cluster's actors as soon as rows are there. Notes how many there were."""
    while not (killed or over.is_set()):
        rows = target.read_bytes().count(b"\n") if target.exists() else 0
        for process in psutil.Process().children(recursive=True) if rows else ():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] and "MapWorker" in process.cmdline()[0]:
                    process.kill()
                    killed.append(rows)
                    return
        time.sleep(0.01)


def test_an_address_where_nothing_answers_is_refused_at_once(monkeypatch):
    """It was tried for a quarter of an hour, and nothing was said."""
    from selfspec.serving.ray import connect

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        for form in ("127.0.0.1:{}", "ray://127.0.0.1:{}"):
            with pytest.raises(ValueError, match=r"no Ray cluster answers at .*127\.0\.0\.1"):
                connect(form.format(deaf.getsockname()[1]))


def test_a_cluster_gives_the_output_of_one_process_though_an_actor_dies(cluster, files):
    from selfspec.serving.ray import run_on_ray

    folder, where, source = files
    target, killed, over = folder / "many.jsonl", [], threading.Event()
    thread = threading.Thread(target=kill_an_actor, args=(target, killed, over))
    thread.start()
    try:
        counts = run_on_ray(where, source, str(target), SETTINGS, actors=2, chunk=1, quiet=True)
    finally:  # a run that failed was waited for, ten minutes long
        over.set()
        thread.join()
    assert 0 < killed[0] < 48 and counts["rows"] == 48 and counts["errors"] == 2
    assert target.read_bytes() == (folder / "one.jsonl").read_bytes()
    before = json.loads((folder / "many.jsonl.manifest.json").read_text())["settings"]
    assert before == json.loads((folder / "one.jsonl.manifest.json").read_text())["settings"]


def test_a_cluster_that_is_too_small_is_refused_and_not_waited_for(cluster, files):
    from selfspec.serving.ray import run_on_ray

    folder, where, source = files
    with pytest.raises(ValueError, match="4 actors on 4 CPU cores"):
        run_on_ray(where, source, str(folder / "none.jsonl"), SETTINGS, actors=4)
    with pytest.raises(ValueError, match="no GPU for an actor"):
        run_on_ray(where, source, str(folder / "none.jsonl"), SETTINGS, gpus=1)


def test_a_scheme_makes_part_files_with_the_same_rows(cluster, files):
    from selfspec.serving.ray import run_on_ray

    folder, where, source = files
    counts = run_on_ray(where, f"file://{source}", f"file://{folder}/parts", SETTINGS, quiet=True)
    parts = sorted((folder / "parts").iterdir())
    assert counts["rows"] == 48 and len(parts) > 1
    assert b"".join(p.read_bytes() for p in parts) == (folder / "one.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds files already"):
        run_on_ray(where, f"file://{source}", f"file://{folder}/parts", SETTINGS, quiet=True)
