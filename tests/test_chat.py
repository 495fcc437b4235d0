import json

import pytest
import tiny_chat
import torch

from selfspec import choose, demo, suite
from selfspec.chat import Settings, fitted, respond
from selfspec.model import SelfSpecModel

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, folder):
    return tiny_chat.save_adapter(tmp_path_factory.mktemp("adapter"), folder)


@pytest.fixture(scope="module")
def model(folder, adapter):
    return SelfSpecModel.from_pretrained(folder, adapter)


def reference(folder, text, n):
    hf = tiny_chat.LlamaForCausalLM.from_pretrained(folder)
    words = tiny_chat.tokenizer()
    ids = torch.tensor([words(text).input_ids])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=2)
    return words.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_generate_prints_the_models_own_answer(folder, adapter):
    argv = ["w3 w4", "--model", folder, "--adapter", adapter, "--dtype", "float32", "--max-new-tokens", "9", "--stats"]
    result, pruned = (tiny_chat.run("generate", *argv, *more) for more in ([], ["--lengths", "product:threshold=0.9"]))
    assert result.exit_code == 0 and result.stdout.strip() == reference(folder, "user: w3 w4 assistant:", 9)
    assert pruned.exit_code == 0 and pruned.stdout == result.stdout
    refused = tiny_chat.run("generate", *argv, "--lengths", "adaflash")
    assert refused.exit_code == 2 and "length head" in refused.stderr
    assert all(words in result.stderr for words in ("tau", "draft forwards", "ms/token"))


def test_generate_reads_stdin_and_says_when_nothing_drafts(folder):
    argv = ["generate", "-", "--model", folder, "--adapter", "none", "--dtype", "float32", "--max-new-tokens", "5"]
    result = tiny_chat.run(*argv, input="w3 w4")
    assert result.exit_code == 0 and "no adapter" in result.stderr
    assert result.stdout.strip() == reference(folder, "user: w3 w4 assistant:", 5)
    result = tiny_chat.run(*argv, input=" \n")
    assert result.exit_code == 2 and "the prompt is empty" in result.stderr


def test_a_prompt_that_does_not_fit_is_refused(folder):
    result = tiny_chat.run("generate", " ".join(["w1"] * 300), "--model", folder)
    assert result.exit_code == 2 and "context 256" in result.stderr and not result.stdout


