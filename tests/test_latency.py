import dataclasses
import json
import random

import numpy as np
import pytest
import tiny
import torch

from selfspec.backbone import Backbone
from selfspec.plan import Plan, latency
from selfspec.plan.cost import Costs
from selfspec.plan.latency import Latency, measure
from selfspec.plan.surface import Surface
from selfspec.plan.table import LatencyTable, setting, stored_at
from selfspec.plan.tabulate import Sizes, at_load, shapes, stored, table_for, tabulate

pytestmark = pytest.mark.usefixtures("one_thread")


def point(kind, n, r, ms, context=512, entry=0, drafts=0, graph=False):
    return Latency(kind, n, r, entry, context, graph, ms, ms, ms, drafts)


def law(n, r, c):
    """A forward of some imaginary machine: fixed cost, rows, reading of the cache."""
    return 1.0 + 0.01 * n * r + 1e-5 * n * c


CELLS = {(n, r, c): law(n, r, c) for n in (1, 4, 16) for r in (1, 16, 64) for c in (512, 2048)}


def test_short_texts_cost_less_than_the_shortest_that_were_measured():
    """128 requests of 150 positions were taken to cost what they do with 512: plain rounds 14 % more than they took."""
    surface = Surface(CELLS)
    assert surface(16, 1, 100) == pytest.approx(law(16, 1, 100))
    assert surface(64, 1, 100) == pytest.approx(law(64, 1, 100), rel=0.01)


def test_measured_cells_come_back_and_the_law_between_them():
    surface = Surface(CELLS)
    for cell, ms in CELLS.items():
        assert surface(*cell) == pytest.approx(ms) and surface.how(*cell) == "measured"
    assert surface(1, 40, 512) == pytest.approx(law(1, 40, 512)) and surface.how(1, 40, 512) == "between"
    assert surface(4, 16, 1000) == pytest.approx(law(4, 16, 1000))
    assert np.allclose(surface(np.array([1, 4, 10]), 16, 512), [law(n, 16, 512) for n in (1, 4, 10)])


def test_a_graph_costs_what_its_bucket_costs():
    """Rows were padded to the next measured number too, which no graph does, and 5 requests to 16."""
    surface = Surface(CELLS, steps=True)
    assert surface(5, 1, 512) == surface(8, 1, 512) == pytest.approx(law(8, 1, 512))
    assert surface(1, 1, 512) == pytest.approx(law(1, 1, 512)) and surface(1, 17, 512) == pytest.approx(law(1, 17, 512))


def test_noise_cannot_make_a_smaller_forward_dearer():
    rng = random.Random(0)
    cells = {k: ms + rng.expovariate(2) for k, ms in CELLS.items()}
    surface = Surface(cells)
    sizes = [(n, r, c) for n in (1, 2, 4, 9, 16) for r in (1, 5, 16, 50, 64) for c in (512, 900, 2048)]
    for a in sizes:
        assert surface(*a) <= max(cells.values())
        for b in sizes:
            if all(x <= y for x, y in zip(a, b, strict=True)):
                assert surface(*a) <= surface(*b) + 1e-9


def test_beyond_what_was_measured_nothing_is_free():
    surface = Surface(CELLS)
    assert surface.how(1, 128, 512) == "beyond" and surface(1, 128, 512) == pytest.approx(law(1, 128, 512), rel=0.01)
    assert surface(16, 128, 512) == pytest.approx(2 * surface(16, 64, 512), rel=0.01)  # more rows than any forward had
    assert surface(32, 16, 512) == pytest.approx(law(32, 16, 512), rel=0.01)
    assert law(32, 64, 512) <= surface(32, 64, 512) <= 2.01 * surface(16, 64, 512)
    assert surface(16, 1, 8192) == pytest.approx(law(16, 1, 8192))  # reading the cache goes on as it was measured


