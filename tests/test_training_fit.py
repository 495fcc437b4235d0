"""The dry run, what a step has to compute, the log, and what is kept of a run."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from test_training_trainer import answered, config, tiny
from torch.utils.flop_counter import FlopCounterMode

from selfspec.adapters import MaskPathConfig, MaskPathModel, io
from selfspec.backbone import Backbone
from selfspec.training import fit
from selfspec.training.acceptance import expected_rounds
from selfspec.training.batches import Shape
from selfspec.training.flops import Work, flops, mfu
from selfspec.training.log import scalars
from selfspec.training.objectives.tv import overlap
from selfspec.training.trainer import Trainer


def machine(memory: float = 1e9, fixed: float = 1.0, each: float = 0.01, clean: float = 0.5):
    """A fake device: a step costs something fixed, something a row and something a group."""
    seen: list[Shape] = []

    def measure(shape: Shape) -> fit.Cost | None:
        seen.append(shape)
        used = 10.0 * shape.micro * shape.anchors
        if used > memory:
            return None
        groups = shape.rows * shape.anchors
        return fit.Cost(fixed + clean * shape.rows + each * groups, groups, used)

    return measure, seen


def test_the_fastest_shape_that_fits_is_found() -> None:
    measure, seen = machine()
    shape, cost, failed = fit.search(measure, Shape(4, 4, 8, 4), 512, 1e9, 1e9)
    assert not failed and cost.rate == max(measure(s).rate for s in list(seen)) and shape != Shape(4, 4, 8, 4)
    assert shape.rows * shape.anchors <= 512 and shape.micro == shape.rows
    # nothing to gain where time is all in the groups
    measure, _ = machine(fixed=0.0, clean=0.0)
    assert fit.search(measure, Shape(4, 4, 8, 4), 512, 1e9, 1e9)[0] == Shape(4, 4, 8, 4)


def test_a_shape_that_does_not_fit_is_left_or_lowered() -> None:
    measure, seen = machine(memory=700.0)
    shape, _, _ = fit.search(measure, Shape(4, 4, 8, 4), 512, 700.0, 1e9)
    assert 10 * shape.micro * shape.anchors <= 700 and shape != Shape(4, 4, 8, 4)
    assert all(10 * s.micro * s.anchors <= 700 for s in seen)  # known from what was measured, and not tried
    measure, _ = machine(memory=100.0)
    shape, _, failed = fit.search(measure, Shape(4, 4, 8, 4), 512, 100.0, 1e9)
    assert shape == Shape(4, 1, 8, 4) and failed == [Shape(4, 4, 8, 4), Shape(4, 2, 8, 4)]
    measure, _ = machine(memory=5.0)
    with pytest.raises(torch.OutOfMemoryError, match="lower length"):
        fit.search(measure, Shape(4, 4, 8, 4), 512, 5.0, 1e9)


def test_the_search_ends_with_its_time() -> None:
    measure, seen = machine()
    ticks = itertools.count(0, 20)
    fit.search(measure, Shape(1, 1, 2, 4), 1 << 20, 1e9, 30.0, lambda: float(next(ticks)))
    assert len(seen) == 2


def test_the_dry_run_changes_the_shape_and_nothing_else(tmp_path) -> None:
    answers = answered(tiny(), 20)
    trainer = Trainer(config(tmp_path, fit=0.5, max_steps=0, minutes=3.0, groups=64), tiny(), answers)
    before = [p.clone() for p in trainer.params]
    record = fit.fit(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.params, strict=True))
    assert all(p.grad is None for p in trainer.params) and not trainer.optimizer.state
    assert (trainer.step, trainer.cursor, trainer.elapsed) == (0, 0, 0.0)
    assert trainer.shape.rows * trainer.shape.anchors <= 64
    assert (record["rows"], record["anchors"]) == (trainer.shape.rows, trainer.shape.anchors)
    assert record["steps"] == pytest.approx(180e3 / record["ms"], rel=0.02)
    assert record["minutes_left"] == pytest.approx(3.0, rel=0.02) and record["anchors_total"] > 0


def test_what_the_dry_run_chose_is_resumed(tmp_path, monkeypatch) -> None:
    answers = answered(tiny(), 20)
    monkeypatch.setattr(fit, "search", lambda measure, start, *_: (Shape(3, 3, 5, 4), measure(Shape(3, 3, 5, 4)), []))
    first = Trainer(config(tmp_path, fit=1.0, stop_after=1e-9), tiny(), answers)
    assert not first.train()["finished"]
    monkeypatch.setattr(fit, "search", None)  # not run again
    rest = Trainer(config(tmp_path, fit=1.0, resume=True), tiny(), answers)
    assert rest.shape == Shape(3, 3, 5, 4) and rest.train()["finished"]


@pytest.mark.parametrize("fields", [{}, {"tuning": "lora", "rank": 4, "targets": "all"}, {"entry": 1, "taps": (1,)}])
def test_flops_are_torchs_count(fields: dict, tmp_path) -> None:
    """Every slot of every row in use, so that nothing is padding: then all matrix products are useful ones."""
    from selfspec.training.data import Answer

    model = tiny(layers=3)
    docs = [Answer(str(i), [5], list(range(6, 6 + 31))) for i in range(8)]  # of 32 tokens, the length of a row
    adapter = {"block_size": 2, **fields}
    fields = config(tmp_path, adapter=adapter, length=32, rows=2, anchors=30, objectives={"ce": 1.0})
    trainer = Trainer(fields, model, docs, docs[:1])
    micro = trainer.batches.micro(0, 2, trainer.shape)
    assert micro.work == Work(64, 120, 60, 2 * 32 * 33 // 2, micro.work.draft_pairs, 60)
    with FlopCounterMode(display=False) as counter:
        trainer.attempt([micro], micro.divisors)
    counts = counter.get_flop_counts()["Global"]
    products = sum(v for k, v in counts.items() if "attention" not in str(k))
    linear = flops(trainer.backbone, Work(*micro.work.values[:3]))
    # besides: the masks' gradient, a one-hot product [2, 32] over 120 rows, forward and backward
    extra = 2 * 120 * len(trainer.path.mask) * 32 * 2 if len(trainer.path.mask) > 1 else 0
    assert products - extra == linear
    pairs = flops(trainer.backbone, micro.work) - linear
    depth = 3 - trainer.path.entry
    # scores and mixtures: 4 heads of 8 dimensions
    assert pairs == 2 * 4 * 16 * (3 * micro.work.clean_pairs + 3 * depth * micro.work.draft_pairs)
    seen = sum(int(micro.pack.positions[n, a]) + 2 for n in range(2) for a in micro.groups.anchors[n].tolist()) * 2
    assert micro.work.draft_pairs == seen


def test_heads_alone_are_trained_without_a_backward_pass_through_layers(tmp_path) -> None:
    """Counted: layers go forward only, and gradients are the lm_head's input and the head's own matrices'."""
    rank, d, labels, vocabulary = 6, 32, 2 * 12, 61
    adapter = {"block_size": 2, "entry": 1, "taps": (1,), "heads": ["markov"], "head_rank": rank}
    terms = {"markov": {"weight": 1.0, "detach": True}}
    trainer = Trainer(
        config(tmp_path, adapter=adapter, objectives=terms, length=32, anchors=12), tiny(), answered(tiny(), 12)
    )
    micro = trainer.batches.micro(0, 2, trainer.shape)
    with FlopCounterMode(display=False) as counter:
        trainer.attempt([micro], micro.divisors)
    counts = counter.get_flop_counts()["Global"]
    products = sum(v for k, v in counts.items() if "attention" not in str(k))
    whole = Work(64, 48, labels)  # padding is computed too
    # besides: plain label probabilities, forward; the head twice forward, and three products backward
    assert products == flops(trainer.backbone, whole) + labels * (2 * vocabulary * d + 10 * d * rank)
    assert not any("backward" in str(k) for k in counts)
    alone = flops(trainer.backbone, micro.work)
    trainer.path.requires_grad_(True)
    assert flops(trainer.backbone, micro.work) > 1.2 * alone


