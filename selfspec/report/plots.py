"""Which plots a bench run or a latency table has, and how each is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from selfspec.report.drawing import COLOURS, Plot, ink, legend, look
from selfspec.report.read import NOTHING, Row, Run, Spread, Table

PARTS = {"draft": COLOURS[1], "verify": COLOURS[0], "rest": COLOURS[2], "between": COLOURS[5]}


@dataclass(frozen=True)
class Section:
    """One run or table, and its plots by suite (a table's by its title)."""

    part: Run | Table
    groups: dict[str, list[Plot]]

    @property
    def plots(self) -> list[Plot]:
        """All of them."""
        return [plot for group in self.groups.values() for plot in group]


def section(part: Run | Table, index: int) -> Section:
    """The plots that a part has figures for; `index` makes their names unique."""
    if isinstance(part, Table):
        return Section(part, {part.title: [times(part, f"times-{index}")]})
    suites = enumerate(part.suites.items())
    return Section(part, {suite: _of_suite(suite, sizes, f"{index}-{i}") for i, (suite, sizes) in suites})


def _of_suite(suite: str, sizes: dict[int, list[Row]], key: str) -> list[Plot]:
    """The fewest requests at a time, where speculation matters most; then how it changes with more."""
    fewest, plots = min(sizes), []
    rows, at = [r for r in sizes[fewest] if r.error is None], f"{suite}, {fewest} at a time"
    if any(r.speedup for r in rows):
        plots.append(speedups(rows, at, f"speedup-{key}"))
    if any(r.round_ms for r in rows):
        plots.append(split([r for r in rows if r.round_ms], at, f"round-{key}"))
    drafting = [r for r in rows if r.drafts]
    if drafting:
        plots.append(acceptance(drafting, at, f"acceptance-{key}"))
        plots.append(histogram(drafting, at, f"histogram-{key}"))
    if len(sizes) > 1:
        plots.append(throughput(sizes, suite, f"throughput-{key}"))
        plots.append(gains(sizes, suite, f"gains-{key}"))
    return plots


def speedups(rows: list[Row], at: str, name: str) -> Plot:
    """Bars: how many times faster than plain decoding, and than `generate`."""
    known = {n for r in rows for n in r.speedup}
    over = [n for n in ("ar", next((r.name for r in rows if r.name.startswith("hf")), "")) if n in known]

    def draw(axes: Sequence[Axes]) -> None:
        for ax, base in zip(axes, over):
            values = [r.speedup[base] for r in rows]
            ax.barh(range(len(rows)), [v.median for v in values], 0.7, color=[look(r.name, 0)["color"] for r in rows])
            ax.errorbar(
                [v.median for v in values], range(len(rows)), xerr=_bars(values), fmt="none", ecolor=ink(), lw=1
            )
            for y, v in enumerate(values):
                ax.annotate(f"{v.median:.2f}", (v.high, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
            ax.axvline(1, color=ink(), lw=0.8)
            ax.set_yticks(range(len(rows)), [r.name for r in rows])
            ax.invert_yaxis()
            ax.margins(x=0.14)
            ax.set_title(f"times as fast as {base}, decode-only", fontsize=9, loc="left")

    said = "; ".join(f"{r.name} {', '.join(f'{r.speedup[b].median:.2f} x over {b}' for b in over)}" for r in rows)
    return Plot(name, f"Speed-up: {at}", said, draw, 0.6 + 0.2 * len(rows), len(over))


def histogram(rows: list[Row], at: str, name: str) -> Plot:
    """Bars: tokens a round; those of a round that took the whole block stand out."""

    def draw(axes: Sequence[Axes]) -> None:
        widest = max(max(r.accepted) for r in rows)
        for ax, r in zip(axes, rows):
            n = max(1, sum(r.accepted.values()))
            ks = sorted(r.accepted)
            bars = ax.bar(ks, [100 * r.accepted[k] / n for k in ks], 0.85, color=COLOURS[0])
            top = bars[ks.index(r.ceiling)]
            top.set(color=COLOURS[1], hatch="///", edgecolor=ink(), linewidth=0.5)
            share = f"{100 * r.accepted[r.ceiling] / n:.1f}% at the ceiling"
            ax.set_title(f"{r.name}: tau {r.tau:.2f}, {share}", fontsize=9, loc="left")
            ax.set_xlim(0.4, widest + 0.6)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_ylabel("% of rounds")
        axes[-1].set_xlabel("tokens a round (hatched: the whole block)")

    said = "; ".join(
        f"{r.name} tau {r.tau:.2f}, {r.accepted.get(r.ceiling, 0)} of {sum(r.accepted.values())} rounds took the whole "
        f"block of {r.ceiling}"
        for r in rows
    )
    return Plot(name, f"Tokens a round: {at}", said, draw, 1.5, len(rows))


def acceptance(rows: list[Row], at: str, name: str) -> Plot:
    """Lines: of the rounds that took all drafts before a position, the share that took its draft too."""

    def draw(axes: Sequence[Axes]) -> None:
        for j, r in enumerate(rows):
            xs = range(1, len(r.acceptance) + 1)
            axes[0].plot(xs, r.acceptance, **look(r.name, j), ms=4, lw=1.4, label=r.name)
        axes[0].set_ylim(0, 1.03)
        axes[0].set_xlabel("position in the draft")
        axes[0].set_ylabel("accepted, given all before")
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes[0])

    said = "; ".join(f"{r.name} {', '.join(f'{p:.2f}' for p in r.acceptance)}" for r in rows)
    return Plot(name, f"Acceptance by position: {at}", said, draw)


def split(rows: list[Row], at: str, name: str) -> Plot:
    """Stacked bars: what a round's time goes into."""
    parts = list(dict.fromkeys(k for r in rows for k in r.round_ms))

    def draw(axes: Sequence[Axes]) -> None:
        left = [0.0] * len(rows)
        for j, part in enumerate(parts):
            widths = [r.round_ms[part].median if part in r.round_ms else 0.0 for r in rows]
            axes[0].barh(
                range(len(rows)), widths, 0.6, left, color=PARTS.get(part, COLOURS[(j + 3) % len(COLOURS)]), label=part
            )
            left = [a + b for a, b in zip(left, widths)]
        axes[0].set_yticks(range(len(rows)), [r.name for r in rows])
        axes[0].invert_yaxis()
        axes[0].set_xlabel("ms a round")
        legend(axes[0])

    said = "; ".join(f"{r.name} {', '.join(f'{k} {v.median:.2f} ms' for k, v in r.round_ms.items())}" for r in rows)
    return Plot(name, f"Where a round's time goes: {at}", said, draw, 1.0 + 0.32 * len(rows))


def throughput(sizes: dict[int, list[Row]], suite: str, name: str) -> Plot:
    """Lines: what one request sees against what all get together, as more run at a time. Where `auto` is there, so is
    the frontier of everything else: settings that no other one beats for one request and for all."""
    lines = {n: line for n, line in _by_name(sizes).items() if all(r.each for _, r in line)}
    best = _frontier([(m, *at) for m, line in lines.items() if m != "auto" for at in line]) if "auto" in lines else []

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        for j, (mode, line) in enumerate(lines.items()):
            xs, ys = [r.each.median for _, r in line if r.each], [r.total.median for _, r in line]
            ax.plot(xs, ys, **look(mode, j), ms=5, lw=1.4, label=mode)
            for (size, _), x, y in zip(line, xs, ys):
                ax.annotate(str(size), (x, y), (4, 4), textcoords="offset points", fontsize=7)
        if best:
            xs, ys = [r.each.median for *_, r in best if r.each], [r.total.median for *_, r in best]
            ax.plot(xs, ys, "--", color=ink(), lw=0.9, label="frontier without auto")
        ax.set_xlabel("tokens/s of one request, decoding")
        ax.set_ylabel("tokens/s of all, end to end")
        ax.set_ylim(bottom=0)
        ax.margins(x=0.1)
        legend(ax)

    said = "; ".join(f"{mode} {', '.join(_both(size, r) for size, r in line)}" for mode, line in lines.items())
    said += f"; frontier without auto: {', '.join(f'{m} at {size}' for m, size, _ in best)}" if best else ""
    return Plot(name, f"One request against all (numbers: requests at a time): {suite}", said, draw, 3.0)


def _frontier(settings: list[tuple[str, int, Row]]) -> list[tuple[str, int, Row]]:
    """Modes and sizes that no other one beats in both, the fastest for one request first."""
    out: list[tuple[str, int, Row]] = []
    for at in sorted(settings, key=lambda at: (-(at[2].each or NOTHING).median, -at[2].total.median)):
        if not out or at[2].total.median > out[-1][2].total.median:
            out.append(at)
    return out


def _both(size: int, r: Row) -> str:
    each = r.each.median if r.each else 0.0
    return f"{each:.1f} tokens/s each and {r.total.median:.1f} in all at {size}"


def gains(sizes: dict[int, list[Row]], suite: str, name: str) -> Plot:
    """Lines: speed-up over plain decoding at the same number of requests."""
    lines = {n: [(s, r.speedup["ar"]) for s, r in line if "ar" in r.speedup] for n, line in _by_name(sizes).items()}

    def draw(axes: Sequence[Axes]) -> None:
        for j, (mode, line) in enumerate(lines.items()):
            xs, values = [s for s, _ in line], [v for _, v in line]
            style: dict[str, Any] = {**look(mode, j), "ms": 4, "lw": 1.4, "capsize": 2}
            axes[0].errorbar(xs, [v.median for v in values], yerr=_bars(values), label=mode, **style)
        ticks = sorted(sizes)
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks(ticks, list(map(str, ticks)))
        axes[0].minorticks_off()
        axes[0].set_ylim(bottom=0)
        axes[0].set_xlabel("requests at a time")
        axes[0].set_ylabel("times as fast as ar")
        legend(axes[0])

    said = "; ".join(f"{n} {', '.join(f'{v.median:.2f} x at {s}' for s, v in line)}" for n, line in lines.items())
    return Plot(name, f"Speed-up as more run at a time: {suite}", said, draw)


def times(table: Table, name: str) -> Plot:
    """Lines: a forward's time against the context, or against its rows where only one context was measured."""
    x, other = ("context", "rows") if len({p["context"] for p in table.points}) > 1 else ("rows", "context")
    few = min(p["requests"] for p in table.points)
    points = [p for p in table.points if x == "rows" or p["requests"] == few]  # more lines than that are no plot
    launches = {p.get("graph") for p in points}
    lines: dict[str, list[dict[str, Any]]] = {}
    for p in points:
        key = p["kind"] if p["kind"] == "clean" else f"{p['kind']} from layer {p['entry']}"
        key += f", {p['requests']} request{'s' * (p['requests'] > 1)}"
        key += f" of {p['rows']}" if x == "context" else ""
        key += f" + {p['drafts']}" if p["drafts"] else ""
        key += "" if len(launches) == 1 else ", graph" if p.get("graph") else ", eager"
        lines.setdefault(key, []).append(p)
    fixed = f", {other} {table.points[0][other]}" if x == "rows" else ""

    def draw(axes: Sequence[Axes]) -> None:
        for j, (label, points) in enumerate(lines.items()):
            points = sorted(points, key=lambda p: p[x])
            xs, ys = [p[x] for p in points], [p["ms"] for p in points]
            dash = "-" if points[0]["kind"] == "clean" else "--"
            axes[0].plot(xs, ys, dash, **look(label, j), ms=4, lw=1.2, label=label)
        ticks = sorted({p[x] for p in table.points})
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks(ticks, list(map(str, ticks)))
        axes[0].minorticks_off()
        axes[0].set_ylim(bottom=0)
        axes[0].set_xlabel("committed positions" if x == "context" else "rows a request")
        axes[0].set_ylabel("ms a forward")
        legend(axes[0], columns=1 if len(lines) < 3 else 2)

    figures = {n: ", ".join(f"{p[x]} {x} {p['ms']:.3f} ms" for p in ps) for n, ps in lines.items()}
    said = "; ".join(f"{n}: {words}" for n, words in figures.items())
    what = "context length" if x == "context" else "rows"
    return Plot(name, f"Time against {what}{fixed}", said, draw, 2.4 + 0.1 * len(lines))


def _by_name(sizes: dict[int, list[Row]]) -> dict[str, list[tuple[int, Row]]]:
    """Rows that did not fail, by name, with the number of requests at a time."""
    lines: dict[str, list[tuple[int, Row]]] = {}
    for size in sorted(sizes):
        for r in sizes[size]:
            if r.error is None:
                lines.setdefault(r.name, []).append((size, r))
    return lines


def _bars(values: list[Spread]) -> list[list[float]]:
    return [[v.median - v.low for v in values], [v.high - v.median for v in values]]
