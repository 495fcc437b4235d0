"""Self-answering: the answers are the model's own, none is lost and none is given twice."""

import gzip
import json
from collections import Counter

import pytest
import tiny_chat
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from selfspec.backbone import Backbone
from selfspec.prompts import Prompt, PromptError, read, read_rows, user
from selfspec.training import generate
from selfspec.training.answer import AnswerOptions, answer
from selfspec.training.data import load_answers
from selfspec.training.generate import Batch, Job, choose, uniform
from selfspec.training.shards import shard_files

VOCAB, EOS = 64, 3
CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{i}_": i for i in range(VOCAB - 3)}
    words |= {"[user]": VOCAB - 3, "[assistant]": VOCAB - 2, "[system]": VOCAB - 1}
    core = Tokenizer(models.WordLevel(words, unk_token="w0_"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT, unk_token="w0_", eos_token=f"w{EOS}_")


def own(model, prompt, cap):
    ids = torch.tensor([prompt])
    kwargs = dict(attention_mask=torch.ones_like(ids), eos_token_id=EOS, pad_token_id=0)
    out = model.generate(ids, max_new_tokens=cap, do_sample=False, **kwargs)
    return out[0, len(prompt) :].tolist()


def prompts_of(n, seed=0, longest=20):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (n,), generator=rng).tolist()
    return [torch.randint(4, VOCAB - 3, (k,), generator=rng).tolist() for k in lengths]


def text(ids):
    return " ".join(f"w{i}_" for i in ids)


def talk(n, **kwargs):
    prompts = prompts_of(n, **kwargs)
    return [Prompt(f"p{i}", (user(text(p)),)) for i, p in enumerate(prompts)]


def run(model, jobs, slots, cap, **kwargs):
    batch = Batch(Backbone(model), {EOS}, slots, max(len(j.prompt) + cap for j in jobs), cap, **kwargs)
    return [d for done in batch.run(jobs) for d in done]


@pytest.mark.parametrize("slots", [1, 3, 16, 64])
def test_answers_are_those_of_generate(model, slots):
    jobs = [Job(str(i), p, 1 + 7 * (i % 5)) for i, p in enumerate(prompts_of(20))]
    jobs[3] = Job("3", (prompts_of(1, longest=100)[0] * 9)[:200], 29)
    jobs.sort(key=lambda j: -len(j.prompt))
    done = run(model, jobs, slots, 29)
    assert sorted(d.job.id for d in done) == sorted(j.id for j in jobs)
    for d in done:
        assert d.tokens == own(model, d.job.prompt, d.job.max_new_tokens)
        assert d.finish_reason == ("stop" if d.tokens[-1] == EOS else "length")
    assert {d.finish_reason for d in done} == {"stop", "length"}  # the case covers both


def test_smaller_graphs_take_over_at_the_end(model, monkeypatch):
    monkeypatch.setattr(generate, "FEWEST", 1)
    monkeypatch.setattr(generate, "SYNC", 3)
    sizes = []
    step = Batch._step
    monkeypatch.setattr(Batch, "_step", lambda self, n, k: (sizes.append((n, k)), step(self, n, k)))
    jobs = [Job(str(i), p, 3 + 9 * i) for i, p in enumerate(prompts_of(8))]
    for d in run(model, jobs, 8, 70):
        assert d.tokens == own(model, d.job.prompt, d.job.max_new_tokens)
    assert len({n for n, _ in sizes}) > 2
    assert all(k % generate.KEYS == 0 for _, k in sizes)


def test_draws_depend_on_the_seed_alone(model):
    jobs = [Job(str(i), p, 12, 0.8 * (i % 3), 1000 + i) for i, p in enumerate(prompts_of(9))]
    alone = {d.job.id: d.tokens for d in run(model, jobs, 1, 12, sample=True)}
    together = {d.job.id: d.tokens for d in run(model, jobs[::-1], 9, 12, sample=True)}
    assert alone == together
    assert all(alone[j.id] == own(model, j.prompt, 12) for j in jobs if not j.temperature)
    assert any(alone[j.id] != own(model, j.prompt, 12) for j in jobs if j.temperature)