def test_generate_and_chat_sample_as_generate_does(folder, model):
    """They had no way to."""
    argv = ["--model", folder, "--adapter", "none", "--dtype", "float32", "--max-new-tokens", "12"]
    hot = ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "0", "--min-p", "0.01", "--repetition-penalty", "1.2"]
    ids = model.tokenizer("user: w3 w4 assistant:", return_tensors="pt").input_ids
    asked = dict(temperature=0.9, top_p=0.95, top_k=0, min_p=0.01, repetition_penalty=1.2, do_sample=True)
    texts = []
    for seed in (7, 8):
        out = model.generate(ids, max_new_tokens=12, seed=seed, **asked)
        texts.append(model.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    run = tiny_chat.run("generate", "w3 w4", *argv, *hot, "--seed", "7")
    assert run.stdout.strip() == texts[0] != texts[1] and run.exit_code == 0
    said = tiny_chat.run("chat", *argv, *hot, "--seed", "7", input="w3 w4\n/reset\nw3 w4\n")
    assert said.stdout.split("\n")[:2] == texts  # asked again, it is drawn anew
    free = [tiny_chat.run("generate", "w3 w4", *argv, "--temperature", "2").stdout for _ in range(3)]
    assert len(set(free)) > 1  # without a seed another text each time
    cool = tiny_chat.run("generate", "w3 w4", *argv, "--temperature", "0").stdout
    assert cool == tiny_chat.run("generate", "w3 w4", *argv).stdout and cool.strip() not in texts


def test_settings_of_sampling_that_cannot_be_are_refused(folder):
    argv = ["generate", "w1", "--model", folder, "--adapter", "none"]
    for more, words in {
        ("--temperature", "0", "--seed", "1"): "--temperature 0 is greedy", ("--top-p", "7"): "--top-p",
        ("--temperature", "-1"): "--temperature", ("--repetition-penalty", "0"): "strictly positive",
    }.items():  # fmt: skip
        result = tiny_chat.run(*argv, *more)
        assert result.exit_code == 2 and words in result.stderr and not result.stdout, more


def test_chat_remembers_resets_and_ends(folder, adapter):
    said = "w3 w4\n\nw5\n/reset\nw5\n/exit\nw6\n"
    argv = ["--model", folder, "--adapter", adapter, "--dtype", "float32", "--max-new-tokens", "6"]
    result = tiny_chat.run("chat", *argv, input=said)
    first, second, third = result.stdout.strip().split("\n")
    assert result.exit_code == 0
    assert first.strip() == reference(folder, "user: w3 w4 assistant:", 6)
    assert second.strip() == reference(folder, f"user: w3 w4 assistant: {first} user: w5 assistant:", 6)
    assert third.strip() == reference(folder, "user: w5 assistant:", 6)


def test_the_end_of_input_ends_the_chat(folder, adapter):
    assert tiny_chat.run("chat", "--model", folder, "--adapter", adapter, input="").exit_code == 0


def test_an_answer_counts_its_forwards(model):
    answer = respond(model, [{"role": "user", "content": "w7"}], Settings(cap=10), show=False)
    s = answer.stats
    s.hung, s.saved, s.reused = 4, 3, 2
    assert f"tau {s.tau:.2f}, hit 0.75, reuse 0.50, saved {2 / s.rounds:.2f}, " in answer.line()
    assert s.rounds >= 1 and s.tokens <= 9 and s.drafts <= s.rounds and 0 <= answer.decode <= answer.whole


def test_a_long_conversation_forgets_its_beginning(model):
    say = lambda role, n: {"role": role, "content": " ".join(["w1"] * n)}  # noqa: E731
    talk = [say("system", 2), say("user", 150), say("assistant", 50), say("user", 30)]
    assert fitted(model, talk, 4) == (talk, 4)
    assert fitted(model, talk, 40) == ([talk[0], talk[3]], 40)
    assert fitted(model, [say("user", 250)], 40)[1] == 256 - 252
    with pytest.raises(ValueError, match="context 256"):
        fitted(model, [say("user", 300)], 4)


def test_the_demo_shows_measures_and_proves(folder, adapter):
    argv = ["--model", folder, "--adapter", adapter, "--max-new-tokens", "8", "--repeats", "1", "--dtype", "bfloat16"]
    result = tiny_chat.run("demo", *argv)
    out = result.stdout
    assert result.exit_code == 0
    assert "machine:" in out and "bfloat16" in out and suite.CHAT[0] in out and "draft forwards" in out
    assert all(f"Hugging Face {d}" in out for d in ("float32", "bfloat16")) and "selfspec auto bfloat16" in out
    assert "of 2 answers equal Hugging Face's generate(), token for token" in out


def test_the_demo_fails_without_an_adapter_or_with_a_wrong_decoder(folder, adapter, monkeypatch):
    result = tiny_chat.run("demo", "--model", folder)
    assert result.exit_code == 1 and "no shipped adapter fits" in result.stderr
    monkeypatch.setattr(choose, "best", lambda scores: (scores.argmax(-1) + 1) % scores.shape[-1])
    argv = ["--model", folder, "--adapter", adapter, "--max-new-tokens", "8", "--repeats", "1"]
    result = tiny_chat.run("demo", *argv, "--dtype", "float32")
    assert result.exit_code == 1 and "MISMATCH" in result.stdout
    assert demo.proof([None, None])[1]


def test_a_pad_token_of_zero_does_not_hide_the_first_prompt(tmp_path):
    """Models that pad with token 0 were refused: the prompt that tries the settings out is token 0."""
    folder = tiny_chat.save_model(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 0, "eos_token_id": 1}))
    argv = ["w3 w4", "--model", folder, "--dtype", "float32", "--max-new-tokens", "3"]
    assert tiny_chat.run("generate", *argv).exit_code == 0
