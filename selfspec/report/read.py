"""What `selfspec bench --json`, `benchmarks/concurrency.py --json` and latency tables hold, read and checked."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class ReportError(ValueError):
    """A file is no run; the message names it, the place and what was expected."""


class Spread(NamedTuple):
    """A median over repeats, with the least and the most."""

    median: float
    low: float
    high: float


NOTHING = Spread(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """One setting's figures, as `selfspec.bench.result` writes them.

    Attributes:
        name: "ar", another mode, or a baseline ("hf...").
        error: why it has none.
        ms, ms_whole: a token, decode-only and end to end.
        total, each: tokens a second, of all requests end to end and of one while it decodes.
        speedup: over each reference, decode-only.
        match: share of answers that are plain decoding's.
        memory: bytes beyond the weights at the peak; 0 where it wasn't measured.
        tau, mean_tau, tpf: None where there are no rounds.
        accepted: tokens a round -> rounds.
        ceiling: the most tokens that a round can give.
        acceptance: conditional, by position.
        round_ms: a round's parts.
    """

    name: str
    error: str | None = None
    ms: Spread = NOTHING
    ms_whole: Spread = NOTHING
    total: Spread = NOTHING
    each: Spread | None = None
    speedup: dict[str, Spread] = field(default_factory=dict)
    match: float | None = None
    memory: int = 0
    tau: float | None = None
    mean_tau: float | None = None
    tpf: float | None = None
    accepted: dict[int, int] = field(default_factory=dict)
    ceiling: int = 1
    acceptance: tuple[float, ...] = ()
    round_ms: dict[str, Spread] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """Whether a round can give more than one token."""
        return self.ceiling > 1


@dataclass(frozen=True)
class Run:
    """One bench run.

    Attributes:
        title: model, dtype and device.
        facts: settings and versions, for the page.
        suites: name -> requests at a time -> rows.
        complete: False where the run was stopped.
    """

    title: str
    facts: dict[str, Any]
    suites: dict[str, dict[int, list[Row]]]
    complete: bool = True


@dataclass(frozen=True)
class Table:
    """Measured forward times.

    Attributes:
        title: model, dtype, machine.
        facts: likewise.
        points: kind, requests, rows, entry, context, ms (and low, high).
    """

    title: str
    facts: dict[str, Any]
    points: list[dict[str, Any]]


def read(path: Path) -> list[Run | Table]:
    """What one file holds.

    Raises:
        ReportError: no such file, damaged, or something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"no file at {path}") from None
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{path} cannot be read as JSON ({error}); write it again with selfspec bench --json"
        ) from None
    parts = data if isinstance(data, list) and data else [data]
    return [_part(part, f"{path}, part {i}" if len(parts) > 1 else str(path)) for i, part in enumerate(parts)]


def _part(data: Any, where: str) -> Run | Table:
    if isinstance(data, dict) and data.get("kind") == "bench":
        return _run(data, where)
    if isinstance(data, dict) and "points" in data and "names" in data:
        return _contest(data, where)
    if isinstance(data, dict) and "points" in data:
        return _table(data, where)
    found = f"the keys {', '.join(list(data)[:6]) or '(none)'}" if isinstance(data, dict) else type(data).__name__
    raise ReportError(
        f'{where} is neither a bench run ("kind": "bench") nor a contest ("names") nor a latency table ("points"): '
        f"found {found}; pass what selfspec bench --json wrote"
    )


def _run(data: dict[str, Any], where: str) -> Run:
    suites: dict[str, dict[int, list[Row]]] = {}
    place = where
    try:
        for suite in data["suites"]:
            place = f"{where}, suite {suite['suite']!r}, {suite['concurrency']} at a time"
            rows = [_row(r) for r in suite["results"]]
            suites.setdefault(str(suite["suite"]), {})[int(suite["concurrency"])] = rows
        place = where
        settings = dict(data["settings"])
        title = f"{settings['model']}, {data['dtype']}, {data['device']}"
        facts = settings | {k: v for k, v in data.items() if k not in ("suites", "settings", "kind", "complete")}
        if not any(suites.values()):
            raise ReportError(f"{where} holds no results: the run was stopped before its first suite ended")
        return Run(title, facts, suites, bool(data["complete"]))
    except KeyError as error:
        raise ReportError(f"{place}: damaged, it lacks {error}") from None
    except (TypeError, AttributeError) as error:
        raise ReportError(f"{place}: damaged ({error})") from None
    except ReportError:
        raise
    except ValueError as error:
        raise ReportError(f"{place}: damaged ({error})") from None