def test_mfu_is_a_share_of_the_peak() -> None:
    model = tiny()
    backbone = Backbone(model, MaskPathModel(model, MaskPathConfig(block_size=4)))
    done = Work(100, 200, 150, 1000, 2000, 50)
    assert mfu(backbone, done, 2.0, 1e9) == pytest.approx(flops(backbone, done) / 2e9)
    assert mfu(backbone, done, 2.0) is None  # no such figure for a CPU


def brute_rounds(chances: list[list[float]], first: list[float] | None, t: int = 0) -> float:
    """The same expectation by listing every outcome of every round."""
    n = len(chances)
    if t >= n:
        return 0.0
    row = chances[t] if t or first is None else first
    whole = 1.0
    for outcome in itertools.product((False, True), repeat=len(row)):
        p = 1.0
        for took, chance in zip(outcome, row, strict=True):
            p *= chance if took else 1 - chance
        accepted = next((j for j, took in enumerate(outcome) if not took), len(row))
        whole += p * brute_rounds(chances, first, min(t + accepted + 1, n))
    return whole


def test_expected_rounds_are_the_sum_over_all_outcomes() -> None:
    random = torch.Generator().manual_seed(0)
    n, slots = 6, 3
    chances = [torch.rand(min(slots, n - t), generator=random).tolist() for t in range(n)]
    first = torch.rand(slots, generator=random).tolist()
    assert expected_rounds(chances) == pytest.approx(brute_rounds(chances, None))
    assert expected_rounds(chances, first) == pytest.approx(brute_rounds(chances, first))
    assert expected_rounds(chances, first) != pytest.approx(expected_rounds(chances))
    assert expected_rounds([[1.0, 1.0], [0.0, 1.0], [1.0]]) == 1 and expected_rounds([[0.0], [0.0], [0.0]]) == 3