def test_draws_follow_the_softmax():
    n, t = 20000, 0.7
    logits = torch.tensor([1.0, -1.0, 0.5, float("-inf"), 2.0])
    count = torch.arange(n)
    got = choose(logits.expand(n, 5), torch.full((n,), t), torch.full((n,), 7), count)
    share = torch.bincount(got, minlength=5) / n
    assert torch.allclose(share, (logits / t).softmax(-1), atol=0.015)
    assert share[3] == 0
    u = uniform(torch.arange(n), torch.zeros(n, dtype=torch.long))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_rows_and_manifest(model, tokenizer, tmp_path, format):
    if format == "parquet":
        pytest.importorskip("pyarrow")
    options = AnswerOptions(12, batch=4, format=format, shard_rows=5)
    manifest = answer(model, tokenizer, talk(13), tmp_path, options, quiet=True)
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    rows = [r for f in shard_files(tmp_path) for r in read_rows(f)]
    assert [s["rows"] for s in manifest["shards"]] == [5, 5, 3]
    assert manifest["complete"] and manifest["counts"]["answers"] == 13
    assert manifest["counts"]["stop"] + manifest["counts"]["length"] == 13
    assert manifest["counts"]["answer_tokens"] == sum(len(r["answer_ids"]) for r in rows)
    for row in rows:
        user, assistant = VOCAB - 3, VOCAB - 2
        assert row["prompt_ids"][0] == user and row["prompt_ids"][-1] == assistant
        assert row["answer_ids"] == own(model, row["prompt_ids"], 12)
        assert row["temperature"] == 0 and (row["finish_reason"] == "stop") == (row["answer_ids"][-1] == EOS)
    answers = load_answers([str(tmp_path)])
    assert [(a.id, a.prompt, a.answer) for a in answers] == [(r["id"], r["prompt_ids"], r["answer_ids"]) for r in rows]


class Killed(BaseException):
    pass


def test_resumes_after_a_kill(model, tokenizer, tmp_path, monkeypatch, capsys):
    options = AnswerOptions(10, ((0.9, 0.5),), batch=3, format="jsonl", shard_rows=4)
    whole = answer(model, tokenizer, talk(20), tmp_path / "whole", options, quiet=True)
    folder = tmp_path / "killed"
    answered = Counter()
    real = Batch._collect

    def dying(self):
        if answered["n"] >= 9:
            raise Killed
        done = real(self)
        answered["n"] += len(done)
        return done

    monkeypatch.setattr(Batch, "_collect", dying)
    with monkeypatch.context() as m:  # a kill lets nobody tidy up
        m.setattr("selfspec.training.shards.AnswerFolder.__exit__", lambda self, *_: self._lock.release())
        with pytest.raises(Killed):
            answer(model, tokenizer, talk(20), folder, options, quiet=True)
    monkeypatch.setattr(Batch, "_collect", real)
    shards = shard_files(folder)
    assert 1 <= len(shards) < 5 and not json.loads((folder / "manifest.json").read_text()).get("complete")
    (folder / ".answers-00007.jsonl.gz.partial").write_bytes(b"half a sh")
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[: len(data) // 2])  # a disk that lost the end
    manifest = answer(model, tokenizer, talk(20), folder, options, quiet=True)
    assert "damaged" in capsys.readouterr().err
    assert not list(folder.glob(".*.partial"))

    def rows(where):
        return {r["id"]: r for f in shard_files(where) for r in read_rows(f)}

    ids = [a.id for a in load_answers([str(folder)])]
    assert sorted(ids) == sorted(set(ids)) == sorted(f"p{i}" for i in range(20))
    assert rows(folder) == rows(tmp_path / "whole")  # also what was drawn at random
    assert {r["temperature"] for r in rows(folder).values()} == {0.0, 0.9}
    assert {**manifest["counts"]} == {**whole["counts"]}
    before = (folder / "manifest.json").read_text()
    answer(model, tokenizer, talk(20), folder, options, quiet=True)  # nothing left to do
    assert (folder / "manifest.json").read_text() == before
    more = answer(model, tokenizer, talk(25)[20:], folder, options, quiet=True)
    assert more["counts"]["answers"] == 25


def test_an_interrupt_saves_what_is_there(model, tokenizer, tmp_path, monkeypatch):
    options = AnswerOptions(10, batch=3, format="jsonl")
    real, calls = Batch._collect, Counter()

    def dying(self):
        calls["n"] += 1
        if calls["n"] > 4:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Batch, "_collect", dying)
    with pytest.raises(KeyboardInterrupt):
        answer(model, tokenizer, talk(20), tmp_path, options, quiet=True)
    assert 0 < len(load_answers([str(tmp_path)])) < 20


def test_settings_are_not_mixed(model, tokenizer, tmp_path):
    answer(model, tokenizer, talk(3), tmp_path, AnswerOptions(5, format="jsonl"), quiet=True)
    with pytest.raises(ValueError, match="max_new_tokens: 5, now 6"):
        answer(model, tokenizer, talk(3), tmp_path, AnswerOptions(6, format="jsonl"), quiet=True)
    torch.manual_seed(1)
    other = LlamaForCausalLM(model.config).double()
    with pytest.raises(ValueError, match="model: "):
        answer(other, tokenizer, talk(3), tmp_path, AnswerOptions(5, format="jsonl"), quiet=True)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no manifest"):
        answer(model, tokenizer, talk(3), tmp_path, AnswerOptions(5, format="jsonl"), quiet=True)


