"""The cache: what is committed, where it lands, and that nothing stale is ever read."""

import gc
import weakref

import pytest
import torch
from tiny import PROMPT, RAGGED, backbone, model_of, path_of, reference, run

from selfspec import rows
from selfspec.backbone import Backbone
from selfspec.cache import KVCache, PrefixCache
from selfspec.plan import Plan
from selfspec.session import Request, Session

HEADS, DIM = 2, 3


def empty(layers, slots, capacity, tail):
    return KVCache([(HEADS, DIM, DIM)] * layers, slots, capacity, tail, torch.float32, torch.device("cpu"))


def written(cache, layout, first=0, layer=0):
    """Bind a layout and write rows whose every number names request and row: 100 * request + row."""
    cache.bind(layout, first)
    n, r = layout.n_requests, layout.n_rows
    names = (100.0 * torch.arange(n)[:, None] + torch.arange(r))[:, None, :, None].expand(n, HEADS, r, DIM)
    return cache.layers[layer].update(names.clone(), -names)


def committed(cache, slot, layer=0):
    keys = cache.layers[layer].keys[slot, :, : cache.lengths[slot]]
    assert torch.equal(cache.layers[layer].values[slot, :, : cache.lengths[slot]], -keys)
    assert (keys == keys[:1, :, :1]).all()  # heads and dimensions travel together
    return keys[0, :, 0].tolist()


def test_a_tree_path_is_gathered_before_it_is_written():
    """Sources and targets overlap: moving one row after the other would read what was just overwritten."""
    cache = empty(1, 2, 20, 8)
    start = torch.tensor([0, 0])
    written(cache, rows.chain(start, 3))
    cache.commit([3, 1])
    start = torch.tensor([3, 1])
    written(cache, rows.chain(start, 7))
    # decreasing row indices cannot come from a tree, but show the overlap in both directions
    cache.compact(torch.tensor([[6, 0, 1, 2], [3, 5, 5, 5]]), start)
    cache.commit([4, 2])
    assert cache.lengths == [7, 3]
    assert committed(cache, 0) == [0, 1, 2, 6, 0, 1, 2]
    assert committed(cache, 1) == [100, 103, 105]


def test_requests_have_their_own_lengths():
    cache = empty(2, 3, 10, 4)
    for layer in (0, 1):
        written(cache, rows.chain(torch.zeros(3, dtype=torch.long), 4), layer=layer)
    cache.commit([4, 0, 2])
    assert cache.lengths == [4, 0, 2]
    layout = rows.chain(torch.tensor(cache.lengths), 2)
    assert cache.bind(layout) == 6
    keys, values = written(cache, layout)
    assert keys.shape == values.shape == (3, HEADS, 6, DIM)
    cache.commit([2, 2, 1])
    assert [committed(cache, i) for i in range(3)] == [[0, 1, 2, 3, 0, 1], [100, 101], [200, 201, 200]]


def test_a_forward_over_later_slots_leaves_the_earlier_ones_alone():
    cache = empty(1, 3, 10, 4)
    written(cache, rows.chain(torch.tensor([0]), 2))
    cache.commit([2])
    before = cache.layers[0].keys[0].clone()
    keys, _ = written(cache, rows.chain(torch.tensor([0, 0]), 3), first=1)
    assert keys.shape[0] == 2 and keys[1, 0, :, 0].tolist() == [100, 101, 102]
    cache.commit([3, 1], first=1)
    assert cache.lengths == [2, 3, 1] and torch.equal(cache.layers[0].keys[0], before)


def test_move_copies_the_committed_positions():
    cache = empty(1, 2, 10, 4)
    written(cache, rows.chain(torch.zeros(2, dtype=torch.long), 4))
    cache.commit([4, 3])
    cache.move([1], [0])
    assert cache.lengths[0] == 3 and committed(cache, 0) == [100, 101, 102]
    cache.crop(1)
    assert cache.lengths[0] == 1
    cache.crop(5)  # forgetting more than there is forgets nothing
    assert cache.lengths[0] == 1