def test_overlap_is_the_acceptance_rate() -> None:
    """sum_v q(v) min(1, p(v) / q(v)), what a rejection sampler accepts."""
    random = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 5, 7, generator=random, dtype=torch.float64)
    q[:, 3] = float("-inf")
    a, b = p.softmax(-1), q.softmax(-1)
    for i in range(5):
        want = sum(b[i, v] * min(1.0, a[i, v] / b[i, v]) for v in range(7) if b[i, v] > 0)
        assert overlap(q, p)[i] == pytest.approx(float(want))


def test_the_best_and_the_last_are_kept(tmp_path, monkeypatch) -> None:
    model, taus = tiny(), iter([2.0, 3.0, 1.0, 2.5, 1.5])
    trainer = Trainer(config(tmp_path, max_steps=3, eval_every=1e-9), model, answered(tiny(), 20))
    monkeypatch.setattr(Trainer, "evaluate", lambda self, answers: {"known": {"tau": next(taus)}})
    saved: list = []
    keep = trainer.save_adapter
    monkeypatch.setattr(trainer, "save_adapter", lambda name, w: (saved.append((name, trainer.step)), keep(name, w)))
    trainer.train()
    assert saved == [("best", 0), ("best", 1), ("adapter", 3)] and trainer.best == 3.0
    assert {p.name for p in tmp_path.iterdir()} >= {"best", "adapter", "checkpoint.pt"}
    a, b = (io.load(tmp_path / name, model).state_dict() for name in ("best", "adapter"))
    assert any(not torch.equal(a[k], b[k]) for k in a)


def test_tensorboard_has_the_logs_numbers(tmp_path) -> None:
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = Trainer(config(tmp_path, max_steps=4, tensorboard=True), tiny(), answered(tiny(), 20))
    trainer.train()
    read = event.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    step = next(r for r in log if r["event"] == "step")
    valid = [r for r in log if r["event"] == "valid"]
    assert [e.value for e in read.Scalars("step/loss")] == pytest.approx([step["loss"]])
    assert [e.value for e in read.Scalars("valid/known/tau_t1")] == pytest.approx([r["known"]["tau_t1"] for r in valid])


def test_scalars_of_nested_records() -> None:
    record = {"a": 1, "b": {"c": 2.5, "d": {"e": True, "f": 3}}, "g": "text", "h": [1, 2]}
    assert dict(scalars(record)) == {"a": 1.0, "b/c": 2.5, "b/d/f": 3.0}
