"""Anchors, packing and the training mask, against what a few lines of loops say."""

from __future__ import annotations

import random

import pytest
import torch
from draws import sampled
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.adapters import MaskPathConfig, MaskPathModel
from selfspec.adapters.config import HEADS
from selfspec.attention import AttentionRule, backend, sdpa
from selfspec.backbone import MASK, Backbone
from selfspec.rows import RowLayout, attention_rule, chain, overlapped
from selfspec.training import anchors as anchoring
from selfspec.training.anchors import IGNORE
from selfspec.training.data import Answer, load_answers
from selfspec.training.head import Head
from selfspec.training.pack import Pack, Packer
from selfspec.training.readout import read
from selfspec.training.step import run_clean, run_draft

EOS = 7


def tiny(layers: int = 2, seed: int = 0, dtype=torch.float64) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=EOS,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def documents(n: int, seed: int = 0) -> list[Answer]:
    r = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [r.randrange(10, 61) for _ in range(r.randint(low, high))]

    return [Answer(str(i), ids(2, 6), [*ids(2, 14), EOS]) for i in range(n)]


@pytest.fixture
def pack() -> Pack:
    return Packer(documents(12), 40, 3, seed=1).batch(0)


def test_a_pack_holds_whole_documents() -> None:
    docs = documents(30)
    packer = Packer(docs, 48, 4)
    want = sorted(tuple(d.prompt + d.answer) for d in docs)
    got = []
    for plan in packer.in_order():
        pack = packer.pack(plan)
        for i in range(4):
            for segment in pack.segments[i].unique().tolist():
                at = pack.segments[i] == segment
                if segment >= 0:
                    got.append(tuple(pack.tokens[i][at].tolist()))
                    assert pack.positions[i][at].tolist() == list(range(int(at.sum())))
    assert sorted(got) == want


def test_batches_depend_on_their_index_alone() -> None:
    docs = documents(30)
    one, other = Packer(docs, 48, 2, seed=3), Packer(docs, 48, 2, seed=3)
    forward = [one.batch(i).tokens for i in range(12)]
    backward = [other.batch(i).tokens for i in reversed(range(12))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert not torch.equal(forward[0], Packer(docs, 48, 2, seed=4).batch(0).tokens)


def test_answers_are_read_from_json_lines_and_parquet(tmp_path) -> None:
    import gzip
    import json

    records = [{"id": str(i), "prompt_ids": [1, 2], "answer_ids": [3, i]} for i in range(3)]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in records)
    assert [a.answer for a in load_answers(tmp_path)] == [[3, 0], [3, 1], [3, 2]]
    assert len(load_answers(tmp_path, limit=2)) == 2
    (tmp_path / "b.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, record 1"):
        load_answers(tmp_path / "b.jsonl")
    with pytest.raises(FileNotFoundError):
        load_answers(tmp_path / "none.jsonl")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet")
    assert [a.prompt for a in load_answers(tmp_path / "c.parquet")] == [[1, 2]] * 3


def test_anchors_are_answer_positions_with_a_successor(pack: Pack) -> None:
    drawn = sampled(pack, 30, 0, 5)
    assert torch.equal(drawn, sampled(pack, 30, 0, 5))
    few = [sampled(pack, 8, 0, step) for step in (5, 6)]
    assert not torch.equal(*few)
    for i, row in enumerate(drawn.tolist()):
        real = [a for a in row if a >= 0]
        assert real == sorted(set(real)) and row[len(real) :] == [-1] * (30 - len(real))
        able = [s for s in range(39) if pack.answer[i, s] and pack.answer[i, s + 1]
                and pack.segments[i, s] == pack.segments[i, s + 1]]  # fmt: skip
        assert set(real) <= set(able) and len(real) == min(30, len(able))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_labels_and_inputs(pack: Pack, shift: bool, hidden: bool) -> None:
    if shift and hidden:
        return
    size = 5
    drawn = sampled(pack, 25, 0, 0)
    masks = torch.full_like(drawn, hidden, dtype=torch.bool)
    g = anchoring.groups(pack, drawn, size, masks, shift=shift)
    tokens = g.rows.tokens.view(3, 25, size)
    ends = 0
    for n in range(3):
        for a, slot in enumerate(drawn[n].tolist()):
            for j in range(size):
                at = slot + j + shift
                inside = slot >= 0 and at < 40 and pack.segments[n, at] == pack.segments[n, slot] and pack.answer[n, at]
                label = int(pack.tokens[n, at]) if inside else IGNORE
                if not shift and not hidden and j == 0:
                    label = IGNORE
                assert g.labels[n, a, j] == label
                ends += label == EOS
                known = j == 0 and not hidden and slot >= 0
                assert tokens[n, a, j] == (pack.tokens[n, slot] if known else MASK)
                if slot >= 0:
                    assert g.layout.positions.view(3, 25, size)[n, a, j] == pack.positions[n, slot] + j
    assert ends > 0  # an answer's EOS is something to predict


