import copy
import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import tiny_chat

pytest.importorskip("matplotlib")

from matplotlib import pyplot as plt
from PIL import Image

from selfspec.report import drawing, page, plots
from selfspec.report.read import ReportError, Run, Table, read

CHROMIUM = shutil.which("chromium")


def spread(value):
    return {"median": value, "min": 0.9 * value, "max": 1.2 * value}


def row(name, ms, accepted=None, ceiling=1):
    """What bench writes of one setting; `accepted` of one that has rounds."""
    figures = {k: spread(ms) for k in ("ms_per_token", "ms_per_token_end_to_end")}
    figures |= {k: spread(1e3 / ms) for k in ("tokens_per_second", "tokens_per_second_request")}
    gains = {"ar": spread(2 / ms), "hf": spread(8 / ms)}
    out = {"name": name, **figures, "speedup": gains, "match_rate_to_ar": 1.0, "peak_memory": 3 * 2**20}
    if accepted:
        out |= {"tau": 2.5, "mean_tau": 2.25, "tpf": 1.25, "accepted": accepted, "ceiling": ceiling}
        out |= {"conditional_acceptance": [0.75, 0.5][: ceiling - 1]}
        out |= {"round_ms": {k: spread(v) for k, v in (("draft", 0.5), ("verify", 1.0), ("between", 0.25))}}
    return out


def run_file(file, sizes=(1, 4), complete=True, edit=None):
    """A bench run, `edit`ed before it is written."""
    drafting = row("sequential", 1.0, {"1": 5, "2": 3, "3": 12}, 3)
    rows = [row("ar", 2.0, {"1": 20}), drafting, row("hf", 8.0), {"name": "hf-compile", "error": 'E: <no> "such" &'}]
    suites = [{"suite": "a<b>$1$.jsonl", "concurrency": n, "results": copy.deepcopy(rows)} for n in sizes]
    data = {"kind": "bench", "command": "selfspec bench --limit 2", "complete": complete, "suites": suites}
    data |= {"settings": {"model": "tiny", "device": "cuda", "limit": None}, "dtype": "float32", "device": "GPU <x>"}
    if edit:
        edit(data)
    file.write_text(json.dumps(data))
    return file


def table_file(file, contexts=(512, 2048)):
    points = [
        {
            "kind": kind,
            "requests": 1,
            "rows": r,
            "entry": 2 * (kind == "draft"),
            "context": c,
            "graph": True,
            "ms": r + c,
        }
        for kind in ("clean", "draft")
        for r in (1, 16)
        for c in contexts
    ]
    file.write_text(json.dumps([{"model": "tiny", "points": points}]))
    return file


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Two runs and a latency table on one page, with pictures."""
    folder = tmp_path_factory.mktemp("report")
    files = [
        run_file(folder / "a.json"),
        run_file(folder / "b.json", (1,), complete=False),
        table_file(folder / "t.json"),
    ]
    ran = tiny_chat.run("report", *files, "-o", folder / "report.html", "--png", folder / "png")
    assert ran.exit_code == 0 and "3 runs, 11 plots" in ran.stderr
    return folder


class Page(HTMLParser):
    """Collects what a browser would load, what it would show, and the ids."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.ids, self.words, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.loaded += [
            v for k, v in attrs.items() if k in ("src", "href", "xlink:href") and not v.startswith(("#", "data:"))
        ]

    def handle_data(self, data):
        self.words.append(data)


def test_one_page_needs_nothing_else_and_says_all(drawn):
    text = (drawn / "report.html").read_text()
    seen = Page(text)
    assert not seen.loaded and not re.search(r"url\((?!#)|@import|<script", text)
    assert len(seen.ids) == len(set(seen.ids)) and set(re.findall(r'(?:url\(|href=")#([^")]*)', text)) <= set(seen.ids)
    words = " ".join(seen.words)
    for said in (
        "a<b>$1$.jsonl",
        'failed: E: <no> "such" &',
        "GPU <x>",
        "selfspec bench --limit 2",
        "This run was stopped",
    ):
        assert said in words
    assert seen.tags.count("svg") == seen.tags.count("figcaption") == seen.tags.count("desc") == 11
    assert "ceiling" in words and "12 of 20 rounds took the whole block of 3" in words
    assert drawing.INK not in text and drawing.GRID not in text and "var(--ink)" in text


