"""Where drafts are bad: does auto lose to plain decoding, and does it change the text?

python benchmarks/adversarial.py --device cuda --exact --slots 1,8 --json benchmarks/adversarial_h200.json

Prompts in other languages, prompts of random tokens, and the adapter damaged: each of its tensors shuffled, in memory.
Every case has a planner of its own. It has first seen prompts of the built-in suite, so that it expects good drafts; of
the damaged adapter it expects what the adapter promises. (On CUDA graphs are captured off the clock, in two passes over
all prompts, in which it learns too.) `auto` and `ar` then take turns prompt by prompt, with several slots queue by
queue. Speed is the time per token of plain decoding over that of auto, without the prefill: the median over the
repeats, and the worst prompt's. Texts are compared token for token; in bfloat16 they have to be equal with --exact
only.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from concurrency import loaded

from selfspec import SelfSpecModel, bench, options, prompts
from selfspec.adapters import MaskPathModel, io
from selfspec.arena import AUTO
from selfspec.measure import Measured, Prompts, interleave
from selfspec.runners import engine_runner

LANGUAGES = str(Path(__file__).parent / "languages.jsonl")
CASES = ("languages", "random", "damaged")
TARGET = 0.95  # of plain decoding's speed


def shuffled(path: MaskPathModel, seed: int) -> MaskPathModel:
    """The same mask path, each tensor's numbers in another order: as large as before, and good for nothing."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in path.parameters():
            order = torch.randperm(parameter.numel(), generator=draws).to(parameter.device)
            parameter.copy_(parameter.reshape(-1)[order].view_as(parameter))
    return path


def damaged(model: SelfSpecModel, adapter: str, seed: int) -> SelfSpecModel:
    """The model beside shuffled adapters, read afresh: those of `model` stay as they are.

    Raises:
        SystemExit: there is no adapter.
    """
    names = [io.shipped_for(model.model) if n == "auto" else n for n in adapter.split(",")]
    if None in names or "none" in names:
        raise SystemExit("no adapter to damage: pass --adapter FOLDER")
    paths = [shuffled(io.load(name, model.model), seed) for name in names]
    return SelfSpecModel(model.model, paths, model.tokenizer, model.exact)


def drawn(model: SelfSpecModel, number: int, length: int, seed: int) -> Prompts:
    """Prompts of random tokens. [number, length]"""
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(model.backbone.vocab_size, (number, length), generator=draws).tolist()


def encoded(model: SelfSpecModel, files: list[str] | None, limit: int | None) -> Prompts:
    """Chat prompts of files, or of the built-in suite."""
    rows = [p for one in prompts.read_sets(files, limit).values() for p in one]
    return [prompts.encode(model.tokenizer, p.messages) for p in rows]


def measured(model: SelfSpecModel, ids: Prompts, easy: Prompts, slots: int, args: argparse.Namespace) -> list[Measured]:
    """Plain decoding and the planner in turn, after the easy prompts."""
    runners = [engine_runner(model, mode) for mode in ("ar", AUTO)]
    warm = None if model.backbone.device.type == "cuda" else 1  # token
    done: list[Measured] = []
    for queue, repeats in ((easy, 1), (ids, args.repeats)):
        for so_far, _, _ in interleave(runners, queue, slots, args.max_new_tokens, repeats, warm) if queue else ():
            done = so_far
    return done


def row(case: str, slots: int, done: list[Measured]) -> dict[str, Any]:
    """A case's figures: what `selfspec bench` says of auto, the worst prompt, and which texts differ."""
    failed = next((f"{m.runner.name}: {m.error}" for m in done if m.error is not None), None)
    if failed:
        return {"case": case, "slots": slots, "error": failed}
    plain, auto = done
    ratios = []
    for i in range(len(plain.repeats[0])):  # one run a prompt, or one for all of them
        pairs = [(a[i].decode, b[i].decode) for a, b in zip(plain.repeats, auto.repeats, strict=True)]
        ratios.append(statistics.median(a / b if b else 1.0 for a, b in pairs))
    texts = zip(plain.outputs, auto.outputs, strict=True)
    return {
        "case": case,
        "slots": slots,
        **bench.result(auto, done),
        "worst": min(ratios),
        "different": [i for i, (a, b) in enumerate(texts) if a != b],
    }


def show(r: dict[str, Any]) -> None:
    """A case's figures for a person."""
    head = f"{r['case']:10} {r['slots']:5} "
    if "error" in r:
        print(head + r["error"], flush=True)
        return
    speed, same = r["speedup"]["ar"], r["answers"] - len(r["different"])
    low = "" if speed["median"] >= TARGET else f"  under {TARGET}"
    print(
        f"{head}{speed['median']:6.3f} ({speed['min']:.3f}-{speed['max']:.3f}) {r['worst']:6.3f} {r['tau']:6.2f} "
        f"{same:4} of {r['answers']}{low}",
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=options.MODEL)
    p.add_argument("--adapter", default="auto", help="one, or several with commas between them")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", help="by default bfloat16 on CUDA, else float32")
    p.add_argument("--exact", action="store_true", help="token-identical in bfloat16, on CUDA")
    p.add_argument("--cases", default=",".join(CASES))
    p.add_argument("--slots", default="1", help="requests at a time, with commas between them")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--limit", type=int, default=8, help="prompts of a case")
    p.add_argument("--easy", type=int, default=3, help="prompts of the built-in suite before")
    p.add_argument("--length", type=int, default=48, help="of a random prompt")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int)
    p.add_argument("--json")
    return p


def main(argv: list[str] | None = None) -> None:
    """Measures, prints a table, writes JSON after every row."""
    args = parser().parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    unknown = set(args.cases.split(",")) - set(CASES)
    if unknown:
        raise SystemExit(f"--cases: expected {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = loaded(args)
    easy = encoded(model, None, args.easy) if args.easy else []
    data: dict[str, Any] = {"settings": vars(args), **options.setting(model), "target": TARGET, "rows": []}
    print(f"{'case':10} {'slots':>5} {'x ar':>6} {'(repeats)':13} {'worst':>6} {'tau':>6} equal texts", flush=True)
    for case in args.cases.split(","):
        for slots in map(int, args.slots.split(",")):
            if case == "damaged":
                subject, before = damaged(model, args.adapter, args.seed), []
            else:  # with a planner that knows nothing
                before = easy
                subject = SelfSpecModel(model.model, [b.path for b in model.bodies if b.path], None, model.exact)
            if case == "random":
                ids = drawn(model, args.limit, args.length, args.seed)
            else:
                ids = encoded(model, [LANGUAGES] if case == "languages" else None, args.limit)
            data["rows"].append(row(case, slots, measured(subject, ids, before, slots, args)))
            show(data["rows"][-1])
            if args.json:
                Path(args.json).write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