def _contest(data: dict[str, Any], where: str) -> Run:
    """Runs of entrants that took turns; a repeat's speed-up is over the plain decoding of that repeat."""
    sizes: dict[int, list[Row]] = {}
    place = where
    try:
        for point in data["points"]:
            place = f"{where}, {point['slots']} slots"
            runs: dict[str, list[dict[str, Any]]] = {}
            for r in point["runs"]:
                runs.setdefault(str(r["name"]), []).append(r)
            sizes[int(point["slots"])] = [_entrant(n, runs[n], runs["ar"]) for n in data["names"] if n in runs]
        place = where
        settings = dict(data["settings"])
        title = f"{settings['model']}, {data['dtype']}, {data['device']}"
        facts = settings | {k: v for k, v in data.items() if k not in ("points", "record", "settings", "names")}
    except KeyError as error:
        raise ReportError(f"{place}: damaged, it lacks {error}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ReportError(f"{place}: damaged ({error})") from None
    if not sizes:
        raise ReportError(f"{where} holds no results: the run was stopped before its first point ended")
    return Run(title, facts, {"mixed queue": sizes})


def _entrant(name: str, runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> Row:
    def over(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    return Row(
        name,
        ms=over([1e3 / r["decode_rate"] for r in runs]),
        ms_whole=over([1e3 / r["rate"] for r in runs]),
        total=over([float(r["rate"]) for r in runs]),
        each=over([float(r["each"]) for r in runs]),
        speedup={"ar": over([r["decode_rate"] / p["decode_rate"] for r, p in zip(runs, plain)])},
    )


def _row(r: dict[str, Any]) -> Row:
    name = str(r["name"])
    if "error" in r:
        return Row(name, str(r["error"]))
    rounds: dict[str, Any] = {}
    if "tau" in r:
        rounds = {
            "tau": float(r["tau"]),
            "mean_tau": float(r["mean_tau"]),
            "tpf": float(r["tpf"]),
            "accepted": {int(r["ceiling"]): 0} | {int(k): int(n) for k, n in r["accepted"].items()},
            "ceiling": int(r["ceiling"]),
            "acceptance": tuple(map(float, r["conditional_acceptance"])),
            "round_ms": {str(k): _spread(v) for k, v in r.get("round_ms", {}).items()},
        }
    return Row(
        name,
        None,
        _spread(r["ms_per_token"]),
        _spread(r["ms_per_token_end_to_end"]),
        _spread(r["tokens_per_second"]),
        _spread(r["tokens_per_second_request"]) if "tokens_per_second_request" in r else None,
        {str(k): _spread(v) for k, v in r["speedup"].items()},
        None if r["match_rate_to_ar"] is None else float(r["match_rate_to_ar"]),
        int(r["peak_memory"]),
        **rounds,
    )


def _spread(value: dict[str, Any]) -> Spread:
    return Spread(*(float(value[k]) for k in ("median", "min", "max")))


def _table(data: dict[str, Any], where: str) -> Table:
    points = []
    for i, point in enumerate(data["points"] if isinstance(data["points"], list) else [None]):
        needed = dict.fromkeys(("requests", "rows", "context", "ms"), int | float) | {"kind": str}
        wrong = [k for k, t in needed.items() if not isinstance(point, dict) or not isinstance(point.get(k), t)]
        if wrong:
            raise ReportError(f"{where}, point {i}: damaged, it lacks {', '.join(wrong)}")
        points.append({"entry": 0, "drafts": 0, **point})
    if not points:
        raise ReportError(f"{where} holds no points")
    setting = data.get("setting")
    data = {
        **(setting if isinstance(setting, dict) else {}),
        **{k: v for k, v in data.items() if k != "setting"},
    }  # as selfspec profile nests it
    facts = {k: v for k, v in data.items() if k != "points"}
    machine = data.get("machine", data.get("device"))
    named = [data.get("model"), data.get("dtype"), machine, data.get("backend"), data.get("compile") and "compiled"]
    return Table("forward times: " + ", ".join(str(n) for n in named if n), facts, points)
