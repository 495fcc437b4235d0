"""Drawings that a page and a picture share, with matplotlib.

Inks that follow the page's light or dark scheme are drawn in marked colours, which the SVG then names as CSS variables.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

INK, GRID = "#010203", "#040506"  # marks, replaced by var(--ink) and var(--grid)
# Seen on white and on near-black: at least 3 to 1 against both; told apart by the colour-blind, with markers beside.
COLOURS = ("#3b82c4", "#c9760a", "#2a9d72", "#a565c8", "#d0505a", "#7d8590", "#2596a5", "#94803a")
MARKERS = "osD^vPX*"
MODES = ("sequential", "lookup", "overlap", "tree", "overlap+tree", "ar", "hf", "hf-compile", "hf-lookup")
WIDTH = 4.7  # inches: its text stays readable in 340 pixels
LINE = 50  # characters of a title in it


@dataclass(frozen=True)
class Plot:
    """One drawing.

    Attributes:
        name: unique on the page, fit for a file name.
        title: what it shows.
        alt: the same figures in words.
        draw: onto axes, one below the other.
        height: inches of one of them.
        axes: how many.
    """

    name: str
    title: str
    alt: str
    draw: Callable[[Sequence[Axes]], None]
    height: float = 2.6
    axes: int = 1


def svg(plot: Plot) -> str:
    """Inline SVG that names itself to a screen reader and takes its inks from the page."""
    text = io.StringIO()
    _figure(plot, INK, GRID, "none", {"svg.fonttype": "none", "svg.hashsalt": plot.name}, text, format="svg")
    body = text.getvalue()[text.getvalue().index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="', f'id="{plot.name}-', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{plot.name}-", body)
    body = body.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    size = re.search(r'viewBox="([^"]*)"', body)
    assert size is not None
    head = f'<svg viewBox="{size[1]}" role="img" aria-labelledby="{plot.name}-t {plot.name}-d" '
    head += 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    head += f'<title id="{plot.name}-t">{escape(plot.title)}</title><desc id="{plot.name}-d">{escape(plot.alt)}</desc>'
    return head + body[body.index(">") + 1 :]


def png(plot: Plot, file: Path) -> None:
    """A picture on white, with its title."""
    _figure(plot, "#1c2127", "#d5d9de", "white", {}, file, title=plot.title, format="png", dpi=160)


def _figure(
    plot: Plot, own: str, grid: str, back: str, style: dict[str, Any], out: Any, title: str = "", **how: Any
) -> None:
    inks = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "hatch.color")
    edges = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
    looks: dict[Any, Any] = dict.fromkeys(inks, own) | dict.fromkeys(edges, grid) | {"axes.facecolor": "none"}
    looks |= {"font.size": 9, "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False}
    looks |= {"axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.6, "hatch.linewidth": 0.6}
    looks |= {"legend.frameon": False, "text.parse_math": False} | style  # a $ in a name is a $
    with mpl.rc_context(looks):
        lines = textwrap.wrap(title, LINE)
        heights = [0.1 + 0.16 * len(lines), plot.height * plot.axes]
        figure = Figure((WIDTH, heights[1] + heights[0] * bool(lines)), layout="constrained")
        part: FigureBase = figure
        if lines:  # in a part of its own: a legend takes the top of the other
            parts: Any = figure.subfigures(2, 1, height_ratios=heights)
            top, part = parts
            top.text(0.02, 0.5, "\n".join(lines), va="center", weight="bold")
        axes = list(part.subplots(plot.axes, squeeze=False)[:, 0])
        plot.draw(axes)
        figure.savefig(out, facecolor=back, metadata={"Date": None} if how["format"] == "svg" else None, **how)


def ink() -> str:
    """The scheme's own ink, while a plot draws."""
    return mpl.rcParams["text.color"]


def look(name: str, j: int) -> dict[str, Any]:
    """Colour and marker: a mode has the same on every plot, other names take the j-th but plain decoding's."""
    j = MODES.index(name) if name in MODES else j + (j >= MODES.index("ar"))
    return {"color": COLOURS[j % len(COLOURS)], "marker": MARKERS[j % len(MARKERS)]}


def legend(ax: Axes, columns: int = 4) -> None:
    """Above the axes, so that it covers nothing, in as many columns as its names leave room for."""
    longest = max(map(len, ax.get_legend_handles_labels()[1]), default=0)
    columns = max(1, min(columns, 70 // (longest + 6)))
    ax.figure.legend(
        *ax.get_legend_handles_labels(), loc="outside upper left", ncols=columns, fontsize=8, columnspacing=1.2
    )