def test_turns_see_the_models_own_answers(model, tokenizer, tmp_path):
    first, second, third = (text(p) for p in prompts_of(3))
    long = Prompt("long", (user(text([5] * 300)),), (first,))  # over the context
    talks = [Prompt("a", (user(first),), (second, third)), Prompt("b", (user(second),)), long]
    options = AnswerOptions(8, format="jsonl", shard_rows=1)
    manifest = answer(model, tokenizer, talks[:1], tmp_path / "part", options, quiet=True)
    # drop the later turns: the first answer is then read back from its shard
    for file in shard_files(tmp_path / "part")[1:]:
        file.unlink()
    manifest = answer(model, tokenizer, talks, tmp_path / "part", options, quiet=True)
    rows = {a.id: a for a in load_answers([str(tmp_path / "part")])}
    assert sorted(rows) == ["a#1", "a#2", "a#3", "b"]
    assert manifest["skipped"] == ["long#1", "long#2"]
    messages = []
    for turn in range(3):
        messages.append(user((first, second, third)[turn]))
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        row = rows[f"a#{turn + 1}"]
        assert row.prompt == prompt
        assert row.answer == own(model, prompt, 8)
        said = row.answer[:-1] if row.answer[-1] == EOS else row.answer
        messages.append({"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)})


def test_the_context_caps_the_answer(model, tokenizer, tmp_path):
    talks = [Prompt("near", (user(text([5] * 250)),))]
    answer(model, tokenizer, talks, tmp_path, AnswerOptions(40, format="jsonl"), quiet=True)
    (row,) = load_answers([str(tmp_path)])
    assert len(row.prompt) + len(row.answer) <= 256


def test_prompt_files(tmp_path):
    lines = [
        {"id": "x", "prompt": "one"},
        {"prompt": "two"},
        {"id": 7, "prompt": "first", "turns": ["first", "then"]},
        {
            "id": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"},
            ],
        },
        {"id": "x", "prompt": "one"},
    ]
    with gzip.open(tmp_path / "some.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in lines)
    (tmp_path / "plain.txt").write_text("a line\n\nanother\n")
    got = read([tmp_path / "some.jsonl.gz", tmp_path / "plain.txt"])
    assert [c.id for c in got] == ["x", "some/1", "7", "m", "plain/0", "plain/1"]
    assert [c.later for c in got] == [(), (), ("then",), (), (), ()] and got[2].messages == (user("first"),)
    assert got[3].messages == ({"role": "system", "content": "s"}, user("u"))
    assert len(read([tmp_path / "some.jsonl.gz"], limit=2)) == 2
    (tmp_path / "bad.jsonl").write_text('{"id": "x", "prompt": "other"}\n')
    with pytest.raises(PromptError, match=r"bad\.jsonl, line 1: .*'x'"):
        read([tmp_path / "some.jsonl.gz", tmp_path / "bad.jsonl"])
    (tmp_path / "bad.jsonl").write_text('{"id": "y"}\n')
    with pytest.raises(PromptError, match=r"bad\.jsonl, line 1"):
        read([tmp_path / "bad.jsonl"])


def test_the_command(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"w5_ w{i}_"}) + "\n" for i in range(4, 10)))
    args = f"{tmp_path}/p.jsonl -o {tmp_path}/out --model {tmp_path}/model --device cpu".split()
    how = ["--max-new-tokens", "6", "--limit", "5", "--temperature-mix", "0.8=0.5"]
    result = tiny_chat.run("answer", *args, *how)
    assert result.exit_code == 0 and json.loads(result.stdout)["answers"] == 5
    assert "5 of 5 answers" in result.stderr and "tokens/s" in result.stderr
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert settings["temperature_mix"] == [[0.8, 0.5]] and settings["max_new_tokens"] == 6
    for wrong, words in (("hot", "temperature=share"), ("0.8=2", "sum to at most 1")):
        result = tiny_chat.run("answer", *args, "--temperature-mix", wrong)
        assert result.exit_code == 2 and words in result.stderr
    result = tiny_chat.run("answer", f"{tmp_path}/none.jsonl", *args[1:])
    assert result.exit_code == 2 and "no prompt file" in result.stderr


@pytest.mark.gpu
def test_graphs_give_the_same_as_steps(model):
    small = LlamaForCausalLM(model.config).to("cuda", torch.float32).eval()
    jobs = [Job(str(i), p, 1 + 7 * (i % 5)) for i, p in enumerate(prompts_of(200))]
    plain, graphed = (
        {d.job.id: d.tokens for d in run(small, jobs, 128, 29, graphs=graphs)} for graphs in (False, True)
    )
    assert sum(plain[k] != graphed[k] for k in plain) == 0
