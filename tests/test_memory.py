"""What decoding is expected to take is what it takes."""

from types import SimpleNamespace

import pytest
from tiny import model_of, path_of

from selfspec import memory
from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.session import Session


@pytest.mark.parametrize("plan", [Plan("ar", 1), Plan("sequential", 5), Plan("overlap+tree", 5, 8)])
@pytest.mark.parametrize("capacity", [4, 30, 64])
def test_short_slots_have_long_tails_too(plan, capacity, monkeypatch):
    """A slot of few positions holds the rows of a whole forward behind them: they were once left out of the count."""
    model = model_of()
    body = Backbone(model, path_of(model, layouts=("known", "hidden")))
    cache = Session(body, plan, 3, capacity).cache
    assert cache.nbytes == 3 * memory.slot_bytes(body, [plan], capacity)
    free = int(cache.nbytes * 7 / memory.SHARE) + 1
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert memory.fitting(body, capacity, [plan]) == 21