def test_split_groups_hold_their_first_tokens(pack: Pack) -> None:
    drawn = sampled(pack, 10, 0, 0)
    splits = torch.randint(0, 4, drawn.shape)
    g = anchoring.groups(pack, drawn, 5, splits=splits)
    plain = anchoring.groups(pack, drawn, 5)
    for n in range(3):
        for a in range(10):
            s = int(splits[n, a])
            assert (g.labels[n, a, : s + 1] == IGNORE).all()
            assert torch.equal(g.labels[n, a, s + 1 :], plain.labels[n, a, s + 1 :])
            given = g.rows.tokens.view(3, 10, 5)[n, a, 1 : s + 1]
            want = torch.where(plain.labels[n, a, 1 : s + 1] == IGNORE, MASK, plain.labels[n, a, 1 : s + 1])
            assert torch.equal(given, want)


def test_the_training_mask_is_the_rule_spelt_out(pack: Pack) -> None:
    size = 6  # anchors stand closer to one another than that
    drawn = sampled(pack, 12, 0, 0)
    g = anchoring.groups(pack, drawn, size)
    mask = attention_rule(g.layout, 40 + 12 * size)
    for n in range(3):
        for r in range(12 * size):
            a = int(drawn[n, r // size])
            for k in range(40 + 12 * size):
                if a < 0:
                    want = k == 40 + r
                elif k < 40:
                    want = bool(pack.segments[n, k] == pack.segments[n, a]) and k < a
                else:
                    want = (k - 40) // size == r // size
                assert bool(mask[n, r, k]) == want


def layouts() -> list[tuple[RowLayout, int]]:
    docs = Packer(documents(40), 150, 2, seed=2).batch(0)
    drawn = sampled(docs, 30, 0, 1)
    clean = RowLayout(docs.positions, torch.zeros(2, dtype=torch.long), 150, segments=docs.segments)
    plain = chain(torch.tensor([3, 9]), 5)
    return [
        (anchoring.groups(docs, drawn, 7).layout, 150 + 210),
        (anchoring.groups(docs, drawn, 7, causal=True).layout, 150 + 210),
        (clean, 150),
        (plain, 20),
        (overlapped(plain, torch.tensor([[0, 2, -1], [1, 3, 4]]), 4), 9 + 17),
    ]


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("window", [None, 6])
def test_flex_equals_the_reference(case: int, window: int | None) -> None:
    layout, k = layouts()[case]
    torch.manual_seed(0)
    q = torch.randn(2, 4, layout.n_rows, 16)
    key, value = torch.randn(2, 2, k, 16), torch.randn(2, 2, k, 16)
    rule = AttentionRule(layout, k)
    real = attention_rule(layout, k, window).any(-1)[:, None, :, None]  # rows of empty slots may see nothing
    blocks = rule.blocks(window)
    for sinks, cap in ((None, None), (torch.randn(4), 5.0)):
        ours = backend("flex").attention(q, key, value, rule, window, 0.3, cap, sinks)
        want = sdpa.attention(q, key, value, rule, window, 0.3, cap, sinks)
        torch.testing.assert_close(torch.where(real, ours, 0), torch.where(real, want, 0), atol=2e-5, rtol=1e-4)
    shape = -(-layout.n_rows // 128), -(-k // 128)
    assert blocks.to_dense().shape[-2:] == shape


@pytest.mark.parametrize("layout", ["known", "hidden"])
def test_no_leak_from_what_comes_after(layout: str) -> None:
    """Other tokens after the anchor (bonus hidden: at and after slot 0) change no draft row."""
    model = tiny()
    path = MaskPathModel(model, MaskPathConfig(block_size=5, mask_embedding="per_slot", layouts=(layout,), taps=(1, 2)))
    torch.nn.init.normal_(path.feature.weight, std=0.1)
    backbone = Backbone(model, path)
    docs = documents(6, seed=4)
    packer = Packer(docs, 60, 2)
    pack = packer.batch(0)
    able = anchoring.eligible(pack)
    n = 0
    for row in range(2):
        for slot in able[row].nonzero()[:, 0].tolist()[::5]:
            drawn = torch.full((2, 3), -1)
            drawn[row, :2] = torch.tensor([slot, slot + 1 if able[row, slot + 1] else slot])
            hidden = torch.full_like(drawn, layout == "hidden", dtype=torch.bool)
            outs = []
            for change in (0, 1):
                tokens = pack.tokens.clone()
                later = torch.arange(60) > slot - (layout == "hidden")
                other = pack.segments[row] != pack.segments[row, slot]  # nor does another document
                tokens[row, later | other] = (tokens[row, later | other] + change * 13) % 61
                changed = Pack(tokens, pack.positions, pack.segments, pack.answer)
                cache, _, taps = run_clean(backbone, changed)
                groups = anchoring.groups(changed, drawn, 5, hidden)
                outs.append(run_draft(backbone, groups, cache, taps)[row, 0])
            torch.testing.assert_close(outs[0], outs[1], atol=0, rtol=0)
            n += 1
    assert n > 3


@pytest.mark.parametrize("other", ["markov", "sampler"])  # a path has one of them
def test_no_leak_where_all_layouts_and_heads_run_together(other) -> None:
    """Known, hidden and split groups in one forward: tokens after what a group was given change nothing it says."""
    model, heads = tiny(), tuple(h for h in HEADS if h != other)
    path = MaskPathModel(
        model,
        MaskPathConfig(
            block_size=6, layouts=("known", "hidden"), prefix_splits=True, taps=(1,), heads=heads, head_rank=8
        ),
    )
    with torch.no_grad():
        for parameter in path.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    backbone = Backbone(model, path)
    packer = Packer(documents(6, seed=4), 60, 2)
    pack = packer.batch(0)
    drawn = sampled(pack, 12, 0, 1)
    hidden = torch.arange(12).expand(2, 12) % 3 == 0
    splits = torch.where(torch.arange(12) % 3 == 1, torch.arange(12) % 4 + 1, 0).expand(2, 12)
    kinds = set()

    def outputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        changed = Pack(tokens, pack.positions, pack.segments, pack.answer)
        groups = anchoring.path_groups(path.config, changed, drawn, 6, hidden, splits)
        slots = read(backbone, Head(backbone), changed, groups)
        rows = slots.rows
        out = {"hidden": rows.hidden, "confidence": rows.predicted("confidence", False)}
        return {k: v.unflatten(0, (2, 12)) for k, v in (out | {"length": rows.predicted("length", False)}).items()}

    with torch.no_grad():
        before = outputs(pack.tokens)
        for n in range(2):
            for a in range(0, 12):
                slot, s = int(drawn[n, a]), int(splits[n, a])
                if slot < 0:
                    continue
                given = slot - 1 if hidden[n, a] else slot + s  # last token that the group was given
                document = pack.segments[n] == pack.segments[n, slot]
                given = min(given, int(document.nonzero()[-1]))
                own = document & (torch.arange(60) <= given)
                tokens = pack.tokens.clone()
                tokens[n, ~own] = (tokens[n, ~own] + 13) % 61
                after = outputs(tokens)
                for name in before:
                    torch.testing.assert_close(after[name][n, a], before[name][n, a], atol=0, rtol=0)
                tokens = pack.tokens.clone()
                tokens[n, given] = (tokens[n, given] + 13) % 61  # and what it was given, it reads
                assert not torch.equal(outputs(tokens)["hidden"][n, a], before["hidden"][n, a])
                kinds.add((bool(hidden[n, a]), s > 0))
    assert kinds == {(False, False), (True, False), (False, True)}