def test_many_requests_cost_their_rows_and_not_so_many_forwards():
    """A table of single requests told 32 forwards for a round of 32, so what lost there seemed to win as it does for
    one."""
    alone = LatencyTable(
        tuple(point("clean", 1, r, law(1, r, 0), graph=True) for r in (1, 16, 64, 256))
        + tuple(point("draft", 1, b, 0.3 * law(1, b, 0), entry=20, graph=True) for b in (4, 16)),
        n_layers=30,
    )
    for n, r in ((32, 1), (8, 16), (64, 4)):
        assert alone.time("clean", r, n) == pytest.approx(law(n, r, 0))
        assert alone.how("clean", r, n, 512) == "beyond"
    assert alone.time("draft", 4, 32, entry=20) == pytest.approx(0.3 * law(32, 4, 0))
    assert alone.reach == 1 and not alone.covers(2)


def test_a_cell_that_nobody_measured_is_completed():
    some = {k: v for k, v in CELLS.items() if k not in ((16, 64, 512), (16, 64, 2048), (4, 16, 2048), (16, 16, 2048))}
    surface = Surface(some)
    # 64 rows at a time were measured, so 4 x 16 rows are known up to how rows are split over requests
    assert surface(4, 16, 2048) == pytest.approx(law(4, 16, 2048), rel=0.01)
    # 1,024 rows were not: in proportion to the most that were (256), an upper bound
    assert law(16, 64, 512) <= surface(16, 64, 512) <= 4 * law(4, 64, 512) + 1e-9


def table(*extra):
    clean = [point("clean", n, r, law(n, r, c), c) for n, r, c in CELLS]
    return LatencyTable((*clean, *extra), n_layers=30)


def test_late_entries_are_derived_until_they_are_measured():
    plain = table()
    assert plain.time("draft", 16, entry=20) == pytest.approx(law(1, 16, 512) / 3)
    assert plain.how("draft", 16, 1, 512, 20) == "derived"
    both = table(point("draft", 1, 16, 3.0, entry=0), point("draft", 1, 16, 1.2, entry=20))
    assert both.time("draft", 16, entry=20) == 1.2 and both.how("draft", 16, 1, 512, 20) == "measured"
    assert both.time("draft", 16, entry=10) == pytest.approx((3.0 + 1.2) / 2)
    assert both.time("draft", 16, entry=25) == pytest.approx(1.2 / 2)


def test_an_overlap_pays_for_its_draft_rows_from_the_entry_on():
    derived = law(1, 16, 512) * 2 / 3 + law(1, 48, 512) / 3
    assert table().time("overlap", 16, entry=20, drafts=32) == pytest.approx(derived)
    dearer = table(point("overlap", 1, 16, 1.5 * derived, entry=20, drafts=32))
    assert dearer.time("overlap", 16, entry=20, drafts=32) == pytest.approx(1.5 * derived)
    cheaper = table(point("overlap", 1, 16, 0.1, entry=20, drafts=32))  # noise: it holds a whole verify
    assert cheaper.time("overlap", 16, entry=20, drafts=32) == pytest.approx(law(1, 16, 512))


def test_a_table_survives_its_file(tmp_path):
    before = table(point("draft", 1, 16, 1.0, entry=3), point("overlap", 1, 16, 2.0, entry=3, drafts=32))
    before.save(tmp_path / "deep" / "t.json")
    assert LatencyTable.load(tmp_path / "deep" / "t.json") == before
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["t.json"]
    for damage in ("{", "[]", json.dumps({"format": 0}), json.dumps({"format": 1, "points": [], "n_layers": 1})):
        (tmp_path / "bad.json").write_text(damage)
        with pytest.raises(ValueError, match="measure it again"):
            LatencyTable.load(tmp_path / "bad.json")


def test_newer_points_replace_older_ones():
    merged = table().merged((point("clean", 1, 1, 9.0), point("clean", 1, 2, 7.0)))
    assert merged.time("clean", 1) <= 9 and len(merged.points) == len(CELLS) + 1


@pytest.fixture(scope="module")
def body():
    model = tiny.model_of("Llama", torch.float32)
    return Backbone(model, tiny.path_of(model, entry=2))


def test_the_coarse_points_come_first(body):
    order = shapes(body, Sizes((1, 2, 4, 8, 16), (1, 2, 4), (16, 32)))
    first = {(s.kind, s.requests, s.rows, s.context) for s in order[:8]}
    assert ("clean", 1, 1, 16) in first and ("clean", 1, 16, 16) in first and ("draft", 1, 4, 16) in first
    assert order[0].rows == 1 and len(order) == len(set(order))
    assert {s.kind for s in order} == {"clean", "draft", "head", "overlap", "tree"}
    assert all(s.context < tiny.POSITIONS for s in shapes(body, Sizes()))  # no more than the model has positions


