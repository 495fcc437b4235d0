"""Many rounds of mixed lengths: device memory, captured graphs and time as they go by; then long contexts.

python benchmarks/rounds.py --json benchmarks/rounds_h200.json
"""

import argparse
import json
import random
import time

import torch
import transformers

from selfspec import SelfSpecModel, options, suite
from selfspec.session import Request, Session


def mixed(model: SelfSpecModel, text: list[int], args) -> dict:
    """Requests of all lengths come and go in one session. Returns what was seen every tenth of the rounds."""
    rng = random.Random(0)
    plan = model.plan(args.mode, None, args.tree_nodes)
    session = Session(model.backbone, plan, args.slots, 2048, reuse=True)
    rounds, seen, done, begin = 0, [], 0, time.perf_counter()
    while rounds < args.rounds:
        while session.free and rng.random() < 0.5:
            at, length = rng.randrange(len(text) - 1700), int(2 ** rng.uniform(3, 10.7))
            session.add([Request(text[at : at + length], rng.randrange(8, 256))])
        before = len(session.active)
        session.step()
        rounds, done = rounds + 1, done + max(0, before - len(session.active))
        if rounds % (args.rounds // 10) == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            row = dict(rounds=rounds, ended=done, graphs=len(session.graphs), ms=1e3 * (now - begin) * 10 / args.rounds)
            row |= dict(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())
            seen.append(row)
            print(row, flush=True)
            begin = now
    grown = seen[-1]["reserved"] - seen[4]["reserved"], seen[-1]["graphs"] - seen[4]["graphs"]
    return {"seen": seen, "reserved_growth_of_the_second_half": grown[0], "graphs_captured_in_it": grown[1]}


def context(model: SelfSpecModel, text: list[int], length: int, args) -> list[dict]:
    """Whether modes agree with plain decoding behind a text of some length, and their time per token."""
    out, truth = [], None
    prompts = [text[i * 37 : i * 37 + length - args.new_tokens] for i in range(args.prompts)]
    for mode in ("ar", "sequential", "tree"):
        for warm in (True, False):
            requests = [Request(p, 16 if warm else args.new_tokens) for p in prompts]
            torch.cuda.synchronize()
            first = begin = time.perf_counter()
            for r in requests:
                for tokens in model.run([r], model.plan(mode, None, args.tree_nodes)):
                    if tokens and len(r.output) == len(tokens):
                        torch.cuda.synchronize()
                        first += time.perf_counter() - begin
                        begin = time.perf_counter()
                torch.cuda.synchronize()
            seconds = time.perf_counter() - first
        texts = [r.output for r in requests]
        truth = truth or texts
        same = sum(a == b for a, b in zip(texts, truth, strict=True)) / len(texts)
        rounds = sum(r.stats.rounds for r in requests)
        row = dict(context=length, mode=mode, exact=model.exact, match=same, tokens=sum(map(len, texts)))
        row |= dict(seconds_end_to_end=seconds, tau=sum(r.stats.tokens for r in requests) / rounds)
        row["ms_per_round"] = (
            1e3 * sum(r.stats.seconds[k] for r in requests for k in ("draft", "verify", "rest", "round")) / rounds
        )
        out.append(row)
        print(row, flush=True)
    return out


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=options.MODEL)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--mode", default="sequential")
    parser.add_argument("--tree-nodes", type=int, default=31)
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model = SelfSpecModel.from_pretrained(args.model, dtype=torch.bfloat16, device="cuda", exact=True)
    words = "\n\n".join(text for _, text in suite.SUITE)
    text = model.tokenizer(words)["input_ids"]
    text = (text * (1 + 9000 // len(text)))[:9000]
    found = {"setting": options.setting(model), "mixed": mixed(model, text, args), "contexts": []}
    for length in map(int, args.contexts.split(",")):
        found["contexts"] += context(model, text, length, args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
