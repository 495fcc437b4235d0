"""`selfspec explain`: the latency table, the estimate and the choice of every round, for one prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from selfspec import options, prompts
from selfspec.model import SelfSpecModel
from selfspec.plan import Plan
from selfspec.plan.planner import Planner
from selfspec.plan.policy import Policy
from selfspec.plan.simulate import Recorder
from selfspec.plan.views import Assignment
from selfspec.planners import planner_for
from selfspec.request import Request
from selfspec.settings import eos_ids
from selfspec.terminal import refusing, show_table


class Watched:
    """A policy that notes what came of each round."""

    def __init__(self, policy: Policy):
        self.policy, self.plans = policy, policy.plans
        self.seen: list[tuple[Assignment, list[int], float | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def observe(self, assignment, emitted, seconds=None, ended=None, hits=None, cold=False) -> None:
        """Note it, and pass it on."""
        self.seen.append((assignment, list(emitted), None if cold else seconds))
        self.policy.observe(assignment, emitted, seconds, ended, hits, cold)


def rounds(
    model: SelfSpecModel, policy: Policy, request: Request
) -> Iterator[tuple[Assignment, list[int], float | None]]:
    """Decode one request under a policy.

    Args:
        model: the model.
        policy: chooses the plans.
        request: alone in its session.

    Yields:
        The assignment of each round, the tokens that it emitted, and its seconds (None where a graph was captured).
    """
    watch = Watched(policy)
    for _ in model.rounds([request], watch):
        yield from watch.seen
        watch.seen.clear()


def explained(model: SelfSpecModel, planner: Planner, prompt: list[int], cap: int) -> dict[str, Any]:
    """What the planner knew and did, in plain JSON types."""
    request, recorder, log = Request(prompt, cap, frozenset(eos_ids(model.model.generation_config))), Recorder(), []
    emitted_before = 0
    for chosen, emitted, seconds in rounds(model, planner, request):
        recorder.note(chosen, [emitted_before], emitted)
        emitted_before += sum(emitted)
        decision = planner.log[-1] if planner.log and planner.log[-1].number == planner.rounds else None
        entry = {
            "plan": str(chosen.plan),
            "emitted": sum(emitted),
            "ms": None if seconds is None else 1e3 * seconds,
            "why": "as before",
        }
        if decision is not None:
            k, rate = planner.index[chosen.plan], decision.tokens / decision.ms
            entry |= {"why": decision.why, "expected_tokens": decision.tokens[k], "expected_ms": decision.ms[k]}
            entry |= {"best": str(planner.plans[int(rate.argmax())]), "best_rate": float(rate.max())}
            entry |= {"rate": float(rate[k])}
        log.append(entry)
    planner.learn()
    families = planner.estimator.kinds
    return {
        "table": [_cost(planner, p, len(prompt)) for p in planner.plans],
        "estimate": {
            " ".join(map(str, f if f.block else f[:3])): [round(float(c), 3) for c in planner.estimator.shared()[i]]
            for i, f in enumerate(families)
        },
        "rounds": log,
        "switches": planner.switches,
        "probe_share": planner.probe.spent / planner.probe.total if planner.probe.total else 0.0,
        "output": request.output,
    }


def _cost(planner: Planner, plan: Plan, context: int) -> dict[str, Any]:
    verify, draft = planner.costs.parts(plan, 1, context)
    kind, entry = ("overlap", planner.costs.entries[plan.adapter]) if plan.overlap else ("clean", 0)
    how = planner.costs.table.how(kind, plan.nodes, 1, context, entry, plan.group_rows)
    return {"plan": str(plan), "verify_ms": float(verify[1]), "draft_ms": float(draft[1]), "verify": how}


def show(found: dict[str, Any]) -> None:
    """Print it as a person reads it."""
    show_table(
        ["plan", "verify ms", "draft ms", "verify is"],
        [[r["plan"], f"{r['verify_ms']:.3f}", f"{r['draft_ms']:.3f}", r["verify"]] for r in found["table"]],
    )
    print("\nacceptance by position, over all rounds")
    show_table(
        ["draft", *map(str, range(1, 8))],
        [[name, *(f"{c:.2f}" for c in curve[:7])] for name, curve in found["estimate"].items()],
    )
    print()
    lines = []
    for i, r in enumerate(found["rounds"], 1):
        told = [f"{r[k]:.2f}" if k in r else "" for k in ("expected_tokens", "expected_ms")]
        took = "" if r["ms"] is None else f"{r['ms']:.2f}"
        lines.append([str(i), r["plan"], r["why"], told[0], str(r["emitted"]), told[1], took, r.get("best", "")])
    show_table(["round", "plan", "why", "expected", "emitted", "expected ms", "ms", "best now"], lines)
    print(f"\n{found['switches']} switches; {100 * found['probe_share']:.1f} % of the time for probes")


def run(
    model: str,
    prompt: str,
    adapter: str,
    dtype: options.DtypeName,
    device: str,
    threads: int | None,
    max_new_tokens: int,
    seconds: float,
    as_json: bool,
) -> int:
    """`selfspec explain`: answer, and print what the planner thought."""
    with refusing():
        loaded = options.load_model(options.Chosen(model, adapter, dtype, device, threads))
        ids = prompts.encode(loaded.tokenizer, [{"role": "user", "content": prompt}])
        limit = loaded.backbone.max_positions
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise ValueError(f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed {limit} positions")
    found = explained(loaded, planner_for(loaded.bodies, seconds=seconds), ids, max_new_tokens)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0
