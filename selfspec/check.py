"""`selfspec check`: the lossless audit. Every answer is compared, token for token, with plain decoding.

Greedy answers are compared with Hugging Face `generate`, sampled ones with our own plain decoding of the same seed
(transformers' noise depends on the batch). The reference runs once per prompt, alone (batch 1). In float32 two
roundings of one sum can swap two tokens that are as good as equal; such a difference counts as a tie only if a float64
copy of the model proves it. All others are mismatches.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec import options, prompts
from selfspec.generation import processors_of
from selfspec.model import SelfSpecModel
from selfspec.prompts import Prompt
from selfspec.reference import Finding, Judge, Rescore, answers
from selfspec.sampling import Pipeline, as_seed, perturbed
from selfspec.settings import merge
from selfspec.stats import Stats, mean_tau, total
from selfspec.terminal import Progress, refusing, show_table

CONTROL = 8  # batch of the control: plain Hugging Face against itself
SAVE_EVERY = 30.0  # seconds between partial reports


@dataclass
class Run:
    """Answers of one prompt set in one setting, against the reference.

    Attributes:
        suite: the prompt set.
        mode: a mode of selfspec, or "hf" for plain Hugging Face.
        batch: prompts decoded together.
        role: "run", "reference" (at batch 1) or "control" (the reference's decoding at a larger batch).
        findings: (prompt id, what differed) of every answer that is not the reference's.
    """

    suite: str
    mode: str
    batch: int
    role: str = "run"
    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stats: list[Stats] = field(default_factory=list)
    findings: list[tuple[str, Finding]] = field(default_factory=list)

    @property
    def ties(self) -> int:
        return sum(f.tie for _, f in self.findings)

    @property
    def mismatches(self) -> int:
        return len(self.findings) - self.ties

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        matched = self.prompts - len(self.findings)
        return {
            "suite": self.suite,
            "mode": self.mode,
            "batch": self.batch,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "matched_prompts": matched,
            "match_rate": matched / self.prompts if self.prompts else 1.0,
            "ties": self.ties,
            "mismatches": self.mismatches,
            "tau": total(self.stats).tau,
            "mean_tau": mean_tau(self.stats),
            "tpf": total(self.stats).tpf,
            "overlap": total(self.stats).overlap,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }


@dataclass(frozen=True)
class Settings:
    """What is compared: every mode at every batch size, `cap` new tokens, chosen as `choice` says.

    Attributes:
        choice: arguments of `generate`.
        seed: the first prompt's, and each next one's is one more; None is greedy decoding.
        lengths: a length rule for each mode that has one.
    """

    modes: list[str]
    batches: list[int]
    cap: int
    block_size: int | None = None
    tree_nodes: int | None = None
    choice: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    lengths: dict[str, str] = field(default_factory=dict)

    def ask(self, model: SelfSpecModel, asked: list[list[int]], run: Run, first: int) -> list[list[int]]:
        """Answers to neighbouring prompts, `first` being the number of their first, as a run makes them."""
        hf, choice = model.model, dict(self.choice)
        if self.seed is not None:
            choice |= {"do_sample": True, "seed": [self.seed + first + i for i in range(len(asked))]}
        if run.mode == "hf":
            return answers(hf, hf, asked, self.cap, **choice)
        how: dict[str, Any] = {}
        if run.role == "run":
            how = {"block_size": self.block_size, "lengths": self.lengths.get(run.mode)}
            how["tree_nodes"] = self.tree_nodes if "tree" in run.mode else None
        return answers(model, hf, asked, self.cap, mode=run.mode, **how, **choice)

    def rescore(self, model: SelfSpecModel, prompt: list[int], number: int) -> Rescore | None:
        """What the tokens of a prompt's answer are chosen by; see `Judge.compare`."""
        if not self.choice and self.seed is None:
            return None
        config = merge(model.model.generation_config, None, {**self.choice, "do_sample": self.seed is not None})
        pipeline = Pipeline(processors_of(model.model, config, prompt, len(prompt), self.cap))

        def scores(text: Tensor, logits: Tensor) -> Tensor:
            out = pipeline(text, logits)
            if self.seed is None:
                return out
            seed, at = torch.tensor([[as_seed(self.seed + number)], [text.shape[1]]], device=text.device)
            return perturbed(out, seed, at, lambda s: s)

        return scores


def audit(
    model: SelfSpecModel, sets: dict[str, list[Prompt]], settings: Settings, judge: Judge | None = None
) -> Iterator[tuple[list[Run], int, int]]:
    """Decode and compare.

    Args:
        model: with its tokenizer.
        sets: prompts by the name of their set.
        settings: modes, batch sizes, cap.
        judge: compares; shared between audits to keep its float64 copy.

    Yields:
        All runs so far (the same objects, growing), and the answers and tokens written since the last time.
    """
    judge = judge or Judge(model.model)
    half = options.dtype_name(model.backbone.dtype) in ("bfloat16", "float16")
    plain = "hf" if settings.seed is None and not model.exact else "ar"
    runs: list[Run] = []
    chunk = math.lcm(*settings.batches, *([CONTROL] if half else []))
    for suite, rows in sets.items():
        reference = Run(suite, plain, 1, "reference")
        control = [Run(suite, plain, CONTROL, "control")] if half else []
        mine = [Run(suite, mode, batch) for mode in settings.modes for batch in settings.batches]
        runs += [reference, *control, *mine]
        for at in range(0, len(rows), chunk):
            part = rows[at : at + chunk]
            ids = [prompts.encode(model.tokenizer, p.messages) for p in part]
            expected: list[list[int]] = []
            for run in [reference, *control, *mine]:
                for i in range(0, len(part), run.batch):
                    asked, began = ids[i : i + run.batch], time.perf_counter()
                    out = settings.ask(model, asked, run, at + i)
                    run.seconds += time.perf_counter() - began
                    if run.mode != "hf":
                        run.stats += model.request_stats
                    run.prompts += len(out)
                    run.tokens += sum(map(len, out))
                    if run is reference:
                        expected += out
                    for j, (p, got) in enumerate(zip(asked, out), i):
                        if got != expected[j]:
                            finding = judge.compare(p, expected[j], got, settings.rescore(model, p, at + j))
                            assert finding is not None
                            if model.exact:  # no difference is a tie there
                                finding = replace(finding, tie=False)
                            run.findings.append((part[j].id, finding))
                    yield runs, len(out), sum(map(len, out))


def report(runs: list[Run], tokenizer: Any, facts: dict[str, Any], complete: bool) -> dict[str, Any]:
    """The JSON object: totals over selfspec's runs, each run, every difference, what ran where."""
    mine = [r for r in runs if r.role == "run"]
    stats = [s for r in mine for s in r.stats]
    asked = sum(r.prompts for r in mine)
    matched = asked - sum(len(r.findings) for r in mine)
    found = [(r, id, f) for r in runs for id, f in r.findings]
    return {
        "complete": complete,
        "prompts": asked,
        "tokens": sum(r.tokens for r in mine),
        "matched_prompts": matched,
        "match_rate": matched / asked if asked else 1.0,
        "ties": sum(r.ties for r in mine),
        "mismatches": sum(r.mismatches for r in mine),
        "tau": total(stats).tau,
        "mean_tau": mean_tau(stats),
        "tpf": total(stats).tpf,
        "overlap": total(stats).overlap,
        "first_mismatches": [describe(*item, tokenizer) for item in found if item[0].role == "run"],
        "runs": [r.to_dict() for r in mine],
        "reference": [r.to_dict() for r in runs if r.role == "reference"],
        "control": [r.to_dict() for r in runs if r.role == "control"],
        "control_first_mismatches": [describe(*item, tokenizer) for item in found if item[0].role == "control"],
        **facts,
    }


def describe(run: Run, id: str, finding: Finding, tokenizer: Any) -> dict[str, Any]:
    """One difference, for the report."""
    text = {
        k: None if t is None else tokenizer.decode([t], clean_up_tokenization_spaces=False)
        for k, t in _tokens(finding).items()
    }
    where = {"prompt": id, "suite": run.suite, "mode": run.mode, "batch": run.batch}
    return {**where, **asdict(finding), "text": text, "verdict": "tie" if finding.tie else "MISMATCH"}


def _tokens(finding: Finding) -> dict[str, int | None]:
    return {"expected": finding.expected, "found": finding.found}


def write(path: Path, data: dict[str, Any]) -> None:
    """Replace a JSON file in one step, so that a reader or a killed run never leaves half of one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(partial, path)


def show(data: dict[str, Any]) -> None:
    """Print the report as a person reads it."""
    rows = []
    for r in data["runs"] + data["control"] + data["reference"]:
        r = r | ({} if r in data["runs"] or r["mode"] == "hf" else {"mode": f"{r['mode']} (plain)"})
        speed = ["", ""] if r["mode"] == "hf" else [f"{r['tau']:.2f}", f"{r['tpf']:.2f}"]
        counts = [str(r[k]) for k in ("batch", "prompts")] + [f"{r['match_rate']:.4f}", str(r["ties"])]
        rows.append([r["suite"], r["mode"], *counts, str(r["mismatches"]), *speed, f"{r['tokens_per_second']:.0f}"])
    heading = ["suite", "mode", "batch", "prompts", "match rate", "ties", "MISMATCH", "tau", "TPF", "tokens/s"]
    show_table(heading, rows)
    for m in data["first_mismatches"]:
        print(
            f"{m['verdict']}: {m['prompt']}, {m['mode']}, batch {m['batch']}: token {m['position']} is "
            f"{m['found']} {m['text']['found']!r}, plain decoding has {m['expected']} {m['text']['expected']!r}; "
            f"float64 has {m['top'][0]} then {m['top'][1]}, gap {m['gap']:.1e}"
        )
    if data["control"]:
        plain = data["control"][0]["mode"]
        print(f"{plain} at batch {CONTROL} is the control: plain decoding against its batch 1, {data['dtype']}")


def run(
    where: options.Chosen,
    files: list[str] | None,
    limit: int | None,
    max_new_tokens: int,
    batches: Sequence[int],
    mode: tuple[str, ...] | None,
    choice: dict[str, float],
    seed: int | None,
    report_to: Path | None,
) -> int:
    """`selfspec check`. Returns 1 if an answer differs without proof of a tie.

    Args:
        where: the model.
        files: prompts.
        limit: of each file.
        max_new_tokens: per answer.
        batches: sizes.
        mode: modes, or the model's own.
        choice: warpers and penalties by their names in transformers; with warpers, `seed` is not None.
        seed: of sampling.
        report_to: the JSON file.
    """
    with refusing():
        sets = prompts.read_sets(files, limit)
        model = options.load_model(where)
        modes = options.check_modes(model, mode, where)
        options.require_fit(model, sets, max_new_tokens)
        sizes, rules = (where.block_size, where.tree_nodes), {m: options.sizes_of(model, m, where) for m in modes}
        lengths = {m: rule["lengths"] for m, rule in rules.items() if rule.get("lengths") is not None}
        settings = Settings(modes, list(batches), max_new_tokens, *sizes, choice, seed, lengths)
        replace(settings, cap=1).ask(model, [[0]], Run("", "ar", 1), 0)  # values are refused before any work
    facts = {"model": where.model, "adapter": where.adapter, "settings": asdict(settings), **options.setting(model)}
    half = facts["dtype"] in ("bfloat16", "float16")
    answered = sum(map(len, sets.values())) * (1 + half + len(settings.modes) * len(settings.batches))
    runs: list[Run] = []
    saved = time.monotonic()
    with Progress(answered) as progress:
        for runs, n, tokens in audit(model, sets, settings):
            progress.add(n, tokens)
            if report_to and time.monotonic() - saved > SAVE_EVERY:
                write(report_to, report(runs, model.tokenizer, facts, complete=False))
                saved = time.monotonic()
    data = report(runs, model.tokenizer, facts, complete=True)
    if report_to:
        write(report_to, data)
    show(data)
    return 1 if data["mismatches"] else 0
