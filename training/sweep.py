"""An ablation in one command: rows of changed fields, trained on the same data for the same minutes.

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
a row with its error; the rows of a stage run at once where there are several GPUs. A configuration is trained once:
an option that changes nothing lists the row that it equals, and a result that stands in `OUT/sweep.json` is taken over,
wherever it was made.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from selfspec.adapters import MaskPathConfig
from selfspec.terminal import say, show_table
from selfspec.training.config import TrainConfig, read_file
from selfspec.training.forwards import Forwards, find
from selfspec.training.jobs import Job, Row, finished, in_a_process, places, together

COLUMNS = (
    "tau", "tau_t1", "tau_hidden", "tau_t1_hidden", "ms_token", "ms_token_hidden", "mb", "anchors_s", "mfu",
    "memory_gib", "steps",
)  # fmt: skip
HERE = ("out", "device", "resume", "tensorboard", "turn")  # fields that say where a row is trained, and not what
REFUSED = "refused"  # begins the key of a row that cannot be trained

Result = dict[str, Any]


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
    train: Callable[..., str] = in_a_process,
    only: Sequence[str] = (),
    until: float | None = None,
    jobs: int | None = None,
    ahead: bool = False,
) -> int:
    """Train the rows of a sweep that are not there yet, print the table, and write it to `OUT/sweep.json`.

    Args:
        file: the sweep.
        config: fields that all rows share; the sweep's own `base` stands over it.
        overrides: `key=value` that stand over both.
        train: trains a row in its folder, on a GPU if one is named, and returns an error or ""; `in_a_process`.
        only: stages whose rows may be trained; none means all.
        until: minutes after which no row is begun.
        jobs: rows of a stage that are trained at once; None is one for each GPU, or one.
        ahead: let the next row of a place load and compile while one trains there, and train while that one evaluates:
            a row costs its minutes alone, of which neighbours take some steps.

    Returns:
        1 where a row failed.

    Raises:
        ValueError: something in the file does not exist or does not fit, before anything is run; or a stage of `only`
            starts from rows that are not trained yet.
    """
    began = time.monotonic()
    sweep, shared = opened(file, config, overrides)
    names = [stage["name"] for stage in sweep["stages"]]
    if unknown := sorted(set(only) - set(names)):
        raise ValueError(f"{file} has no stage {', '.join(unknown)}; it has {', '.join(names)}")
    latency = sweep.get("latency")
    book = Book(shared, find(latency, file, shared["model"]) if latency else None)
    where = places(shared["device"], jobs)
    if ahead and (shared["fit"] or len(set(where)) < len(where)):
        raise ValueError(
            "ahead: of the rows of a place one trains at a time, and none can find out what the place holds while "
            "another is there; set fit=0 and name no more jobs than GPUs"
        )
    if ahead:
        where, train = [*where, *where], partial(train, turns=book.out)
    start: dict[str, Any] = {}
    for stage in sweep["stages"]:
        mine = not only or stage["name"] in only
        rows = [book.job(row) for row in rows_of(stage, start)]
        todo: dict[str, Job] = {}
        for job in rows:
            if book.lacks(job) and mine:
                todo.setdefault(job.key, job)
        with closing(together(list(todo.values()), train, where, lambda: _late(began, until))) as ended:
            for job, error in ended:
                book.add(job, error)
        listed = [result for job in rows if (result := book.list(job))]
        book.write()
        if missing := len(rows) - len(listed):
            said = f"{file}, stage {stage['name']}: {missing} of {len(rows)} rows are not trained yet"
            later = [name for name in names[names.index(stage["name"]) + 1 :] if name in only]
            if later and not mine:
                raise ValueError(f"{said}, and stage {later[0]} starts from the best of them")
            say(f"{said}; the same command goes on with them")
            break
        start = best(listed) or start
    show(book.rows)
    return int(any("error" in r for r in book.rows))


def opened(file: Path, config: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sweep, and the fields that its rows share, every row checked as far as it is known."""
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
    return sweep, shared


def settings(shared: dict[str, Any], row: Row, folder: str) -> TrainConfig:
    """A row's configuration; it goes on where it was stopped."""
    overrides = [f"{name}={json.dumps(value)}" for name, value in row.fields.items()]
    return TrainConfig.load(None, [*overrides, f"out={json.dumps(folder)}", "resume=true"], start=shared)


def key_of(wanted: TrainConfig) -> str:
    """The same for two configurations that mean the same training, in whatever folder and on whatever device."""
    plain, default = TrainConfig().to_dict(), MaskPathConfig().to_dict()
    fields = {k: v for k, v in wanted.to_dict().items() if k not in HERE and v != plain[k]}
    fields["adapter"] = {k: v for k, v in wanted.path.to_dict().items() if v != default[k]}
    fields["objectives"] = sorted(map(repr, wanted.mix.terms))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


