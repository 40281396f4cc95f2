"""`make bench`: training speed beside the rivals, in one run, as ratios.

Prepares the rivals' virtual environment, lets all contenders take turns, prints tables, and writes
`results/speed.json` (everything) and `results/speed.md` (what the documentation shows). Results are written after
every workload, so a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, report, rivals
from benchmarks.schedule import LANES, Bench, can_pin
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one short round: does everything still run?")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="this workload (may be repeated)")
    parser.add_argument("--lane", action="append", choices=LANES, help="this lane (may be repeated)")
    parser.add_argument("--rival", action="append", choices=rivals.PACKAGES, help="this rival (may be repeated)")
    parser.add_argument("--rounds", type=int, help="rounds per workload (3; quick: 1)")
    parser.add_argument("--seconds", type=float, help="seconds per run after the first iteration (4; quick: 1)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where to write")
    parser.add_argument("--render", action="store_true", help="only show and render the stored results again")
    return parser.parse_args()


def _write(folder: Path, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "speed.md").write_text(report.markdown(found))


def main() -> None:
    """Run, show, write."""
    arguments = _arguments()
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)  # wide, because it is written to a file
    if arguments.render:
        found = json.loads((arguments.results / "speed.json").read_text())
        report.show(found, console)
        _write(arguments.results, found)
        return
    python, missing = rivals.prepare(ROOT, console.print)
    if arguments.rival:
        missing |= {name: "not asked for" for name in rivals.PACKAGES if name not in arguments.rival}
    lanes = tuple(lane for lane in (LANES if can_pin() else LANES[1:]) if lane in (arguments.lane or LANES))
    if not can_pin():
        console.print("No `taskset` here: the lane with one core is left out.")
    bench = Bench(
        root=ROOT, rivals_python=python, missing=missing, rounds=arguments.rounds or (1 if arguments.quick else 3),
        seconds=arguments.seconds or (1.0 if arguments.quick else 4.0), lanes=lanes, quick=arguments.quick,
        say=console.print,
    )  # fmt: skip
    found: dict[str, Any] = {
        "machine": machine.facts(),
        "quick": arguments.quick,
        "rounds": bench.rounds,
        "seconds": bench.seconds,
        "missing": missing | rivals.ABSENT,
        "results": bench.results,
    }
    for name in arguments.only or WORKLOADS:
        bench.workload(WORKLOADS[name])
        _write(arguments.results, found)
    if not arguments.only:
        found |= {"memory": bench.memory(), "command_line": bench.command_line()}
    found["summary"] = report.summary(bench.results)
    _write(arguments.results, found)
    report.show(found, console)


if __name__ == "__main__":
    main()
