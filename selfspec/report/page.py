"""One HTML page: tables, settings and plots, with nothing to load. It follows the reader's light or dark scheme, prints
on white, and scrolls wide tables rather than itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from selfspec import __version__
from selfspec.report.drawing import Plot, svg
from selfspec.report.plots import Section
from selfspec.report.read import Row, Run, Spread

STYLE = Path(__file__).with_name("style.css")


def page(sections: Sequence[Section]) -> str:
    """The whole page."""
    runs = [s.part for s in sections if isinstance(s.part, Run)]
    body = ["<h1>selfspec report</h1>"]
    if runs:
        body += [_introduction(), _best(runs)]
    for s in sections:
        body.append(f"<section><h2>{escape(s.part.title)}</h2>")
        if isinstance(s.part, Run) and not s.part.complete:
            body.append('<p class="bad">This run was stopped before its end; what it had measured is here.</p>')
        for name, plots in s.groups.items():
            body.append(f"<h3>{escape(name)}</h3>" if isinstance(s.part, Run) else "")
            body.append(_plots(plots))
            body.append(_figures(name, s.part.suites[name]) if isinstance(s.part, Run) else "")
        body += [_facts(s.part.facts), "</section>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<meta name="generator" content="selfspec {__version__}"><title>selfspec report</title>'
        f"<style>{STYLE.read_text()}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _introduction() -> str:
    return (
        '<p class="soft">Medians over repeats, with the least and the most. Times per token are decode-only unless '
        "said otherwise: without the prefill and the tokens that it gives. <b>tau</b>: tokens that a verified round "
        "emits, summed over requests (mean: over answers). <b>TPF</b>: tokens per forward of the backbone. <b>ar</b>: "
        "plain decoding by the same engine; <b>= ar</b>: share of answers that are its own, token for token. "
        "<b>hf</b>: <code>generate</code> of transformers, in static batches. <b>each</b>: tokens/s of one request.</p>"
    )


def _best(runs: list[Run]) -> str:
    """Each suite's fastest mode at the fewest requests at a time, over all runs."""
    rows = []
    for run in runs:
        for suite, sizes in run.suites.items():
            fewest = min(sizes)
            good = [r for r in sizes[fewest] if r.error is None and not r.name.startswith("hf")]
            if good:
                r = min(good, key=lambda r: r.ms.median)
                hf = next((n for n in r.speedup if n.startswith("hf")), None)
                gains = [r.speedup.get("ar"), r.speedup[hf] if hf else None]
                cells = [escape(run.title), _text(suite), str(fewest), f"<b>{escape(r.name)}</b>", _number(r.tau)]
                rows.append([*cells, _spread(r.ms), *(_spread(g) for g in gains)])
    heading = ["run", "suite", "at a time", "fastest mode", "tau", "ms/token", "x ar", "x hf"]
    return "<h2>Fastest modes</h2>" + _table(heading, [rows], "Fastest mode of every run and suite")


def _figures(suite: str, sizes: dict[int, list[Row]]) -> str:
    """All figures of a suite."""
    over = list(dict.fromkeys(n for rows in sizes.values() for r in rows for n in r.speedup))
    gains = [f"x {n}" for n in over]
    heading = ["mode", "at a time", "ms/token", *gains, "tau", "mean", "TPF", "= ar", "tokens/s", "each", "end to end"]
    groups = []
    for size in sorted(sizes):
        fastest = min((r.ms.median for r in sizes[size] if r.error is None), default=0.0)
        groups.append([_cells(r, size, over, r.error is None and r.ms.median == fastest) for r in sizes[size]])
    return _table([*heading, "MiB"], groups, f"Figures of {suite}")


def _cells(r: Row, size: int, over: list[str], best: bool) -> list[str]:
    if r.error is not None:
        return [
            escape(r.name),
            str(size),
            f'<td class="text bad" colspan="{9 + len(over)}">failed: {escape(r.error)}</td>',
        ]
    ms = f'<td class="best">{_spread(r.ms)}</td>' if best else _spread(r.ms)
    rounds = [_number(r.tau), _number(r.mean_tau), _number(r.tpf), _number(r.match, 3)]
    speeds = [_spread(r.total, 1), _spread(r.each, 1), _number(r.ms_whole.median)]
    memory = f"{r.memory / 2**20:,.0f}" if r.memory else ""
    return [escape(r.name), str(size), ms, *(_spread(r.speedup.get(n)) for n in over), *rounds, *speeds, memory]


def _table(heading: Iterable[str], groups: list[list[list[str]]], label: str) -> str:
    """A table that scrolls by itself, in groups of rows; cells are HTML, the first one of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heading)
    bodies = "".join(f"<tbody>{''.join(map(_line, rows))}</tbody>" for rows in groups)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}"><table><thead><tr>{head}</tr>'
        f"</thead>{bodies}</table></div>"
    )


def _line(row: list[str]) -> str:
    cells = "".join(c if c.startswith("<td") else f"<td>{c}</td>" for c in row[1:])
    return f'<tr><th scope="row">{row[0]}</th>{cells}</tr>'


def _text(value: str) -> str:
    return f'<td class="text">{escape(value)}</td>'


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _spread(value: Spread | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value.median:.{digits}f} <small>{value.low:.{digits}f}–{value.high:.{digits}f}</small>"


def _plots(plots: list[Plot]) -> str:
    figures = (f"<figure><figcaption>{escape(p.title)}</figcaption>{svg(p)}</figure>" for p in plots)
    return f'<div class="plots">{"".join(figures)}</div>'


def _facts(facts: dict[str, Any]) -> str:
    """Settings and versions."""
    shown = {k: v for k, v in facts.items() if v is not None}
    items = "".join(f"<dt>{escape(k.replace('_', ' '))}</dt><dd>{_value(k, v)}</dd>" for k, v in shown.items())
    return f"<h3>Settings</h3><dl>{items}</dl>"


def _value(name: str, value: Any) -> str:
    if name == "command":
        return f"<code>{escape(str(value))}</code>"
    return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))