def test_a_picture_of_every_plot(drawn):
    pictures = sorted((drawn / "png").glob("*.png"))
    assert len(pictures) == 11
    for file in pictures:
        with Image.open(file) as picture:
            assert min(picture.size) > 200 and len(set(picture.convert("L").get_flattened_data())) > 20


def test_figures_are_those_of_the_file(tmp_path):
    (run,) = read(run_file(tmp_path / "a.json"))
    assert (
        isinstance(run, Run) and run.title == "tiny, float32, GPU <x>" and list(run.suites["a<b>$1$.jsonl"]) == [1, 4]
    )
    ar, sequential, hf, failed = run.suites["a<b>$1$.jsonl"][1]
    assert not ar.drafts and sequential.drafts and sequential.accepted == {1: 5, 2: 3, 3: 12}
    assert sequential.speedup["hf"] == (8.0, 7.2, pytest.approx(9.6)) and hf.tau is None
    assert failed.error and page._cells(failed, 1, ["ar"], False)[-1].startswith('<td class="text bad" colspan="10"')
    cells = page._cells(sequential, 4, ["ar"], True)
    assert cells[:2] == ["sequential", "4"] and "1.00 <small>0.90–1.20</small>" in cells[2] and cells[-1] == "3"
    (said,) = [p.alt for p in plots.section(run, 0).plots if p.name == "speedup-0-0"]
    assert "sequential 2.00 x over ar, 8.00 x over hf" in said and "compile" not in said


def test_time_is_drawn_against_context_or_else_rows(tmp_path):
    (several,) = read(table_file(tmp_path / "a.json"))
    (one,) = read(table_file(tmp_path / "b.json", (512,)))
    assert isinstance(one, Table)
    assert plots.section(several, 0).plots[0].title == "Time against context length"
    (plot,) = plots.section(one, 0).plots
    assert (
        plot.title == "Time against rows, context 512"
        and "draft from layer 2, 1 request: 1 rows 513.000 ms" in plot.alt
    )


def test_a_table_of_profile_is_read_too(tmp_path):
    """It names its model under `setting`, and its overlapped forwards have draft rows beside their clean ones."""
    at = {"entry": 2, "context": 64, "graph": False, "low": 1.0, "high": 2.0, "ms": 1.5}
    points = [
        {"kind": "overlap", "requests": n, "rows": 4, "drafts": 12, **at, "context": c}
        for n in (1, 8)
        for c in (64, 128)
    ]
    setting = {"model": "tiny", "dtype": "float32", "device": "GPU"}
    (tmp_path / "t.json").write_text(json.dumps({"format": 3, "setting": setting, "n_layers": 4, "points": points}))
    (table,) = read(tmp_path / "t.json")
    assert table.title == "forward times: tiny, float32, GPU" and table.facts["n_layers"] == 4
    assert (
        plots.section(table, 0).plots[0].alt
        == "overlap from layer 2, 1 request of 4 + 12: 64 context 1.500 ms, 128 context 1.500 ms"
    )


def test_what_bench_writes_can_be_drawn(tmp_path):
    """And what lacks a figure is drawn without it: a run at one concurrency, without a drafting mode."""
    model = tiny_chat.save_model(tmp_path / "model")
    file = tiny_chat.save_prompts(tmp_path / "few.jsonl", 2)
    argv = ["--model", model, "--adapter", "none", "--prompts", file, "--dtype", "float32", "--repeats", 1]
    argv += ["--max-new-tokens", 6, "--json", tmp_path / "run.json"]
    assert tiny_chat.run("bench", *argv, "--concurrency", "1,2").exit_code == 0
    assert tiny_chat.run("report", tmp_path / "run.json", "-o", tmp_path / "r.html").exit_code == 0
    assert (tmp_path / "r.html").read_text().count("<figure>") == 6
    (run,) = read(run_file(tmp_path / "a.json", (2,), edit=lambda d: d["suites"][0]["results"].pop(1)))
    assert [p.name for p in plots.section(run, 0).plots] == ["speedup-0-0", "round-0-0"]