class Book:
    """The results of a sweep: those of earlier calls, and those to come.

    Args:
        shared: fields that all rows share.
        table: forward times that tokens are priced by, or None.

    Attributes:
        rows: results that are listed, in the sweep's order.
        known: results by the key of their row, listed or not.
    """

    def __init__(self, shared: dict[str, Any], table: Forwards | None):
        self.shared, self.table, self.out = shared, table, Path(shared["out"])
        self.file = self.out / "sweep.json"
        self.rows: list[Result] = []
        self.known: dict[str, Result] = {}
        if self.file.exists():
            kept = json.loads(self.file.read_text())
            found = [*kept.get("others", ()), *kept["rows"]]
            self.known = {r["key"]: r for r in found if not r.get("key", REFUSED).startswith(REFUSED)}

    def job(self, row: Row) -> Job:
        """What a row asks for. Where that does not go together with what it starts from it has failed."""
        try:
            key = key_of(settings(self.shared, row, ""))
        except ValueError as wrong:
            job = Job(row, f"{REFUSED} {row.stage} {row.name}", self.out, None)
            self.known[job.key] = _result(job) | {"error": str(wrong)}
            return job
        folder = self.out / row.stage / f"{row.name}-{key[:8]}"  # another one as soon as a field is another
        return Job(row, key, folder, settings(self.shared, row, str(folder)))

    def lacks(self, job: Job) -> bool:
        """Whether a row is still to be trained, as one that failed is."""
        done = "error" not in self.known.get(job.key, {"error": ""})
        if not done and finished(job.folder):  # by a call that ended before it could write that down
            self.add(job, "")
            done = True
        return not done and job.wanted is not None

    def add(self, job: Job, error: str) -> None:
        """Book a row that has ended."""
        result = self.known[job.key] = _result(job) | ({"error": error} if error else measured(job.folder))
        say(f"{result['stage']} {result['row']}: {error or {k: result[k] for k in COLUMNS[:4]}}")
        self.write()

    def list(self, job: Job) -> Result | None:
        """Put a row into the table. Returns it, or None where nothing is known of it."""
        known = self.known.get(job.key)
        if known is None:
            return None
        own = _result(job)
        result = own | {k: v for k, v in known.items() if k not in own and k != "same_as"}
        if same := next((r for r in self.rows if r["key"] == job.key), None):
            result["same_as"] = same["same_as"] if "same_as" in same else f"{same['stage']} {same['row']}"
        if job.wanted is not None and "error" not in result:
            result |= priced(result, job.wanted.path, self.table)
        self.rows.append(result)
        return result

    def write(self) -> None:
        """Write everything down; the file is whole at any moment."""
        listed = {r["key"] for r in self.rows}
        others = [r for key, r in self.known.items() if key not in listed]
        self.out.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({"base": self.shared, "rows": self.rows, "others": others}, indent=1) + "\n")
        os.replace(part, self.file)


def _result(job: Job) -> Result:
    return {"stage": job.row.stage, "row": job.row.name, "key": job.key, "fields": job.row.fields}


def _late(began: float, until: float | None) -> bool:
    return until is not None and time.monotonic() - began >= 60 * until


def measured(folder: Path) -> Result:
    """What a finished row is worth."""
    report = json.loads((folder / "report.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [r for r in log if r["event"] == "step"]
    sets = report["eval"] or {"valid": report["valid"]}

    def tau(layout: str, name: str) -> float | None:
        found = [s[layout][name] for s in sets.values() if layout in s]
        return round(statistics.fmean(found), 4) if found else None

    out: Result = {"steps": report["step"]}
    for layout, suffix in (("known", ""), ("hidden", "_hidden")):
        out |= {f"{name}{suffix}": tau(layout, name) for name in ("tau", "tau_t1")}
    out["sets"] = sets
    out["mb"] = round(sum(f.stat().st_size for f in (folder / "adapter").iterdir()) / 1e6, 2)
    for name in ("anchors_s", "mfu", "memory_gib"):
        found = [r[name] for r in steps if name in r]
        out[name] = statistics.median(found) if found else None
    return out


def priced(result: Result, path: MaskPathConfig, table: Forwards | None) -> Result:
    """What a token of a row costs by measured forward times; nothing without them.

    Bonus known, a round drafts and then verifies; bonus hidden, it verifies with groups beside it, which features from
    above the entry layer rule out.
    """
    if table is None:
        return {}
    overlaps = all(tap <= path.entry for tap in path.taps)
    found = [s["hidden"] for s in result["sets"].values() if "hidden" in s] if overlaps else []
    hidden = [(s["tau"], s["acceptance"]) for s in found]
    return {
        "ms_token": table.per_token(path.block_size, path.entry, result["tau"]),
        "ms_token_hidden": table.per_overlapped(path.block_size, path.entry, hidden),
    }


def best(results: Sequence[Result]) -> dict[str, Any] | None:
    """The fields that the next stage starts from: those of the cheapest tokens, or, where a row has no price, of the
    greatest tau. None where every row failed."""
    able = [r for r in results if "error" not in r]
    if not able:
        return None
    if all(r.get("ms_token") for r in able):
        return min(able, key=lambda r: r["ms_token"])["fields"]
    return max(able, key=lambda r: r["tau"] or r["tau_hidden"] or 0.0)["fields"]


def show(results: Sequence[Result]) -> None:
    """Print the table."""

    def cell(result: Result, name: str) -> str:
        value = result.get(name)
        return "-" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"

    heading = ["stage", "row", *(name.replace("_", " ") for name in COLUMNS)]
    body = []
    for r in results:
        cells = ["failed"] * len(COLUMNS) if "error" in r else [cell(r, name) for name in COLUMNS]
        name = f"{r['row']} (as {r['same_as']})" if "same_as" in r else r["row"]
        body.append([r["stage"], name, *cells])
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
