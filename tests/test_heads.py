"""Heads: what they compute against plain loops, that they start neutral and are kept in the adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import LAYERS, PROMPT, model_of, path_of
from torch.nn.functional import silu

from selfspec import adapters, rows
from selfspec.adapters import MaskPathConfig, MaskPathModel, heads, io
from selfspec.backbone import Backbone
from selfspec.cache import PrefixCache
from selfspec.draft import condition
from selfspec.draft.block import draft_inputs
from selfspec.draft.condition import Given
from selfspec.draft.trees import domino

OTHERS = ("calibrator", "confidence", "length")
ALL = (*OTHERS, "markov")
T = 4  # drafts


def drafted(path: MaskPathModel) -> tuple[Backbone, torch.Tensor]:
    """Hidden states of the drafts behind the prompt. [1, T, d]"""
    body, cache = Backbone(model_of(), path), PrefixCache(LAYERS)
    with torch.no_grad():
        body(rows.chain(torch.tensor([0]), len(PROMPT)), cache, torch.tensor([PROMPT]))
        cache.freeze()
        inputs = draft_inputs(torch.tensor([PROMPT[-1]]), 1, T + 1, 1, torch.device("cpu"))
        return body, body(rows.block(torch.tensor([len(PROMPT)]), T + 1), cache, draft=inputs).draft[:, 1:]


@pytest.fixture(params=["markov", "sampler"])
def path(request) -> MaskPathModel:
    return path_of(model_of(), 0.3, heads=(*OTHERS, request.param), head_rank=6)


@pytest.mark.parametrize("form", ["markov", "sampler"])
def test_new_heads_change_nothing(form: str) -> None:
    own = dict(block_size=T + 1, layouts=("known", "hidden"), heads=(*OTHERS, form))
    path = MaskPathModel(model_of(), MaskPathConfig(**own))
    body, hidden = drafted(path)
    anchor = torch.tensor([PROMPT[-1]])
    plain = body.logits(hidden)
    tokens, logits = heads.walk(path.heads, body, hidden, anchor)
    torch.testing.assert_close(logits, plain)
    assert torch.equal(tokens, plain.argmax(-1))
    assert torch.equal(heads.calibrated(path.heads, body, hidden, anchor), hidden)
    assert torch.equal(heads.confidence(path.heads, hidden), torch.full((1, T), 0.5))
    torch.testing.assert_close(heads.lengths(path.heads, hidden), torch.full((1, T + 1), 1 / (T + 1)))


def test_a_walk_conditions_each_draft_on_the_one_before(path: MaskPathModel) -> None:
    body, hidden = drafted(path)
    table, norm = model_of().get_input_embeddings().weight, model_of().lm_head.weight
    head = heads.conditioner(path.heads)
    up, down = head.up.weight, head.down.weight
    token, want = PROMPT[-1], []
    for k in range(T):
        h, e = hidden[0, k], table[token]
        inner = down @ e if "markov" in path.heads else silu(down @ torch.cat([e, h]))
        scores = norm @ (h + up @ inner)
        scores[3] = float("-inf")
        token = int(scores.argmax())
        want.append(token)
    tokens, logits = heads.walk(path.heads, body, hidden, torch.tensor([PROMPT[-1]]), banned=3)
    assert tokens[0].tolist() == want and not torch.equal(tokens, body.logits(hidden).argmax(-1))
    assert (logits[..., 3] == float("-inf")).all() and torch.equal(logits.argmax(-1), tokens)
    second, _ = heads.walk(path.heads, body, hidden, torch.tensor([5]), lambda scores, k: scores.topk(2).indices[:, 1])
    assert second.shape == (1, T) and not torch.equal(second, tokens)


def linked(body: Backbone, hidden: torch.Tensor, candidates: torch.Tensor, anchor: int) -> torch.Tensor:
    """Transitions between candidates, not ranked. [1, T, K, K]"""
    given = Given(body.path.condition(body), hidden, torch.tensor([anchor]))
    top, order = condition.transitions(given, candidates)
    assert torch.equal(top, top.sort(-1, descending=True).values)
    return torch.empty_like(top).scatter(-1, order, top)


@pytest.mark.parametrize("rows", [1, 6, 1024])
def test_transitions_are_what_the_walk_would_see(path: MaskPathModel, rows: int, monkeypatch) -> None:
    monkeypatch.setattr(condition, "ROWS", rows)
    body, hidden = drafted(path)
    candidates = torch.randint(24, (1, T, 3))
    candidates[0, 2, 1] = -1  # there are fewer
    got = linked(body, hidden, candidates, 7)
    assert got.shape == (1, T, 3, 3)
    for t in range(T):
        for i in range(3):
            before = 7 if t == 0 else int(candidates[0, t - 1, i])
            log_q = heads.conditioned(path.heads, body, hidden[0, t], torch.tensor(before)).float().log_softmax(-1)
            want = torch.where(candidates[0, t] < 0, -torch.inf, log_q[candidates[0, t]])
            torch.testing.assert_close(got[0, t, i], want)


def test_no_token_before_leaves_a_slot_as_it_is(path: MaskPathModel) -> None:
    body, hidden = drafted(path)
    got = heads.conditioned(path.heads, body, hidden, torch.tensor([[3, -1, 5, -1]]))
    plain = body.logits(hidden)
    assert torch.equal(got[:, [1, 3]], plain[:, [1, 3]]) and not torch.equal(got[:, [0, 2]], plain[:, [0, 2]])


def test_trees_are_conditioned_by_the_head(path: MaskPathModel) -> None:
    """A tree of one node a level is the walk; over all candidates, transitions and biases give the same tree."""
    body, hidden = drafted(path)
    anchor, logits = torch.tensor([PROMPT[-1]]), body.logits(hidden)
    tokens, _ = heads.walk(path.heads, body, hidden, anchor)
    tree = domino.DominoTree(heads.biases(path.heads, body, hidden), 20)(anchor, logits, 20)
    by_parent = {(int(p), int(t)) for p, t in zip(tree.parents[0], tree.tokens[0])}
    assert (0, int(tokens[0, 0])) in by_parent
    everything = torch.arange(24).expand(1, T, 24)
    table = linked(body, hidden, everything, int(anchor))
    again = domino.over_candidates(anchor, everything, table, 20)
    assert torch.equal(again.tokens, tree.tokens) and torch.equal(again.parents, tree.parents)
    marginal = domino.DominoTree(lambda tokens, d: torch.zeros(1, tokens.shape[1], 24), 20)(anchor, logits, 20)
    assert not torch.equal(marginal.tokens, tree.tokens)


def test_a_sampler_head_reads_the_state_of_its_slot(path: MaskPathModel) -> None:
    """What one token adds is the same at every slot for a Markov head, and another at each for a sampler."""
    body, hidden = drafted(path)
    moved = heads.conditioned(path.heads, body, hidden, torch.full((1, T), 5)) - body.logits(hidden)
    same = torch.allclose(moved, moved[:, :1].expand_as(moved), atol=1e-9)
    assert same == ("markov" in path.heads)


def test_the_other_heads_are_their_formulas(path: MaskPathModel) -> None:
    body, hidden = drafted(path)
    bonus = 11
    table, h = model_of().get_input_embeddings().weight, hidden[0]
    c, d, n = (path.heads[name] for name in ("calibrator", "confidence", "length"))
    for k in range(T):
        want = h[k] + c.up.weight @ silu(c.down.weight @ torch.cat([table[bonus], h[k]]))
        torch.testing.assert_close(heads.calibrated(path.heads, body, hidden, torch.tensor([bonus]))[0, k], want)
        want = torch.sigmoid(d.up.weight[0] @ silu(d.down.weight @ h[k]) + d.bias[k + 1])
        torch.testing.assert_close(heads.confidence(path.heads, hidden)[0, k], want.float())
    for t in (T, 2):  # a block that is shorter than the trained one
        pooled = torch.stack([silu(n.down.weight @ h[k]) for k in range(t)]).mean(0)
        full = (n.up.weight @ pooled + n.bias).softmax(-1)
        want = torch.cat([full[:t], full[t:].sum()[None]]).float()
        torch.testing.assert_close(heads.lengths(path.heads, hidden[:, :t])[0], want)


def test_heads_run_in_the_rows_precision(path: MaskPathModel) -> None:
    _, hidden = drafted(path)
    low = hidden.bfloat16()
    assert heads.conditioner(path.heads)(low, low).dtype == path.heads["calibrator"](low, low).dtype == torch.bfloat16
    assert path.heads["length"](low).dtype == torch.bfloat16


@pytest.mark.parametrize("tuning", ["lora", "copy"])
def test_heads_are_kept_in_the_adapter(tuning: str, tmp_path) -> None:
    path = path_of(model_of(), 0.3, heads=ALL, head_rank=6, tuning=tuning)
    io.save(path, tmp_path, model_of(), dtype=torch.float64)
    again = io.load(tmp_path, model_of())
    assert again.config == path.config and set(again.heads) == set(ALL)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in path.state_dict().items())


def test_adapters_from_before_heads_load_as_they_were() -> None:
    """The shipped configuration knows neither heads nor noise."""
    files = sorted((Path(adapters.__file__).parent / "zoo").glob("*/selfspec.json"))
    assert files
    for file in files:
        data = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("format", "heads", "noise")}
        data = {k: v for k, v in data.items() if k not in ("seed_row", "head_rank")}
        config = MaskPathConfig.from_dict(data)
        assert config.heads == () and config.noise == "mask" and not config.seed_row and config.rows(16) == 16


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(heads=("markow",)), "heads=.*subset"),
        (dict(heads=("calibrator",)), "hidden"),
        (dict(heads=("markov", "sampler")), "heads=.*one of .*'markov', 'sampler'"),
        (dict(head_rank=0), "head_rank"),
        (dict(noise="gaussian"), "noise="),
        (dict(noise="uniform", layouts=("known", "hidden")), "noise="),
        (dict(noise="masked", shift=True), "noise="),
        (dict(prefix_splits=True, block_size=2), "block_size"),
        (dict(seed_row=True), "seed_row"),
        (dict(seed_row=True, shift=True, prefix_splits=True), "seed_row"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskPathConfig(**fields)
    with pytest.raises(ValueError, match="style='dos'"):
        MaskPathConfig.from_dict({"style": "dos"})