def contest_file(file, edit=None):
    """What benchmarks/concurrency.py writes: entrants at 1 and 8 slots, two repeats."""
    speeds = {1: {"ar": (10, 10), "a/b=4": (30, 30), "auto": (29, 29)}, 8: {"ar": (9, 70), "a/b=4": (8, 60)}}
    points = [
        {
            "slots": n,
            "runs": [
                {"name": m, "each": each, "rate": all_ * k, "decode_rate": all_ * k * (2 if m == "ar" else 3)}
                for k in (1.0, 2.0)
                for m, (each, all_) in of.items()
            ],
        }
        for n, of in speeds.items()
    ]
    data = {"settings": {"model": "tiny"}, "names": ["ar", "a/b=4", "auto"], "dtype": "f", "device": "d"}
    data |= {"points": points, "record": {"traces": ["long"]}}
    if edit:
        edit(data)
    file.write_text(json.dumps(data))
    return file


def test_a_contest_draws_one_request_against_all_and_the_frontier(tmp_path):
    """It was taken for a damaged latency table."""
    (run,) = read(contest_file(tmp_path / "c.json"))
    assert run.title == "tiny, f, d" and "record" not in run.facts
    ((ar, fixed, auto), (_, more)) = run.suites["mixed queue"].values()
    assert fixed.speedup["ar"] == (4.5, 4.5, 4.5) and ar.total == (15, 10, 20) and auto.each.median == 29
    (plot,) = [p for p in plots.section(run, 0).plots if p.name == "throughput-0-0"]
    assert "auto 29.0 tokens/s each and 43.5 in all at 1" in plot.alt
    assert plot.alt.endswith("frontier without auto: a/b=4 at 1, ar at 8")  # a at 8 and ar at 1 are beaten in both
    assert drawing.look("x", drawing.MODES.index("ar"))["color"] != drawing.look("ar", 0)["color"]
    assert tiny_chat.run("report", tmp_path / "c.json", "-o", tmp_path / "r.html").exit_code == 0
    assert "frontier without auto" in (tmp_path / "r.html").read_text()
    assert "frontier" not in plots.section(read(run_file(tmp_path / "b.json"))[0], 0).plots[-2].alt


def test_long_names_and_titles_are_not_cut_off(tmp_path):
    """Legends ran out of the page's drawings to the right, and pictures cut a title that was wider than they were."""

    def edit(d):
        names = [f"sequential/verify={i}@1" for i in range(8)]
        d["names"] = [d["names"][0], *names]
        for point in d["points"]:
            point["runs"] = point["runs"][:1] + [{**point["runs"][0], "name": n} for n in names]

    (run,) = read(contest_file(tmp_path / "c.json", edit))
    plot = next(p for p in plots.section(run, 0).plots if p.name.startswith("throughput"))
    figure, axes = plt.subplots(figsize=(drawing.WIDTH, plot.height), layout="constrained")
    plot.draw([axes])
    figure.canvas.draw()
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1
    plt.close(figure)
    drawing.png(replace(plot, title="many prompts " * 9), tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        wide = picture.convert("L")
        assert all(wide.getpixel((x, y)) > 250 for x in (0, wide.width - 1) for y in range(wide.height))


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda d: d["points"][0]["runs"][0].pop("each"), "1 slots: damaged, it lacks 'each'"),
        (lambda d: d["points"][1]["runs"].clear(), None),
        (lambda d: d["points"].clear(), "stopped before"),
        (lambda d: d.update(points=3), "damaged"),
    ],
)
def test_a_damaged_contest_is_refused_with_its_place(tmp_path, edit, words):
    file = contest_file(tmp_path / "c.json", edit)
    if words is None:
        assert tiny_chat.run("report", file, "-o", tmp_path / "r.html").exit_code == 0
        return
    with pytest.raises(ReportError, match=words):
        read(file)


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "no file at"),
        ("", "cannot be read as JSON"),
        ('{"kind": "bench", "suites": [', "cannot be read as JSON"),
        ('"bench"', "neither a bench run"),
        ("[]", "neither a bench run"),
        ('{"prompts": 1}', "found the keys prompts"),
        ('{"kind": "bench", "complete": true}', "lacks 'suites'"),
        ('{"points": []}', "holds no points"),
        (
            '{"points": [{"kind": "clean", "rows": 1, "requests": 1, "ms": "x"}]}',
            "point 0: damaged, it lacks context, ms",
        ),
    ],
)
def test_a_file_that_is_no_run_is_refused_by_name(tmp_path, text, words):
    file, out = tmp_path / "x.json", tmp_path / "r.html"
    if text is not None:
        file.write_text(text)
    ran = tiny_chat.run("report", run_file(tmp_path / "good.json"), file, "-o", out)
    assert ran.exit_code == 2 and str(file) in ran.stderr and words in ran.stderr and not out.exists()


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda rows: rows[1].pop("tau"), None),  # a row without rounds
        (lambda rows: rows[1].pop("ceiling"), "lacks 'ceiling'"),
        (lambda rows: rows[0]["ms_per_token"].pop("min"), "lacks 'min'"),
        (lambda rows: rows[0].update(speedup=3), "damaged"),
        (lambda rows: rows[0].update(peak_memory="much"), "damaged"),
        (lambda rows: rows.append(None), "damaged"),
    ],
)
def test_a_damaged_row_is_refused_with_its_place(tmp_path, edit, words):
    file = run_file(tmp_path / "x.json", edit=lambda data: edit(data["suites"][1]["results"]))
    if words is None:
        read(file)
        return
    with pytest.raises(ReportError, match=rf"suite 'a<b>\$1\$.jsonl', 4 at a time: .*{words}"):
        read(file)


