"""An output file that survives being killed: every row is there once, whole, and never changes.

Rows are appended in chunks, one write and one fsync each. A chunk that was cut short is cut off when the file is opened
again: a half line in JSON Lines, a half member in gzip (each chunk is a member of its own). Where the input's order is
kept, a row that has to wait for earlier ones goes into a second file, OUT.waiting, and from there into OUT once they
are done; whatever both files hold counts once, as OUT has it. Parquet cannot be appended to: rows are collected in
OUT.rows.jsonl and written at the end, in one step. OUT.manifest.json says with which settings the rows were made.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from selfspec.serving.appender import Appender, OutputError, id_of, replace
from selfspec.terminal import say

VERSION = 1
FORMS = (".jsonl", ".gz", ".parquet")
DEEPEST = 24  # levels of lists and objects in a column
SLACK = 1 << 20  # bytes of rows that the file of waiting rows may hold in vain


class Output:
    """Where a run's rows go. Use as a context manager; leaving it, however that happens, writes what is finished.

    Args:
        path: `.jsonl`, `.jsonl.gz`, `.parquet`, or "-" for stdout, which cannot be resumed.
        settings: what the rows depend on; rows made with others are never mixed in.
        ordered: rows come in the order of the input.
        overwrite: begin anew whatever is there.
        chunk: rows a write.
        seconds: between two writes, at most.

    Attributes:
        done: ids of the rows that are there.
        complete: an earlier run has written all of them.
        counts: rows, errors among them, and tokens.
        created: when the run was first started, in seconds since 1970.

    Raises:
        ValueError: a name of another form; or what is there was made with other settings, or by something else.
        RuntimeError: another process is writing there.
    """

    def __init__(
        self,
        path: str | Path,
        settings: dict[str, Any],
        ordered: bool = True,
        overwrite: bool = False,
        chunk: int = 64,
        seconds: float = 1.0,
    ):
        self.path, self.ordered, self.chunk, self.seconds = Path(path), ordered, chunk, seconds
        self.settings = json.loads(json.dumps(settings))
        self.created, self.done = int(time.time()), set[str | int]()
        self.complete = False
        self.counts: Counter[str] = Counter(dict.fromkeys(("rows", "errors", "prompt_tokens", "completion_tokens"), 0))
        self._fresh: list[bytes] = []  # for the file itself
        self._aside: list[bytes] = []  # for the file of waiting rows
        self._ready: dict[int, bytes | None] = {}  # index -> row; None is in the file already
        self._kept: dict[str | int, bytes] = {}  # rows of the file of waiting rows
        self._next, self._last = 0, time.monotonic()
        self._file: Appender | None = None
        self._waiting: Appender | None = None
        self.stdout, self.parquet = str(path) == "-", self.path.suffix == ".parquet"
        if self.stdout:
            return
        if self.path.suffix not in FORMS:
            raise ValueError(f"{path}: expected a name that ends in .jsonl, .jsonl.gz or .parquet, or - for stdout")
        if self.parquet and not importlib.util.find_spec("pyarrow"):
            raise ModuleNotFoundError(f"writing {path} needs pyarrow: pip install 'selfspec[train]'")
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RuntimeError(f"{path}: another process is writing there") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._open(overwrite)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise ValueError(f"{path} cannot be written: {error.strerror}") from error
            raise

    @property
    def manifest(self) -> Path:
        """Where the settings are recorded."""
        return self.path.with_name(f"{self.path.name}.manifest.json")

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, OutputError):  # a full disk is still full
                self.flush()
        finally:
            self._close()

    def put(self, index: int, id: str | int, row: bytes) -> None:
        """Take a finished row; it is safe after the next `flush`.

        Args:
            index: of its input row, from 0.
            id: the row's.
            row: the line.
        """
        self.done.add(id)
        self._booked(row)
        if not self.ordered:
            self._fresh.append(row)
        else:
            self._ready[index] = row
            if index != self._next and self._file is not None:
                self._aside.append(row)
            self._advance()
        if len(self._fresh) + len(self._aside) >= self.chunk:
            self.flush()

    def skip(self, index: int, id: str | int) -> None:
        """Pass a row that is `done`."""
        if self.ordered:
            self._ready[index] = self._kept.pop(id, None)
            self._advance()

    def tick(self) -> None:
        """Flush if it is time."""
        if (self._fresh or self._aside) and time.monotonic() - self._last > self.seconds:
            self.flush()

    def flush(self) -> None:
        """Write what is finished; it is on the disk then.

        Raises:
            OutputError: that fails.
        """
        self._last = time.monotonic()
        fresh, self._fresh = self._fresh, []  # first: a signal may end this call, and nothing is written twice
        if self._file is None:
            if self.stdout:
                sys.stdout.buffer.writelines(fresh)
                sys.stdout.buffer.flush()
            return
        self._file.append(fresh)
        if self._waiting is not None:
            live = [*self._kept.values(), *(r for r in self._ready.values() if r is not None)]
            size = sum(map(len, live))
            if self._waiting.size > 4 * size + (SLACK if live else 0):  # most of it stands in the output by now
                self._waiting.rewrite(live)
            elif live:
                self._waiting.append(self._aside)
            self._aside = []

    def standing(self, expected: int | None = None) -> str:
        """How far a run is that ends now, and how to go on. expected: rows in all, where that is known."""
        rows = f"{self.counts['rows']:,} rows" if expected is None else f"{self.counts['rows']:,} of {expected:,} rows"
        if self.stdout:
            return f"stopped after {rows}; what goes to stdout cannot be resumed: name a file to go on from there"
        return f"stopped: {rows} are safe in {self.path}; the same command goes on from there"

    def finish(self, summary: dict[str, Any]) -> None:
        """Every row is there: write the manifest, and parquet."""
        self.flush()
        if self.stdout or self.complete:
            return
        rows, waiting = self._paths()
        if self.parquet:
            replace(self.path, lambda to: _as_parquet(rows, to))
        self._write_manifest({"complete": True, "rows": dict(self.counts), "summary": summary})
        if self.parquet:
            rows.unlink()
        waiting.unlink(missing_ok=True)

    def _advance(self) -> None:
        while self._next in self._ready:
            row = self._ready.pop(self._next)
            if row is not None:
                self._fresh.append(row)
            self._next += 1

    def _open(self, overwrite: bool) -> None:
        file, waiting = self._paths()
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder: expected a file")
        if overwrite:
            for old in (self.manifest, self.path, file, waiting):  # the manifest first: rows without it are refused
                old.unlink(missing_ok=True)
        if self.manifest.exists():
            before = self._recorded()
            self._check(before)
            if before["complete"] and self.path.exists():
                self.complete, self.counts = True, Counter(before["rows"])
                return
        elif self.path.exists() and self.path.stat().st_size:
            raise ValueError(
                f"{self.path} exists, and {self.manifest.name} does not say how it was made; overwrite it?"
            )
        self._write_manifest({"complete": False})
        self._file = Appender(file, file.suffix == ".gz")
        self.done = {self._booked(r) for r in self._file.rows}
        self._file.rows = []
        if self.ordered:
            self._waiting = Appender(waiting)
            self._kept = {i: r for r in self._waiting.rows if (i := id_of(json.loads(r))) not in self.done}
            self._waiting.rows = []
            self.done |= {self._booked(r) for r in self._kept.values()}

    def _paths(self) -> tuple[Path, Path]:
        """Where rows go, and those that wait."""
        name = self.path.name
        rows = self.path.with_name(f"{name}.rows.jsonl") if self.parquet else self.path
        return rows, self.path.with_name(f"{name}.waiting")

    def _booked(self, line: bytes) -> str | int:
        """Count a row. Returns its id."""
        row = json.loads(line)
        self.counts["rows"] += 1
        if row.get("error") is not None:
            self.counts["errors"] += 1
        body = (row.get("response") or {}).get("body") if "custom_id" in row else row
        usage = (body or {}).get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens"):
            self.counts[name] += usage.get(name, 0)
        return id_of(row)

    def _recorded(self) -> dict[str, Any]:
        """What the manifest says."""
        try:
            old = json.loads(self.manifest.read_bytes())
            if isinstance(old["settings"], dict) and {"complete", "created"} <= old.keys():
                return old
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(f"{self.manifest} is damaged: it does not say how {self.path.name} was made; overwrite it?")

    def _check(self, old: dict[str, Any]) -> None:
        before, now = old["settings"], self.settings
        other = [
            f"{k}: {before.get(k)!r}, now {now.get(k)!r}"
            for k in sorted({*before, *now})
            if before.get(k) != now.get(k)
        ]
        if other:
            raise ValueError(
                f"{self.path} was begun with other settings ({'; '.join(other)}); write elsewhere, or overwrite it"
            )
        self.created = old["created"]

    def _write_manifest(self, more: dict[str, Any]) -> None:
        data = {"version": VERSION, "created": self.created, "settings": self.settings, **more}
        replace(self.manifest, lambda to: to.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8"))

    def _close(self) -> None:
        for file in (self._file, self._waiting):
            if file is not None:
                file.close()
        self._file = self._waiting = None
        if not self.stdout:
            self._lock.release()


@contextmanager
def resumable(out: Output, expected: int | None, quiet: bool) -> Iterator[Output]:
    """An output whose run may be interrupted; it is said then where it stands.

    Args:
        out: left at the end.
        expected: rows in all, where that is known.
        quiet: say nothing.
    """
    try:
        with out:
            yield out
    except (KeyboardInterrupt, SystemExit):
        if not quiet:
            say(out.standing(expected))
        raise


def apart(source: str | Path, target: str | Path, report: Path | None = None) -> None:
    """Refuse an output that would take the place of its input, and a report that would of either.

    Raises:
        ValueError: one of its files is the input; or the report is one of them.
    """
    path = Path(target)
    names = ("", ".manifest.json", ".waiting", ".rows.jsonl")
    files = [path.with_name(f"{path.name}{name}") if path.name else path for name in names]
    for file in files:
        if file.exists() and Path(source).exists() and file.samefile(source):
            raise ValueError(f"{source} is the input, and writing {target} would lose it: name another output")
    if report is not None and report.resolve() in [f.resolve() for f in (Path(source), *files)]:
        raise ValueError(f"{report} is the input or the output, and the report would take its place: name another file")


def table_of(lines: Iterable[bytes]) -> Any:
    """Rows as an Arrow table: a column for every field; one whose values parquet cannot hold becomes JSON text."""
    import pyarrow as pa

    found = [json.loads(line) for line in lines]
    names = dict.fromkeys(k for row in found for k in row) or {"id": None}
    return pa.table({_utf8(name): _column([row.get(name) for row in found]) for name in names})


def _column(values: list[Any]) -> Any:
    import pyarrow as pa

    unlike = pa.ArrowException, OverflowError, UnicodeEncodeError  # of several kinds, too large, half a character
    with suppress(*unlike):
        column = pa.array(values)
        if _held(column.type):
            return column
    return pa.array([None if v is None else _utf8(json.dumps(v, ensure_ascii=False)) for v in values])


def _held(kind: Any, depth: int = 0) -> bool:
    """Whether parquet holds values of an Arrow type: objects need a field, and readers give up far down."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    empty = str(kind).startswith("struct") and not inner
    return depth < DEEPEST and not empty and all(_held(t, depth + 1) for t in inner)


def _utf8(text: str) -> str:
    """Half a surrogate pair, which no UTF-8 has, becomes JSON's escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _as_parquet(rows: Path, to: Path) -> None:
    import pyarrow.parquet as pq

    with rows.open("rb") as file:
        pq.write_table(table_of(file), to, compression="zstd")
