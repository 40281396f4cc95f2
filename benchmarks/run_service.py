"""`make bench-runs`: what the run service bears and how quickly it answers, on this machine, in figures.

Starts real trainers (the echo program) and really kills things. Writes `results/run_service.json` (everything) and
`results/run_service.md` (the table). Whatever is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine, run_life
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.runs.runner import EventFiles, JournalFile, Source
from palaestra.runs.runners import programs
from palaestra.runs.series.reader import SeriesReader
from palaestra.runs.series.writer import SeriesWriter
from palaestra.runs.store.registry import Registry
from palaestra.telemetry.event import Record, TrainingStep
from palaestra.telemetry.journal import Cursor, Journal

ECHO = Path(programs.__file__).with_name("echo_program.py")
PARTS = ("load", "stream", "lives", "taking_in", "many_points", "many_runs")
RUNS, PER_SECOND = 8, 1_000
SPEAKS: dict[str, tuple[Source, ...]] = {
    "journal": (JournalFile(),),
    "tensorboard": (EventFiles("runs/**/events.out.tfevents.*", "cleanrl"),),
}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@contextmanager
def busy() -> Iterator[Callable[[], float]]:
    """Processor seconds per second of the clock, of this process alone."""
    wall, cpu = time.monotonic(), time.process_time()
    yield lambda: (time.process_time() - cpu) / (time.monotonic() - wall)


def echo(attempt: Attempt, *options: object) -> subprocess.Popen[bytes]:
    attempt.work.mkdir(parents=True)
    with attempt.stdout.open("wb") as out:
        words = [sys.executable, "-I", "-S", ECHO, "--journal", attempt.journal, *map(str, options)]
        return subprocess.Popen(words, cwd=attempt.work, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def load(place: Path, speak: str, seconds: float) -> dict[str, Any]:
    """Eight trainers at once; how long from a trainer's clock to a follower's hand."""
    late: list[float] = []
    lock = threading.Lock()

    def publish(_run: str, _attempt: int, records: list[Record]) -> None:
        now = time.time()
        with lock:
            late.extend(now - record.time for record in records)

    # Each tenth update ends an episode. In an event file every number is a separate event.
    rate = PER_SECOND / (4.2 if speak == "tensorboard" else 1.1)
    updates = int(seconds * rate)
    attempts = {f"{speak}{i}": Attempt(place / f"{speak}{i}" / "attempt_1") for i in range(RUNS)}
    options = ("--speak", speak, "--steps", updates, "--rate", rate, "--metrics", 4)
    with busy() as share, Pump(publish) as pump:
        trainers = [echo(attempt, *options) for attempt in attempts.values()]
        for run_id, attempt in attempts.items():
            pump.watch(run_id, attempt, SPEAKS[speak])
        for trainer in trainers:
            trainer.wait()
        progress = [pump.finish(run_id) for run_id in attempts]
        used = share()
    points = sum(i.points for a in attempts.values() for i in SeriesReader(a.series).names().values())
    return {
        "seconds": seconds,
        "events_per_second": RUNS * PER_SECOND,
        "events": sum(one.seq for one in progress),
        "points": points,
        "points_missing": RUNS * (4 * updates + 2 * (updates // 10)) - points,
        "latency_p50_ms": 1e3 * percentile(late, 0.50),
        "latency_p99_ms": 1e3 * percentile(late, 0.99),
        "latency_max_ms": 1e3 * max(late),
        "cores_used": used,
    }


def taking_in(place: Path, count: int) -> dict[str, Any]:
    """How quickly a journal that is already there is taken in, as after a restart or a lost series."""
    attempt = Attempt(place / "taking_in" / "attempt_1")
    with Journal(attempt.journal) as journal:
        for start in range(0, count, 10_000):
            steps = range(start, min(count, start + 10_000))
            journal.emit_many(TrainingStep(i, i, {f"m{k}": float(i + k) for k in range(8)}) for i in steps)
    began = time.monotonic()
    with Pump(lambda *_: None) as pump:
        pump.watch("r", attempt, SPEAKS["journal"])
        pump.finish("r")
    took = time.monotonic() - began
    return {
        "records": count,
        "metrics_each": 8,
        "records_per_second": count / took,
        "points_per_second": 8 * count / took,
    }


def _drop_cache(directory: Path) -> None:
    os.sync()
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def many_points(place: Path, count: int) -> dict[str, Any]:
    """One metric of a very long run: written by the writer, read by the reader."""
    directory = place / "series"
    writer, batch = SeriesWriter(directory), 100_000
    began = time.monotonic()
    for start in range(0, count, batch):
        writer.add(
            Record(i + 1, 1e9 + i / 100, TrainingStep(i, 4 * i, {"loss": float(i * 2654435761 % 4096)}))
            for i in range(start, min(count, start + batch))
        )
        writer.flush(Cursor(1, start + 1, start + 1), {})
    written = time.monotonic() - began

    def timed(read: Callable[[SeriesReader], object], *, cold: bool) -> list[float]:
        times = []
        for _ in range(9):
            if cold:
                _drop_cache(directory)
            start = time.perf_counter()
            read(SeriesReader(directory))
            times.append(1e3 * (time.perf_counter() - start))
        return times

    reads: dict[str, Callable[[SeriesReader], object]] = {
        "recent_1000": lambda reader: reader.recent("loss", 1_000),
        "whole_2000": lambda reader: reader.decimate("loss", 2_000),
        "part_2000": lambda reader: reader.decimate("loss", 2_000, count, count + count // 3),
    }
    found: dict[str, Any] = {"points": count, "points_written_per_second": count / written}
    for name, read in reads.items():
        for how, cold in (("warm", False), ("cold", True)):
            times = timed(read, cold=cold)
            found[f"{name}_{how}_ms"] = {"median": median(times), "max": max(times)}
    return found


def many_runs(place: Path, count: int) -> dict[str, Any]:
    """A registry of many runs: the query alone, and the whole command as a person waits for it."""
    home = Home(place / "var" / "training")
    home.path.mkdir(parents=True)
    registry = Registry.open(home.registry)
    registry.put_many(
        [
            RunRecord(
                run_id=f"bench-{i:06}", runner="echo", agent_id="echo/none", env_id="CartPole-v1",
                phase=Phase.SUCCEEDED, attempt=1, created=1e9 + i, started=1e9 + i, ended=1e9 + i + 60, env_step=10 * i,
            )
            for i in range(count)
        ]
    )  # fmt: skip
    found: dict[str, Any] = {"runs": count}
    for name, limit in (("query_30_ms", 30), ("query_all_ms", None)):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            registry.runs(limit=limit)
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = median(times)
    registry.close()
    for name, words in (("command_ms", ("runs", "list")), ("command_all_ms", ("runs", "list", "--all"))):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "palaestra", *words],
                env={**os.environ, "PALAESTRA_HOME": str(place)},
                capture_output=True,
                check=False,
            )
            times.append(1e3 * (time.perf_counter() - start))
            if done.returncode:
                found[name] = None
                break
        else:
            found[name] = median(times)
    return found


def markdown(found: dict[str, Any]) -> str:
    facts = found["machine"]
    lines = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, Python {facts['python']}, {facts['date']}; "
        f"load before the start: {facts['load_at_start']}.",
        "",
        "| what | figure |",
        "| --- | --- |",
    ]
    for speak, one in found.get("load", {}).items():
        lines.append(
            f"| 8 runs × 1,000 events/s for {one['seconds']:.0f} s ({speak}): points missing of {one['points']:,} | "
            f"{one['points_missing']} |"
        )
        lines.append(
            f"| … from the trainer's clock to a follower, p50 / p99 / max | {one['latency_p50_ms']:.0f} / "
            f"{one['latency_p99_ms']:.0f} / {one['latency_max_ms']:.0f} ms |"
        )
        lines.append(f"| … cores used by ingestion | {one['cores_used']:.2f} |")
    one = found.get("stream")
    if one:
        lines.append(
            f"| the same launched and followed through the supervisor: events missing of {one['events']:,} | "
            f"{one['events_missing']} |"
        )
        lines.append(
            f"| … from the trainer's clock to a follower, p50 / p99 / max | {one['latency_p50_ms']:.0f} / "
            f"{one['latency_p99_ms']:.0f} / {one['latency_max_ms']:.0f} ms |"
        )
    words = {
        "to_running": "from the request to the first sign of a run",
        "to_killed": "from `kill -9` of a trainer to `killed (SIGKILL)` on record",
        "to_stopped": "from `stop` to the last of four processes gone",
        "to_adopted": "from the start of a service to eight runs adopted",
    }
    for name, sentence in words.items() if "lives" in found else ():
        one = found["lives"][f"{name}_ms"]
        lines.append(f"| {sentence}, median (max) | {one['median']:.0f} ({one['max']:.0f}) ms |")
    one = found.get("taking_in")
    if one:
        lines.append(
            f"| taking in a journal that is already there | {one['records_per_second']:,.0f} records/s, "
            f"{one['points_per_second']:,.0f} points/s |"
        )
    one = found.get("many_points")
    if one:
        names = {"recent_1000": "last 1,000", "whole_2000": "whole range as 2,000", "part_2000": "a twelfth as 2,000"}
        for name, words in names.items():
            warm, cold = one[f"{name}_warm_ms"], one[f"{name}_cold_ms"]
            lines.append(
                f"| {one['points']:,} points: {words}, median (max), in memory / from disk | {warm['median']:.1f} "
                f"({warm['max']:.1f}) / {cold['median']:.1f} ({cold['max']:.1f}) ms |"
            )
    one = found.get("many_runs")
    if one:
        lines.append(
            f"| {one['runs']:,} runs: query of 30 / of all | {one['query_30_ms']:.1f} / {one['query_all_ms']:.1f} ms |"
        )
        for name, words in (("command_ms", "palaestra runs list"), ("command_all_ms", "palaestra runs list --all")):
            took = "not available" if one[name] is None else f"{one[name]:.0f} ms"
            lines.append(f"| … `{words}`, from the shell and back | {took} |")
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run_service", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="everything small: does it still run?")
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where to write")
    return parser.parse_args()


def main() -> None:
    """Run, show, write after every part, so that a run that is stopped keeps what it has."""
    arguments = _arguments()
    quick = arguments.quick
    found: dict[str, Any] = {"machine": machine.facts(), "quick": quick}
    parts: dict[str, Callable[[Path], Any]] = {
        "load": lambda place: {speak: load(place, speak, 3.0 if quick else 60.0) for speak in SPEAKS},
        "stream": lambda place: run_life.stream(place, 3.0 if quick else 60.0),
        "lives": lambda place: run_life.lives(place, 3 if quick else 20),
        "taking_in": lambda place: taking_in(place, 20_000 if quick else 200_000),
        "many_points": lambda place: many_points(place, 200_000 if quick else 10_000_000),
        "many_runs": lambda place: many_runs(place, 1_000 if quick else 10_000),
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or parts:
        with tempfile.TemporaryDirectory(prefix="palaestra-bench-") as place:
            found[name] = parts[name](Path(place))
        gc.collect()
        (arguments.results / "run_service.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.results / "run_service.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
