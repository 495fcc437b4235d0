"""The trainer: what it learns, what it leaves alone, what it keeps, and that its tau is the decoder's."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import tiny_chat
import torch
from draws import draw
from tiny import run
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.adapters import io
from selfspec.backbone import Backbone
from selfspec.plan import Plan
from selfspec.session import Request, Session
from selfspec.stats import mean_tau, total
from selfspec.training import schedule
from selfspec.training.command import ending
from selfspec.training.config import TrainConfig
from selfspec.training.data import Answer
from selfspec.training.evaluate import Batching, evaluate
from selfspec.training.head import Head
from selfspec.training.step import compile_layers
from selfspec.training.trainer import Trainer

torch.set_num_threads(1)
V = 61


def tiny(dtype=torch.float32, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def answered(model: LlamaForCausalLM, n: int, longest: int = 30) -> list[Answer]:
    """Greedy answers that end with their third-last distinct token as EOS, so that the cap plays no part."""
    draws = [torch.Generator().manual_seed(i) for i in range(n)]
    prompts = [torch.randint(V, (3 + i % 5,), generator=g).tolist() for i, g in enumerate(draws)]
    requests = [Request(p, longest) for p in prompts]
    run(Session(Backbone(model), Plan("ar"), n, 128), requests)
    ends = [1 + max(r.output.index(t) for t in set(r.output)) for r in requests]
    return [Answer(str(i), r.prompt, r.output[:end]) for i, (r, end) in enumerate(zip(requests, ends))]


def config(out, **fields) -> TrainConfig:
    base = dict(
        out=str(out), adapter={"block_size": 4, "mask_embedding": "per_slot"}, length=48, rows=2, anchors=8,
        max_steps=8, log_every=2, lr=3e-3, valid_docs=2, eval_every=0, save_every=0, dtype="float32",
        fit=0.0, tensorboard=False,
    )  # fmt: skip
    return TrainConfig.from_dict(base | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"mask_embedding": "per_slot", "layouts": ("known", "hidden")},
        {"style": "uno", "rank": 8, "alpha": 16},
        {"shift": True},
        {"causal": True},
        {"entry": 1, "taps": (1,), "tuning": "lora", "rank": 4},
        {"mask_embedding": "per_slot", "layouts": ("known", "hidden"), "heads": ("calibrator", "markov")},
        {"layouts": ("known", "hidden"), "heads": ("calibrator", "sampler")},
    ],
)
def test_teacher_forced_tau_is_the_decoders(fields: dict, tmp_path) -> None:
    model = tiny(torch.float64, layers=3)
    block = 5
    answers = [a for a in answered(model, 12) if len(a.answer) >= 2]
    shapes = {"length": 64, "rows": 3, "anchors": 12, "max_steps": 80, "lr": 1e-2, "log_every": 1000}
    terms = ("markov" if head == "sampler" else head for head in fields.get("heads", ()))
    shapes["objectives"] = {"ce": 1.0, "dpace": 0.3} | dict.fromkeys(terms, 1.0)
    trainer = Trainer(config(tmp_path, adapter={"block_size": block, **fields}, **shapes), model, answers, answers[:1])
    for _ in range(80):  # half learned: rounds of every length
        trainer.train_step()
    backbone = Backbone(model, trainer.path.requires_grad_(False))
    layouts = fields.get("layouts", ("known",))
    got = evaluate(backbone, Head(backbone), answers, Batching(64, 3, 7), layouts)
    for layout, mode in (("known", "sequential"), ("hidden", "overlap")):
        if layout not in layouts:
            continue
        # an answer ends at the first token that only its end has
        requests = [Request(a.prompt, 100, frozenset(a.answer[-1:]) - frozenset(a.answer[:-1])) for a in answers]
        run(Session(backbone, Plan(mode, block), len(answers), 128), requests)
        assert [r.output for r in requests] == [a.answer for a in answers]
        stats = [r.stats for r in requests]
        whole = total(stats)
        assert got[layout]["rounds"] == whole.rounds and got[layout]["tokens"] == whole.tokens
        assert 1.1 < whole.tau < block - 0.3 and len(whole.accepted) >= 3
        assert got[layout]["tau"] == whole.tau and got[layout]["mean_tau"] == pytest.approx(mean_tau(stats))


def test_a_path_without_heads_starts_one_with_heads(tmp_path) -> None:
    model, answers = tiny(), answered(tiny(), 8)
    plain = Trainer(config(tmp_path / "plain", max_steps=3, objectives={"ce": 1.0}), model, answers)
    plain.train()
    adapter = {"block_size": 4, "mask_embedding": "per_slot"}
    fields = dict(init=str(tmp_path / "plain" / "adapter"), objectives={"ce": 1.0, "markov": 1.0})
    headed = Trainer(config(tmp_path / "b", adapter={**adapter, "heads": ["markov"]}, **fields), model, answers)
    saved, own = io.load(fields["init"], model, dtype=torch.float32).state_dict(), headed.path.state_dict()
    assert set(own) - set(saved) == {"heads.markov.down.weight", "heads.markov.up.weight"}
    assert all(torch.equal(v, own[k]) for k, v in saved.items())
    assert not own["heads.markov.up.weight"].any() and own["heads.markov.down.weight"].any()
    headed.train_step()
    assert headed.path.heads["markov"].up.weight.any()
    narrow = config(tmp_path / "c", adapter={"block_size": 4, "mask_embedding": "one"}, init=fields["init"])
    with pytest.raises(ValueError, match=r"init=.*other shapes \['mask'\]"):
        Trainer(narrow, model, answers)


@pytest.mark.parametrize("tuning, form", [("copy", "markov"), ("lora", "sampler")])
def test_heads_alone_leave_the_path_as_it_was(tuning: str, form: str, tmp_path) -> None:
    """To the bit, decay and averages notwithstanding; and no gradient goes below them."""
    model, answers = tiny(), answered(tiny(), 8)
    adapter = {
        "block_size": 4,
        "mask_embedding": "per_slot",
        "layouts": ["known", "hidden"],
        "tuning": tuning,
        "rank": 4,
    }
    Trainer(config(tmp_path / "plain", adapter=adapter, max_steps=3), model, answers).train()
    heads = {"heads": ["calibrator", "confidence", "length", form]}
    terms = {n: {"weight": 1.0, "detach": True} for n in ("calibrator", "confidence", "length", "markov")}
    fields = dict(init=str(tmp_path / "plain" / "adapter"), objectives=terms, weight_decay=0.5, max_steps=6, ema=0.5)
    trainer = Trainer(config(tmp_path / "heads", adapter=adapter | heads, **fields), model, answers)
    start = {k: v.clone() for k, v in trainer.path.state_dict().items()}
    slots = trainer.slots(*draw(trainer))
    assert not slots.rows.hidden.requires_grad and not slots.logp.requires_grad
    assert slots.read.corrected("markov", True).requires_grad
    trainer.train()
    for name, value in trainer.path.state_dict().items():
        assert torch.equal(value, start[name]) != name.startswith("heads."), name
    kept, plain = (tmp_path / run / "adapter" for run in ("heads", "plain"))
    for file in plain.glob("*.safetensors"):  # so the head can be added to the adapter that it was trained for
        assert (kept / file.name).read_bytes() == file.read_bytes()


def test_what_no_objective_reaches_stays_as_it_was(tmp_path) -> None:
    """A parameter without a gradient knows neither decay nor drift of its average."""
    fields = dict(weight_decay=0.5, objectives={"ce": 1.0, "markov": {"weight": 1e-9, "detach": True}})
    adapter = {"block_size": 4, "heads": ["markov"]}
    trainer = Trainer(config(tmp_path, adapter=adapter, **fields), tiny(), answered(tiny(), 8))
    head, mix = list(trainer.path.heads.parameters()), trainer.mix
    trainer.mix = dataclasses.replace(mix, terms=mix.terms[:1])
    trainer.batches.mix = trainer.mix
    start = [p.detach().clone() for p in head]
    for _ in range(3):
        trainer.train_step()
    means = [m for p, m in zip(trainer.params, trainer.ema, strict=True) if any(p is h for h in head)]
    for now, mean, before in zip(head, means, start, strict=True):
        assert now.grad is None and torch.equal(now, before) and torch.equal(mean, before)


def test_one_sample_is_learned_by_heart(tmp_path) -> None:
    model = tiny()
    answer = max(answered(model, 20), key=lambda a: len(a.answer))
    fields = config(tmp_path, max_steps=250, lr=1e-2, anchors=24, rows=1, log_every=1000, ema=0.9, warmup=0.1)
    trainer = Trainer(fields, model, [answer], [answer])
    before = trainer.evaluate([answer])["known"]["tau"]
    report = trainer.train()
    after = report["valid"]["known"]
    assert after["acceptance"] == [1.0, 1.0, 1.0] and after["tau"] > max(3.0, before)
    assert io.load(tmp_path / "adapter", model).config.acceptance == (1.0, 1.0, 1.0)  # a planner begins there


def test_the_base_is_left_alone_and_the_loss_falls(tmp_path) -> None:
    model = tiny()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = Trainer(config(tmp_path, max_steps=40), model, answered(model, 12))
    start = {k: v.clone() for k, v in trainer.path.state_dict().items()}
    first = float(trainer.train_step()["loss"])
    for _ in range(39):
        last = float(trainer.train_step()["loss"])
    assert last < 0.8 * first
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert all(not torch.equal(v, start[k]) for k, v in trainer.path.state_dict().items())  # every part learns


def test_clean_rows_have_no_gradient(tmp_path) -> None:
    model = tiny()
    trainer = Trainer(config(tmp_path), model, answered(model, 12))
    pack, groups = draw(trainer)
    slots = trainer.slots(pack, groups)
    assert slots.logp.requires_grad
    from selfspec.training.step import run_clean

    cache, hidden, _ = run_clean(trainer.backbone, pack)
    assert not hidden.requires_grad and not any(t.requires_grad for c in cache.layers for t in (c.keys, c.values))


def test_two_micro_batches_are_one_large_batch(tmp_path) -> None:
    """Divisors are taken over the whole step, not per micro-batch."""
    answers = answered(tiny(), 16)
    grads = []
    for rows, accumulate in ((4, 1), (2, 2)):
        trainer = Trainer(config(tmp_path, rows=rows, accumulate=accumulate, anchors=40, length=40), tiny(), answers)
        seen = []
        trainer.optimizer.step = lambda seen=seen, t=trainer: seen.extend(p.grad.clone() for p in t.params)
        trainer.train_step()  # 40 anchors take every position, whatever the draw
        grads.append(seen)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_an_interrupted_run_ends_like_an_unbroken_one(tmp_path) -> None:
    answers = answered(tiny(), 12)
    objectives = {"ce": 1.0, "dpace": 0.5, "kl": 0.1}
    fields = dict(adapter={"block_size": 4, "layouts": ["known", "hidden"], "prefix_splits": True},
                  objectives=objectives)  # fmt: skip
    whole = Trainer(config(tmp_path / "a", **fields), tiny(), answers)
    whole.train()
    cut = Trainer(config(tmp_path / "b", **fields), tiny(), answers)
    for _ in range(5):  # past an epoch's end
        cut.train_step()
    cut.stop = True
    assert cut.train()["finished"] is False
    rest = Trainer(config(tmp_path / "b", resume=True, **fields), tiny(), answers)
    assert rest.step == 5
    assert rest.train()["finished"]
    for a, b in zip(whole.params, rest.params, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(whole.ema, rest.ema, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="another adapter configuration"):
        Trainer(config(tmp_path / "b", resume=True), tiny(), answers)


def test_the_schedule_follows_the_clock(tmp_path) -> None:
    trainer = Trainer(config(tmp_path, max_steps=0, minutes=10.0, warmup=0.1), tiny(), answered(tiny(), 12))
    rates = []
    for minute in range(11):
        trainer.elapsed = 60.0 * minute
        rates.append(schedule.rate(trainer.config, trainer.progress))
    assert rates[1] == 1 and rates[0] > 0 and rates[10] == pytest.approx(0.02)
    assert all(a > b for a, b in itertools.pairwise(rates[1:]))


def test_compiled_layers_share_one_graph(tmp_path) -> None:
    from torch._dynamo.testing import CompileCounter

    answers = answered(tiny(), 12)
    plain = Trainer(config(tmp_path), tiny(layers=4), answers)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = Trainer(config(tmp_path), tiny(layers=4), answers)
    compile_layers(compiled.backbone, backend=counter)
    for _ in range(3):
        want, got = plain.train_step()["loss"], compiled.train_step()["loss"]
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 2  # clean rows, draft rows


def test_command_line(tmp_path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    with open(tmp_path / "answers.jsonl", "w") as f:
        for a in answered(model, 12):
            f.write(json.dumps({"id": a.id, "prompt_ids": a.prompt, "answer_ids": a.answer}) + "\n")
    args = [f"model={tmp_path / 'model'}", f"data={tmp_path / 'answers.jsonl'}", f"out={tmp_path / 'out'}",
            f"eval.train={tmp_path / 'answers.jsonl'}", "adapter.block_size=4", "length=48", "rows=2", "anchors=8",
            "max_steps=3", "log_every=1", "dtype=float32", "fit=0.1"]  # fmt: skip
    ran = tiny_chat.run("train", *args)
    assert ran.exit_code == 0
    use = f"--model {tmp_path / 'model'} --adapter {tmp_path / 'out' / 'adapter'}"  # it ended without naming either
    assert f"trained 3 steps; the run is in {tmp_path / 'out'}" in ran.stderr and "tau: validation " in ran.stderr
    assert use in ran.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["finished"] and report["eval"]["train"]["known"]["responses"] == 12
    assert report["config"]["adapter"] == {"mask_embedding": "per_slot", "block_size": 4}
    assert any((tmp_path / "out" / "adapter").iterdir())
    log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert {json.loads(line)["event"] for line in log} >= {"start", "step", "eval"}
    (tmp_path / "rate.json").write_text('{"lrr": 1}')
    for wrong, words in (
        ([*args, "lrr=1"], "unknown fields: lrr"),
        ([*args, "--config", tmp_path / "rate.json"], "unknown fields: lrr"),
        ([*args, "rows=many"], "rows='many'"),
        (["model=x"], "name a model and data"),
        ([*args, "--lr", "1"], "No such option"),
    ):
        result = tiny_chat.run("train", *wrong)
        assert result.exit_code == 2 and words in result.stderr


def test_a_training_that_was_stopped_says_how_it_goes_on() -> None:
    said = ending({"finished": False, "step": 3, "progress": 0.42}, "some-model", Path("run"))
    assert "stopped at 42% of the schedule; the run is in run, and the same command with --resume" in said
    assert "--model some-model --adapter run/adapter" in said


def test_configuration_round_trip(tmp_path) -> None:
    first = TrainConfig.load(None, ["lr=1e-3", 'adapter.layouts=["known","hidden"]', "objectives.kl.top_k=8"])
    assert first.path.layouts == ("known", "hidden") and first.objectives["kl"] == {"top_k": 8}
    (tmp_path / "c.json").write_text(json.dumps(first.to_dict()))
    assert TrainConfig.load(tmp_path / "c.json") == first