def test_the_widest_block_of_an_adapter_is_measured():
    """Only half of it was, and a draft then seemed to cost twice what it does."""
    model = tiny.model_of("Llama", torch.float32)
    wanted = shapes(Backbone(model, tiny.path_of(model, block_size=8)), at_load(1, 16))
    assert {s.rows for s in wanted if s.kind == "draft"} == {4, 8}
    assert {s.rows for s in wanted if s.kind == "overlap"} == {8}


def fake(clock, per_row=0.01):
    """Measures by the law, and takes its time on a clock of its own."""

    def measured(backbone, kind, n, r, context, graph, drafts, seconds):
        entry = backbone.path.entry if kind in ("draft", "overlap") else 0
        ms = 1.0 + per_row * n * (r + drafts)
        clock[0] += 3 * ms / 1e3  # a warm repeat and two timed ones
        return point(kind, n, r, ms, context, entry, drafts)

    return measured


def test_a_budget_is_kept_and_spent(body):
    sizes = Sizes((1, 4, 16, 64), (1, 8, 64), (16,))
    whole = len(shapes(body, sizes))
    for seconds in (0.02, 0.05, 0.2):
        clock = [0.0]
        found = tabulate(body, sizes, seconds, False, None, measured=fake(clock, 0.2), clock=lambda c=clock: c[0])
        assert clock[0] <= seconds or len(found.points) == 1
        assert len(found.points) < whole and clock[0] > 0.5 * seconds
    clock = [0.0]
    assert len(tabulate(body, sizes, None, False, measured=fake(clock), clock=lambda: clock[0]).points) == whole


def test_a_later_run_completes_an_earlier_one(body):
    clock, seen = [0.0], []
    some = tabulate(body, Sizes((1, 4), (1,), (16,)), None, False, measured=fake(clock))
    more = tabulate(body, Sizes((1, 4, 8), (1,), (16,)), None, False, some, seen.append, fake(clock))
    assert [(p.kind, p.rows) for p in seen] == [("clean", 8)] and len(more.points) == len(some.points) + 1


@pytest.mark.parametrize("kind, drafts", [("clean", 0), ("draft", 0), ("head", 0), ("overlap", 8), ("tree", 3)])
def test_a_real_forward_is_timed(body, kind, drafts):
    found = measure(body, kind, 2, 4, 16, repeats=3, drafts=drafts)
    assert 0 < found.low <= found.ms <= found.high and found.entry == (2 if kind in ("draft", "overlap") else 0)


def test_a_path_with_features_is_timed_too():
    model = tiny.model_of("Llama", torch.float32)
    found = measure(Backbone(model, tiny.path_of(model, taps=(1, 4))), "draft", 1, 4, 16, repeats=3)
    assert found.ms > 0


