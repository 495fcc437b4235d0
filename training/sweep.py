"""An ablation in one command: rows of changed fields, trained one after another on the same data for the same minutes.

A sweep file says what all rows share, and stages of axes whose options are crossed:

    base: {model: smollm2-135m-instruct, data: answers, minutes: 4}
    stages:
      - name: path
        axes:
          entry: {e0: {adapter.entry: 0}, e20: {adapter.entry: 20}}
          tuning: {copy: {}, lora64: {adapter.tuning: lora, adapter.rank: 64}}
      - name: objectives
        axes:
          loss: {ce: {objectives: {ce: 1.0}}, dpace: {objectives: {ce: 1.0, dpace: 0.3}}}

A stage starts from the fields of the best row of the stage before it: the one with the least predicted time per token,
or, without a latency table, with the greatest tau. Every row runs in a process of its own, so that one that crashes is
a row with its error, and a row that has finished is not run again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec.terminal import say, show_table
from selfspec.training.config import TrainConfig, read_file

COLUMNS = ("tau", "tau_t1", "tau_hidden", "tau_t1_hidden", "ms_token", "mb", "anchors_s", "mfu", "memory_gib", "steps")


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        stage: that it belongs to.
        name: the options that it combines.
        fields: as on the command line, dotted where they are nested.
    """

    stage: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Where it is trained: another one as soon as a field is another."""
        digest = hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()
        return f"{self.stage}/{self.name}-{digest[:8]}"


def rows_of(stage: dict[str, Any], base: dict[str, Any]) -> Iterator[Row]:
    """Every combination of a stage's options, over the fields that it starts from."""
    axes = stage["axes"]
    for options in itertools.product(*(axis.items() for axis in axes.values())):
        fields = dict(base)
        for _, changes in options:
            for name in changes:  # a mapping replaces what was set inside it before, too
                for old in [k for k in fields if k.startswith(f"{name}.")]:
                    del fields[old]
            fields |= changes
        yield Row(stage["name"], "-".join(name for name, _ in options), fields)


def run(
    file: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    train: Callable[[Path, TrainConfig], str] | None = None,
) -> int:
    """Train the rows of a sweep that are not there yet, print the table, and write it to `OUT/sweep.json`.

    Args:
        file: the sweep.
        config: fields that all rows share; the sweep's own `base` stands over it.
        overrides: `key=value` that stand over both.
        train: trains a row in its folder and returns an error or "".

    Returns:
        1 where a row failed.

    Raises:
        ValueError: something in the file does not exist or does not fit, before anything is run.
    """
    sweep = read_file(file)
    if unknown := sorted(set(sweep) - {"base", "stages", "latency"}):
        raise ValueError(f"{file}: unknown fields {', '.join(unknown)}; a sweep holds base, stages and latency")
    given = read_file(config) if config else {}
    shared = TrainConfig.load(None, overrides, start=given | _nested(sweep.get("base", {}))).to_dict()
    if not shared["model"] or not shared["data"]:
        raise ValueError(f"{file}: name a model and data, in base or as model=FOLDER data=ANSWERS")
    for stage in sweep["stages"]:
        for row in rows_of(stage, {}):
            try:
                settings(shared, row, "")
            except ValueError as wrong:
                raise ValueError(f"{file}, stage {stage['name']}, row {row.name}: {wrong}") from None
    out = Path(shared["out"])
    table = Forwards.load(sweep["latency"]) if sweep.get("latency") else None
    results: list[dict[str, Any]] = []
    start: dict[str, Any] = {}
    for stage in sweep["stages"]:
        ended = []
        for row in rows_of(stage, start):
            folder = out / row.folder
            wanted = settings(shared, row, str(folder))
            error = "" if finished(folder) else (train or in_a_process)(folder, wanted)
            result = {"stage": row.stage, "row": row.name, "fields": row.fields}
            result |= {"error": error} if error else measured(folder, wanted, table)
            results.append(result)
            if not error:
                ended.append((better(result), row))
            say(f"{row.stage} {row.name}: {error or {k: result.get(k) for k in COLUMNS[:5]}}")
            out.mkdir(parents=True, exist_ok=True)
            (out / "sweep.json").write_text(json.dumps({"base": shared, "rows": results}, indent=1) + "\n")
        if ended:
            start = max(ended, key=lambda pair: pair[0])[1].fields
    show(results)
    return int(any("error" in r for r in results))


def settings(shared: dict[str, Any], row: Row, folder: str) -> TrainConfig:
    """A row's configuration; it goes on where it was stopped."""
    overrides = [f"{name}={json.dumps(value)}" for name, value in row.fields.items()]
    return TrainConfig.load(None, [*overrides, f"out={json.dumps(folder)}", "resume=true"], start=shared)


def in_a_process(folder: Path, wanted: TrainConfig) -> str:
    """Train a row in a process of its own. Returns the end of what it said where it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(wanted.to_dict(), indent=1))
    command = [sys.executable, "-P", "-m", "selfspec.training", "--config", str(folder / "config.json")]
    with open(folder / "output.txt", "w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if code == 0 and finished(folder):
        return ""
    said = (folder / "output.txt").read_text().strip().splitlines()
    return f"exit code {code}: {' '.join(said[-3:]) or 'it said nothing'}"


def finished(folder: Path) -> bool:
    """Whether a row's training came to its end."""
    return (folder / "report.json").exists()


