"""`selfspec report`: bench runs, contests and latency tables on one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from selfspec.report.read import read
from selfspec.terminal import refusing, say


def run(files: Sequence[Path], output: Path, png: Path | None = None) -> int:
    """Draw files on one page, and the plots as pictures into a folder. Refuses what it cannot read before it writes."""
    with refusing():
        parts = [part for file in files for part in read(file)]
        try:
            from selfspec.report import drawing, page, plots
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"plots need {error.name}: pip install 'selfspec[report]'") from error
    sections = [plots.section(part, i) for i, part in enumerate(parts)]
    output.write_text(page.page(sections), encoding="utf-8")
    drawn = [plot for section in sections for plot in section.plots]
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for plot in drawn:
            drawing.png(plot, png / f"{plot.name}.png")
    say(f"{output}: {len(parts)} runs, {len(drawn)} plots" + (f"; pictures in {png}" if png else ""))
    return 0
