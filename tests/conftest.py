"""Shared test setup: no network, two threads at most, GPU tests only where there is a GPU."""

import os
from importlib.util import find_spec

# Before transformers is imported: it reads these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest
import torch

# Without a GPU kernels run in Triton's interpreter: read when triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from interpreter import quicken

        quicken()

# Parallel workers share the cores; small models gain nothing from more than two threads.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // WORKERS)))

# What takes longest, longest first: files are handed to workers in this order, and short ones even out the end.
LONG = (
    "ray", "readme", "planner", "estimate", "nodes", "kernels", "training_processes", "exact", "training_trainer",
    "regret", "session", "training_anchors", "backbone", "condition", "processors", "pruning", "engine", "check",
    "combinations", "replay", "report", "hub", "arena", "verifiers", "training_readout", "generate", "batch",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def tables(tmp_path_factory):
    """Latency tables of tests are not kept with the user's own, unless a test says where."""
    from selfspec.plan import tabulate

    real, folder = tabulate.stored_at, tmp_path_factory.mktemp("latency")
    with pytest.MonkeyPatch.context() as patch:
        own = lambda key: real(key) if "SELFSPEC_CACHE" in os.environ else folder / real(key).name  # noqa: E731
        patch.setattr(tabulate, "stored_at", own)
        yield


@pytest.fixture
def chains(monkeypatch):
    """Where nobody names a mode, drafts are chains: a planner decodes models this small plainly, and what can go wrong
    with drafts would not run."""
    from selfspec import model

    real = model.default_mode
    monkeypatch.setattr(model, "default_mode", lambda *how: real(*how).replace("auto", "sequential"))


@pytest.fixture(scope="module")
def one_thread():
    """One thread, for what is timed or spawns work of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