def test_the_table_is_stored_per_machine_and_shape(body, tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    assert stored(body) is None
    first = table_for(body, 2, 16, seconds=0.5)
    assert first.covers(2) and stored(body) == first and first.setting["dtype"] == "float32"
    assert table_for(body, 2, 16, seconds=0.5) == first  # read, not measured again
    assert not first.covers(3)
    other = Backbone(tiny.model_of("Llama", torch.float64))
    assert stored(other) is None and stored_at(setting(other, False)) != stored_at(setting(body, False))
    file = stored_at(setting(body, False))
    file.write_text("damaged")
    assert stored(body) is None and table_for(body, 1, 16, seconds=0.5).covers(1)
    threads = {**setting(body, False), "threads": 99}
    assert stored_at(threads) != file


def test_the_weights_values_do_not_matter(body):
    again = Backbone(tiny.build("Llama", torch.float32, seed=5), body.path)
    assert setting(again, False) == setting(body, False)
    assert setting(body, True) != setting(body, False)


def test_at_load_a_few_shapes_do():
    sizes = at_load(128)
    assert sizes.requests == (1, 8, 32, 128) and at_load(1).requests == (1,) and at_load(64).requests[-1] == 64
    assert len(dataclasses.astuple(sizes)[0]) <= 6


def test_a_cut_chain_is_not_charged_for_the_head_of_what_it_leaves():
    """Rounds of 128 requests that verified 4 of 16 drafts were foretold to take 1.8 times what they took."""
    points = [point("clean", 1, r, 1.0) for r in (1, 4, 16)] + [point("draft", 1, 4, 1.0), point("draft", 1, 16, 2.0)]
    heads = [point("head", 1, 16, 1.2), point("head", 1, 4, 0.3)]
    whole, cut = Plan("sequential", 16), Plan("sequential", 16, verify_length=4)
    without, told = (Costs(LatencyTable(tuple(p), 30)) for p in (points, points + heads))
    assert without.round(cut, 1, 512) == pytest.approx(3.0) == told.round(whole, 1, 512)
    assert told.round(cut, 1, 512) == pytest.approx(1.0 + 2.0 - 0.9)


def test_a_cut_chain_takes_at_least_what_a_block_of_its_length_does():
    """Heads that were timed for one request alone made cuts of 8 requests cost 1.16 ms, which take 1.60."""
    points = [point("clean", n, r, 1.0) for n in (1, 8) for r in (1, 4, 16)]
    points += [point("draft", 8, 4, 0.5), point("draft", 8, 16, 0.7), point("draft", 1, 16, 0.47)]
    points += [point("head", 1, 16, 0.19), point("head", 1, 4, 0.11)]
    costs = Costs(LatencyTable(tuple(points), 30))
    assert costs.round(Plan("sequential", 16, verify_length=4), 8, 512) == pytest.approx(1.5)


@pytest.mark.parametrize("heads", [(), ("sampler",)])
def test_trees_under_a_head_are_timed_as_they_are_grown(heads):
    model = tiny.model_of("Llama", torch.float32)
    found = measure(
        Backbone(model, tiny.path_of(model, heads=heads, head_rank=4)), "tree", 2, 5, 16, repeats=3, drafts=3
    )
    assert found.ms > 0


@pytest.mark.parametrize("heads", [(), ("sampler",)])
@pytest.mark.parametrize("graph", [False, True])
def test_a_tree_is_charged_for_its_rows_beside_its_growth(heads, graph, monkeypatch):
    """Its rows attend at a price of their own, its head reads more: rounds of 128 took 1.3 times as foretold."""
    model, ran = tiny.model_of("Llama", torch.float32), []
    took = iter([[1.0, 1.5, 0.5], [9.0, 7.5, 8.0], [5.0, 4.0, 4.0, 4.0, 4.0]])  # growth, a tree's round, a chain's
    monkeypatch.setattr(latency, "_timed", lambda run, *_: run() or next(took))
    monkeypatch.setattr(latency, "captured", lambda run: run)
    body = Backbone(model, tiny.path_of(model, heads=heads, head_rank=4))
    forward = Backbone.forward

    def noted(self, layout, *args, **kwargs):
        ran.append((layout.parents is not None, layout.n_clean))
        return forward(self, layout, *args, **kwargs)

    monkeypatch.setattr(Backbone, "forward", noted)
    found = latency.measure(body, "tree", 2, 5, 16, graph, drafts=3)
    if graph:
        assert ran == [(True, 6), (False, 6)]  # a tree's, and a chain's of as many rows
        assert (found.low, found.ms, found.high) == (3.5, 4.0, 4.5)
    else:  # a difference of two launched forwards says more of the machine's load than of trees
        assert not ran and (found.low, found.ms, found.high) == (0.5, 1.0, 1.5)


def test_a_tree_costs_its_growth_at_least(monkeypatch):
    took = iter([[1.0], [4.0], [4.5]])
    monkeypatch.setattr(latency, "_timed", lambda run, *_: next(took))
    monkeypatch.setattr(latency, "captured", lambda run: run)
    model = tiny.model_of("Llama", torch.float32)
    assert latency.measure(Backbone(model, tiny.path_of(model)), "tree", 2, 5, 16, True, drafts=3).ms == 1.0
