"""The output file of a batch by itself: cut anywhere, killed at any moment, it is completed."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from selfspec.serving import output
from selfspec.serving.output import Output

# ---- the output file by itself: every cut is survived


def rows_of(n):
    return [(i, json.dumps({"id": i, "text": "x" * (7 * i % 31)}).encode() + b"\n") for i in range(n)]


def write(path, rows, order, stop=None, **how):
    """Write rows in some order, `stop` of them at most. Returns how many were put."""
    with Output(path, {}, seconds=0, **how) as out:
        place = {i: n for n, (i, _) in enumerate(rows)}
        ready = [i for i, _ in rows if i in out.done]
        for i in ready:
            out.skip(place[i], i)
        todo = [i for i in order if i not in ready][:stop]
        for i in todo:
            out.put(place[i], i, rows[place[i]][1])
        if stop is None:
            out.finish({})
    return len(todo)


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.gz"])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_file_cut_at_any_byte_is_completed(tmp_path, name, ordered):
    """What a kill can leave of either file: each is cut at a random byte, in the last chunk or before."""
    draw, rows = random.Random(3), rows_of(40)
    plain = b"".join(r for _, r in rows)
    for trial in range(25):
        path, order = tmp_path / f"{trial}{name}", draw.sample(range(40), 40)
        write(path, rows, order, stop=draw.randint(1, 39), ordered=ordered, chunk=draw.randint(1, 9))
        for file in (path, path.with_name(path.name + ".waiting")):
            if file.exists() and draw.random() < 0.7:
                data = file.read_bytes()
                file.write_bytes(data[: draw.randint(0, len(data))] + b"\0" * draw.choice([0, 0, 5]))
        write(path, rows, draw.sample(range(40), 40), stop=draw.randint(0, 9), ordered=ordered)
        kept = unzipped(path)
        write(path, rows, draw.sample(range(40), 40), ordered=ordered)
        got = unzipped(path)
        assert got.startswith(kept) and sorted(got.splitlines()) == sorted(plain.splitlines())
        assert not ordered or got == plain
        assert not path.with_name(path.name + ".waiting").exists()


def test_rows_that_wait_for_an_earlier_one_are_not_lost(tmp_path):
    path, rows = tmp_path / "o.jsonl", rows_of(9)
    with Output(path, {}) as out:
        for i in (3, 1, 2):
            out.put(i, i, rows[i][1])
    assert path.read_bytes() == b""
    with Output(path, {}) as out:
        assert out.done == {1, 2, 3}
    assert write(path, rows, range(9)) == 6 and path.read_bytes() == b"".join(r for _, r in rows)


def unzipped(path):
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" and data else data


def test_a_file_damaged_in_its_middle_is_refused(tmp_path):
    path = tmp_path / "o.jsonl"
    write(path, rows_of(9), range(9), stop=5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"no row\n", *lines[3:]]))
    with pytest.raises(ValueError, match="is damaged"):
        Output(path, {})


def test_waiting_rows_do_not_pile_up(tmp_path, monkeypatch):
    """One slow row at a time makes others wait; the second file holds about those, not all that ever waited."""
    monkeypatch.setattr(output, "SLACK", 500)
    path, rows = tmp_path / "o.jsonl", rows_of(400)
    with Output(path, {}, chunk=4) as out:
        for start in range(0, 400, 8):  # the first of eight comes after the first of the next eight
            for i in [*range(start + 9, min(start + 16, 400)), *([start] if start else [0, *range(1, 9)])]:
                out.put(i, i, rows[i][1])
            assert path.with_name("o.jsonl.waiting").stat().st_size < 3000
        out.finish({})
    assert path.read_bytes() == b"".join(r for _, r in rows)


# ---- kill -9

CHILD = """
import json, os, random, sys, time
from selfspec.serving.output import Output

source, target, ordered = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
draw, running = random.Random(os.getpid()), []
rows = [json.loads(line) for line in open(source)]
with Output(target, {}, ordered, chunk=3, seconds=0.01) as out:
    if not out.complete:
        print("ready", flush=True)
        todo = iter(enumerate(rows))
        while True:
            while len(running) < 16 and (job := next(todo, None)) is not None:
                if job[1]["id"] in out.done:
                    out.skip(job[0], job[1]["id"])
                else:
                    running.append(job)
            if not running:
                break
            i, row = running.pop(draw.randrange(len(running)))
            time.sleep(0.0005)
            out.put(i, row["id"], json.dumps({"id": row["id"], "text": row["prompt"] * 3}).encode() + b"\\n")
            out.tick()
        out.finish({})
"""


def test_kill_9_at_random_moments_loses_and_repeats_nothing(tmp_path):
    """A real process that writes as `selfspec batch` does, with a stand-in for the model so that many kills fit."""
    source, n, draw = tmp_path / "in.jsonl", 1500, random.Random(1)
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"p{i} é" * (i % 7 + 1)}) + "\n" for i in range(n)))
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    for name, ordered in (("o.jsonl", True), ("u.jsonl.gz", False)):
        target, kept, kills = tmp_path / name, b"", 0
        while True:
            argv = [sys.executable, "-P", str(child), str(source), str(target), str(ordered)]
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
                if kills < KILLS and process.stdout.readline() == b"ready\n":
                    time.sleep(draw.random() * 1.5 / KILLS)
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                code = process.wait()
            data = target.read_bytes()
            now = _whole(data, name)
            assert now.startswith(kept), "bytes of a finished row have changed"
            kept = now
            if code == 0:
                break
        ids = [json.loads(line)["id"] for line in kept.splitlines()]
        assert kills == KILLS and sorted(ids) == sorted(f"r{i}" for i in range(n))
        assert not ordered or ids == [f"r{i}" for i in range(n)]
        want = {f"r{i}": f"p{i} é" * (i % 7 + 1) * 3 for i in range(n)}
        assert all(r["text"] == want[r["id"]] for r in map(json.loads, kept.splitlines()))


KILLS = int(os.environ.get("SELFSPEC_KILLS", "2"))


def _whole(data, name):
    """The whole rows of a file that may be cut."""
    if name.endswith(".gz"):
        import zlib

        out = b""
        while data:
            member = zlib.decompressobj(31)
            part = member.decompress(data)
            if not member.eof:
                break
            out, data = out + part, member.unused_data
        return out
    return data[: data.rfind(b"\n") + 1]