@pytest.mark.parametrize("n, fits", [(4, True), (5, False)])
def test_more_rows_than_the_tail_are_refused(n, fits):
    cache = empty(1, 1, 3, 4)
    layout = rows.chain(torch.tensor([0]), n)
    if fits:
        written(cache, layout)
    else:
        with pytest.raises(ValueError, match="holds 3 positions and 4 rows"):
            cache.bind(layout)


def test_more_positions_than_the_capacity_are_refused():
    cache = empty(1, 1, 3, 4)
    written(cache, rows.chain(torch.tensor([0]), 4))
    cache.commit([3])
    written(cache, rows.chain(torch.tensor([3]), 4))  # exactly full: the rows stand in the tail
    cache.commit([1])
    with pytest.raises(ValueError, match="KV cache"):
        cache.bind(rows.chain(torch.tensor([4]), 1))


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GptOss"])
def test_stale_tails_are_never_read(family):
    """Fill everything uncommitted with huge numbers; the logits of the next rows must not notice."""
    body, ids = backbone(family), torch.tensor([PROMPT[:4], PROMPT[4:8]])
    outputs = []
    for poison in (0.0, 1e30):
        cache = body.new_cache(2, 20, 6)
        body(rows.chain(torch.tensor([0, 0]), 4), cache, ids)
        cache.commit([4, 2])
        for store in cache.stores:
            for slot, length in enumerate(cache.lengths):
                store[slot, :, length:] = poison
        outputs.append(body(rows.chain(torch.tensor([4, 2]), 3), cache, ids[:, :3]).clean)
    assert torch.equal(*outputs)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["sequential", "tree", "overlap", "overlap+tree"])
@pytest.mark.parametrize("entry", [0, 2])
def test_what_is_committed_is_what_plain_decoding_would_have_committed(mode, entry):
    """Draft rows write into the same scratch; none of theirs may stay, and none may move a clean row's numbers."""
    model = model_of("Qwen3")
    body = Backbone(model, path_of(model, 0.2, entry=entry))
    truth = reference(model, RAGGED, 12)
    session = Session(body, Plan(mode, 5, 9), 3, 30)
    requests = [Request(p, 12) for p in RAGGED]
    session.add(requests)
    for _ in range(3):  # nobody ends: three rounds of five nodes emit at most eleven after the first
        if all(len(r.output) < 7 for r in requests):
            session.step()
    plain = Backbone(model)
    for i, request in enumerate(requests):
        text = request.prompt + truth[i][: len(request.output) - 1]
        length = session.cache.lengths[i]
        assert length == len(text) == int(session.slots.start[i])
        own = plain.new_cache(1, 30, 30)
        plain(rows.chain(torch.tensor([0]), length), own, torch.tensor([text]))
        for ours, theirs in zip(session.cache.stores, own.stores, strict=True):
            assert (ours[i, :, :length] - theirs[0, :, :length]).abs().max() < 1e-12


def test_a_session_fills_the_gaps_that_ended_requests_leave():
    model = model_of()
    prompts = [*RAGGED, [9, 9], [2, 3, 4]]
    caps = [2, 9, 1, 12, 5]
    truth = reference(model, prompts, 12)
    session = Session(Backbone(model), Plan("ar", 1), 5, 30)
    requests = [Request(p, c) for p, c in zip(prompts, caps, strict=True)]
    session.add(requests)
    session.step()
    assert len(session.active) == 4  # the cap of one is spent by the prefill
    run(session, [])
    for request, cap, answer in zip(requests, caps, truth, strict=True):
        assert request.output == answer[:cap] and request.finish_reason == "length"


@pytest.mark.parametrize("kind", ["slots", "prefix"])
def test_memory_is_freed_without_the_garbage_collector(kind):
    """A reference cycle through the layers kept every training step's keys until Python happened to collect."""
    body = Backbone(model_of())
    cache = body.new_cache(1, 8, 8) if kind == "slots" else PrefixCache(body.n_layers)
    with torch.no_grad():
        body(rows.chain(torch.zeros(1, dtype=torch.long), 4), cache, torch.ones(1, 4, dtype=torch.long))
    watched = weakref.ref(cache.layers[0].keys)
    gc.disable()
    try:
        del cache
        assert watched() is None
    finally:
        gc.enable()