def measured(folder: Path, wanted: TrainConfig, table: Forwards | None) -> dict[str, Any]:
    """What a finished row is worth."""
    report = json.loads((folder / "report.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [r for r in log if r["event"] == "step"]
    sets = list(report["eval"].values()) or [report["valid"]]

    def tau(layout: str, name: str) -> float | None:
        found = [s[layout][name] for s in sets if layout in s]
        return round(statistics.fmean(found), 4) if found else None

    out: dict[str, Any] = {"steps": report["step"]}
    for layout, suffix in (("known", ""), ("hidden", "_hidden")):
        out |= {f"{name}{suffix}": tau(layout, name) for name in ("tau", "tau_t1")}
    out["sets"] = report["eval"]
    out["mb"] = round(sum(f.stat().st_size for f in (folder / "adapter").iterdir()) / 1e6, 2)
    for name in ("anchors_s", "mfu", "memory_gib"):
        found = [r[name] for r in steps if name in r]
        out[name] = statistics.median(found) if found else None
    if table is not None:
        path = wanted.path
        out["ms_token"] = table.per_token(path.block_size, path.entry, out["tau"])
        block = path.block_size
        # bonus hidden: one forward of the chain and a group for each of its outcomes; all rows at full depth, at most
        verify = table.ms("clean", block + block * block)
        hidden = out["tau_hidden"]
        out["ms_token_hidden"] = round(verify / hidden, 4) if verify and hidden else None
    return out


def better(result: dict[str, Any]) -> float:
    """What the next stage's starting point is chosen by; the greater the better."""
    if result.get("ms_token"):
        return 1 / result["ms_token"]
    return result.get("tau") or result.get("tau_hidden") or 0.0


@dataclass(frozen=True)
class Forwards:
    """Measured forward times at batch 1.

    Attributes:
        clean: rows -> milliseconds.
        draft: entry layer -> rows -> milliseconds.
    """

    clean: dict[int, float]
    draft: dict[int, dict[int, float]]

    @classmethod
    def load(cls, file: str | Path) -> Forwards:
        """From the JSON of `benchmarks/forward_times.py`; of several kernels, those with most draft points.

        Raises:
            ValueError: it holds no draft times.
        """
        data = json.loads(Path(file).read_text())
        parts = []
        for part in data if isinstance(data, list) else [data]:
            points = [p for p in part["points"] if p["requests"] == 1]
            graph = any(p["graph"] for p in points)  # what decodes is a graph where there is one
            parts.append([p for p in points if p["graph"] == graph])
        best = max(parts, key=lambda points: sum(p["kind"] == "draft" for p in points), default=[])
        clean = {p["rows"]: p["ms"] for p in best if p["kind"] == "clean"}
        draft: dict[int, dict[int, float]] = {}
        for p in best:
            if p["kind"] == "draft":
                draft.setdefault(p["entry"], {})[p["rows"]] = p["ms"]
        if not clean or not draft:
            raise ValueError(f"{file} holds no clean and draft times of one request")
        return cls(clean, draft)

    def ms(self, kind: str, rows: int, entry: int = 0) -> float | None:
        """Time of a forward, interpolated between measured points; None outside of them."""
        if kind == "clean":
            return between(self.clean, rows)
        at = {e: t for e, points in self.draft.items() if (t := between(points, rows)) is not None}
        return between(at, entry)

    def per_token(self, block: int, entry: int, tau: float | None) -> float | None:
        """Milliseconds per token of sequential rounds: draft a block, verify it as a chain."""
        draft, verify = self.ms("draft", block, entry), self.ms("clean", block)
        return round((draft + verify) / tau, 4) if draft and verify and tau else None


def between(points: dict[int, float], x: int) -> float | None:
    """Linear interpolation; None outside the points."""
    below, above = max((p for p in points if p <= x), default=None), min((p for p in points if p >= x), default=None)
    if below is None or above is None:
        return None
    share = 0.0 if above == below else (x - below) / (above - below)
    return (1 - share) * points[below] + share * points[above]


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""

    def cell(result: dict[str, Any], name: str) -> str:
        value = result.get(name)
        return "-" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"

    heading = ["stage", "row", *(name.replace("_", " ") for name in COLUMNS)]
    body = []
    for r in results:
        cells = ["failed"] * len(COLUMNS) if "error" in r else [cell(r, name) for name in COLUMNS]
        body.append([r["stage"], r["row"], *cells])
    show_table(heading, body)
    for r in results:
        if "error" in r:
            say(f"{r['stage']} {r['row']}: {r['error']}")


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """`{"adapter.entry": 3}` -> `{"adapter": {"entry": 3}}`, so that a sweep's base may be written either way."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        *path, leaf = name.split(".")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at[leaf] = value
    return out
