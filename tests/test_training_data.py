"""Data that is not as one would wish: counted, and no harm to the training."""

from __future__ import annotations

import json

import pytest
import torch
from draws import draw
from test_training_trainer import V, answered, config, tiny

from selfspec.training import anchors as anchoring
from selfspec.training.data import Answer, hold_out
from selfspec.training.pack import Packer
from selfspec.training.trainer import Trainer


def start(folder) -> dict:
    return json.loads((folder / "log.jsonl").read_text().splitlines()[0])


def test_empty_answers_and_long_prompts_are_counted(tmp_path) -> None:
    good = answered(tiny(), 12)
    odd = [Answer("none", [1, 2], []), Answer("one", [1, 2], [3]), Answer("long", list(range(47)), [1, 2, 3]),
           Answer("cut", [1, 2, 3], [7] * 90)]  # fmt: skip
    trainer = Trainer(config(tmp_path, max_steps=2), tiny(), good + odd, good[:2])
    trainer.train()
    record = start(tmp_path)
    assert (record["docs"], record["empty"], record["over"], record["cut"]) == (13, 2, 1, 1)
    with pytest.raises(ValueError, match=r"none of 2 answers.*2 are too short, 0 prompts too long"):
        Trainer(config(tmp_path), tiny(), odd[:2], good[:2])


def test_nothing_goes_past_the_models_context(tmp_path) -> None:
    """A packed row may be longer than the model's context, a document may not."""
    model = tiny()
    model.config.max_position_embeddings = 20
    docs = [Answer("fits", [1] * 5, [2] * 9), Answer("cut", [1] * 10, [2] * 25), Answer("over", [1] * 19, [2] * 5)]
    trainer = Trainer(config(tmp_path, rows=1), model, docs, docs[:1])
    assert (len(trainer.packer), trainer.packer.over, trainer.packer.cut) == (2, 1, 1)
    pack, _ = draw(trainer)
    assert pack.positions.max() == 19 and int((pack.segments >= 0).sum()) == 34


def test_zero_loss_batches_change_nothing_and_are_counted(tmp_path) -> None:
    """Every group's tokens are known (prefix splits up to the answer's end), so that nothing is predicted."""
    docs = [Answer(str(i), [3, 4, 5], [6, 7]) for i in range(8)]
    fields = config(tmp_path, adapter={"block_size": 4, "prefix_splits": True}, split_share=1.0, weight_decay=0.1,
                    log_every=1, max_steps=5)  # fmt: skip
    trainer = Trainer(fields, tiny(), docs, docs[:1])
    before = [p.clone() for p in trainer.params]
    trainer._warm = 2
    trainer.train()
    assert trainer.zero_loss == 5 and trainer.step == 5
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.params, strict=True))
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["zero_loss"] for r in steps if r["event"] == "step"] == [1, 2, 3, 4, 5]
    assert all(r["loss"] == 0 for r in steps if r["event"] == "step")


def test_an_eos_that_is_also_padding_is_learned(tmp_path) -> None:
    """Tokens are told apart by where they stand, never by their id: the EOS has a label, the padding has none."""
    eos = 0  # what a packed row holds where nothing stands
    docs = [Answer(str(i), [3, 4, 5 + i], [6, 7, 8, eos]) for i in range(4)]
    trainer = Trainer(config(tmp_path, length=20, rows=1, anchors=20), tiny(), docs, docs[:1])
    pack, groups = draw(trainer)
    real = int((pack.segments >= 0).sum())
    assert real == 14 and (pack.tokens[0, real:] == eos).all()
    size = groups.labels.shape[2]
    live = groups.layout.group.view(1, -1, size)[..., 0] >= 0
    assert int((groups.labels == eos).sum()) == int(live.sum()) == 6  # three anchors before either EOS see it
    loss = trainer.slots(pack, groups).logp
    pack.tokens[0, real:] = 9
    assert torch.equal(trainer.slots(pack, groups).logp, loss)


def test_only_the_models_own_answers_are_learned() -> None:
    """In a later turn earlier answers are part of the prompt; each was a row of its own."""
    first, second = [10, 11, 12, 2], [20, 21, 22, 23, 2]
    rows = [Answer("a#1", [5, 6], first), Answer("a#2", [5, 6, *first, 7, 8], second)]
    pack = Packer(rows, 32, 1).batch(0)
    drawn = anchoring.choose(pack, 32, pack.random(0))
    groups = anchoring.groups(pack, drawn, 4, torch.ones_like(drawn, dtype=torch.bool))
    labels = groups.labels[groups.labels >= 0]
    per_row = {len(r): r for r in rows}
    for n in range(pack.segments.max() + 1):
        at = pack.segments[0] == n
        row = per_row[int(at.sum())]
        slots = at.nonzero()[:, 0].tolist()
        answered_slots = slots[len(row.prompt) :]
        chosen = [a for a in drawn[0].tolist() if a in slots]
        assert chosen == answered_slots[:-1]  # an anchor needs a token to follow
    assert set(labels.tolist()) == set(first) | set(second)
    assert not {5, 6, 7, 8} & set(labels.tolist())


def test_every_document_comes_once_an_epoch_whatever_the_rows() -> None:
    docs = [Answer(str(i), [i % V], [(i + j) % V for j in range(2 + i % 7)]) for i in range(40)]
    for rows in (1, 3, 7):
        packer, seen, row = Packer(docs, 24, rows), [], 0
        while packer.epoch(row) < 2:
            pack = packer.take(row, 1, 1)
            if packer.epoch(row) == 1:
                for n in range(int(pack.segments.max()) + 1):
                    seen.append(tuple(pack.tokens[0][pack.segments[0] == n].tolist()))
            row += 1
        assert sorted(seen) == sorted(tuple(d.prompt + d.answer) for d in docs)


def test_hold_out_takes_evenly_spaced_answers() -> None:
    docs = [Answer(str(i), [1], [2, 3]) for i in range(10)]
    kept, out = hold_out(docs, 3)
    assert [a.id for a in out] == ["0", "3", "6"] and len(kept) == 7
    kept, out = hold_out(docs[:3], 64)
    assert len(kept) == 1 and len(out) == 2