def test_a_run_stopped_before_its_first_figures_is_refused(tmp_path):
    with pytest.raises(ReportError, match="stopped before"):
        read(run_file(tmp_path / "x.json", edit=lambda data: data.update(suites=[])))


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m.startswith(("matplotlib", "selfspec.report.")) and "read" not in m]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("selfspec.report.drawing")
    ran = tiny_chat.run("report", run_file(tmp_path / "a.json"), "-o", tmp_path / "r.html")
    assert ran.exit_code == 2 and "pip install 'selfspec[report]'" in ran.stderr


PROBE = """<script>
addEventListener('load', () => {
  const sizes = {}, at = e => e.getBoundingClientRect();
  for (const width of [360, 1200]) {
    const inner = document.querySelector('[width="' + width + '"]').contentDocument, root = inner.documentElement;
    const text = [...inner.querySelectorAll('svg text')].map(e => [e.textContent, at(e).height]);
    sizes[width] = {
      scroll: root.scrollWidth, figures: [...inner.querySelectorAll('svg')].map(e => [at(e).width, at(e).height]),
      outside: [...inner.querySelectorAll('figure')].filter(e => at(e).right > width).length,
      ink: getComputedStyle(root).getPropertyValue('--ink'), letters: text.filter(t => t[0].trim()).map(t => t[1]),
    };
  }
  document.documentElement.dataset.sizes = JSON.stringify(sizes);
});
</script>"""


def browser(file, profile, *flags):
    """Opens a page in headless chromium. Returns the document as it then is, and what went to the console."""
    quiet = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking hide-scrollbars "
    quiet += "disable-component-update disable-sync enable-logging=stderr window-size=1600,900 dump-dom"
    argv = [CHROMIUM, *(f"--{flag}" for flag in [*quiet.split(), f"user-data-dir={profile}", *flags]), str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_every_figure_and_no_error(drawn, tmp_path, dark):
    """At a phone's width and a desk's, as frames of a page that measures them."""
    text, frame = (
        html.escape((drawn / "report.html").read_text()),
        '<iframe width="{}" height="900" srcdoc="{}"></iframe>',
    )
    style = "<style>iframe { border: 0 }</style><script>console.error('heard')</script>"
    frames = "".join(frame.format(width, text) for width in (360, 1200))
    (tmp_path / "probe.html").write_text(f"<!DOCTYPE html><html>{style}{PROBE}{frames}</html>")
    scheme = f"blink-settings=preferredColorScheme={0 if dark else 1}"
    document, console = browser(tmp_path / "probe.html", tmp_path / "profile", scheme)
    assert len(console) == 1 and "heard" in console[0]  # our own alone
    found = re.search(r'data-sizes="([^"]*)"', document)
    assert found, document[:500]
    for width, seen in json.loads(html.unescape(found[1])).items():
        assert seen["scroll"] <= int(width) and not seen["outside"]
        assert len(seen["figures"]) == 11 and all(w > 250 and h > 60 for w, h in seen["figures"])
        assert min(seen["letters"]) >= 6  # pixels
        assert seen["ink"] == ("#e4e8ed" if dark else "#1c2127")


def luminance(colour):
    """WCAG 2.2, relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("back", ["#ffffff", "#f6f8fa", "#1c2026"])
def test_colours_are_seen_on_light_and_dark(back):
    assert back == "#ffffff" or f"--card: {back}" in page.STYLE.read_text()
    for colour in drawing.COLOURS:
        low, high = sorted(map(luminance, (colour, back)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour
