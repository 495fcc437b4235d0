"""What a run has come to: tau before and after it, on the same answers, in one place."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any

from selfspec.training.data import load_answers
from selfspec.training.optim import swap_

if TYPE_CHECKING:
    from selfspec.training.trainer import Trainer

BEFORE, REPORT = "before.json", "report.json"


def before(trainer: Trainer) -> None:
    """Measure the adapter that training starts from; kept in a file, so that a resumed run can tell it too."""
    found = {"valid": trainer.evaluate(trainer.valid), "eval": _sets(trainer)}
    trainer.log({"event": "before", "step": trainer.step, **found})
    if trainer.world.main:
        (trainer.out / BEFORE).write_text(json.dumps(found, indent=1))


def finish(trainer: Trainer) -> dict[str, Any]:
    """Keep the better of the last and the averaged weights, and measure it on the evaluation sets."""
    report: dict[str, Any] = {"finished": True, "step": trainer.step, "elapsed_s": round(trainer.elapsed, 1)}
    layout = trainer.path_config.layouts[0]
    last = trainer.validate("last")
    if trainer.ema:
        mean = trainer.validate("ema")
        if mean.get(layout, {}).get("tau", 0) >= last.get(layout, {}).get("tau", 0):
            swap_(trainer.params, trainer.ema)
            last, report["weights"] = mean, "ema"
    measured = itertools.takewhile(lambda share: share is not None, last.get("known", {}).get("acceptance", ()))
    # a planner begins there
    trainer.path.config = dataclasses.replace(trainer.path.config, acceptance=tuple(measured))
    trainer.save_adapter("adapter", [])
    report |= {"valid": last, "eval": _sets(trainer)}
    for name, result in report["eval"].items():
        trainer.log({"event": "eval", "step": trainer.step, "set": name, **result})
    if trainer.config.init and (trainer.out / BEFORE).exists():
        report["before"] = json.loads((trainer.out / BEFORE).read_text())
    if trainer.world.main:
        text = json.dumps(report | {"config": trainer.config.to_dict()}, indent=1)
        (trainer.out / REPORT).write_text(text)
    return report


def taus(report: dict[str, Any]) -> str:
    """tau of a report's answers, for a person: `validation 3.11 -> 3.42 (known), 2.90 -> 3.01 (hidden)`.

    Args:
        report: of `finish`; with `before`, where the run went on from an adapter.
    """
    old = report.get("before", {})
    sets = {"validation": (report["valid"], old.get("valid", {}))}
    sets |= {name: (found, old.get("eval", {}).get(name, {})) for name, found in report["eval"].items()}
    said = []
    for name, (new, was) in sets.items():
        layouts = [k for k, v in new.items() if isinstance(v, dict) and "tau" in v]
        parts = [(f"{was[k]['tau']:.2f} -> " if k in was else "") + f"{new[k]['tau']:.2f} ({k})" for k in layouts]
        said += [f"{name} {', '.join(parts)}"] if parts else []
    return "; ".join(said)


def _sets(trainer: Trainer) -> dict[str, dict]:
    return {name: trainer.evaluate(load_answers(files)) for name, files in trainer.config.eval.items()}
