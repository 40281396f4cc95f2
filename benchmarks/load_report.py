"""The report of `benchmarks.load` and `benchmarks.load_scaling`: benchmarks/results/load.md from load.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TITLES = {
    "soak": "One gateway, no restarts",
    "restarts_local": "Restarts; session servers are the gateway's own",
    "restarts_servers": "Restarts; session servers were started elsewhere",
}


def write_report() -> None:
    """Write load.md."""
    results = json.loads((RESULTS / "load.json").read_text())
    lines = ["<!-- written by `python -m benchmarks.load` -->", ""]
    if "scaling" in results:
        lines += describe_scaling(results["scaling"])
    for section, found in results.items():
        if section != "scaling":
            lines += describe_run(TITLES.get(section, section.replace("_", ": ")), found)
    (RESULTS / "load.md").write_text("\n".join(lines))


def describe_scaling(found: dict[str, Any]) -> list[str]:
    """The table of actors against acts per second."""
    names = list(found["lines"][0]["cpu_ms_per_act"])
    head = [
        "actors",
        "acts/s",
        "of the ideal",
        "cores used",
        "load average",
        *(f"{name}, CPU ms/act" for name in names),
    ]
    rows = [
        [
            str(line["actors"]), f"{line['acts_per_second']:.1f}", f"{100 * line['share_of_ideal']:.0f} %",
            f"{line['cores_used']:.2f}", f"{line['load']:.1f}",
            *(f"{line['cpu_ms_per_act'][name]:.2f}" for name in names),
        ]
        for line in found["lines"]
    ]  # fmt: skip
    intro = (
        f"Pages of {1000 * found['latency_s']:.0f} ms, {found['acts_per_episode']} acts per episode, "
        f"{found['seconds']:.0f} s per row, everything on one machine."
    )
    return ["### Throughput", "", intro, "", *_table(head, rows), "", _machine(found), ""]


def describe_run(title: str, found: dict[str, Any]) -> list[str]:
    """The figures and checks of one run."""
    plan, episodes, sessions = found["plan"], found["episodes"], found["sessions"]
    requests, memory = found["requests"], found["memory_mb"]
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(episodes["outcomes"].items()))
    repeated = ", ".join(f"{name} {count}" for name, count in sorted(episodes["failed_attempts"].items())) or "none"
    staleness = ", ".join(f"{age}: {count}" for age, count in found["staleness"].items())
    restarts = found["restarts"]
    rows = [
        ["duration, gateways, restarts", f"{plan['minutes']:g} min, {plan['gateways']}, {restarts['number']}"],
        ["sessions held; leased in all, median and most",
         f"{sessions['held']} ({plan['real']} in real browsers); "
         f"{sessions['leased_median']:.0f}, {sessions['leased_max']:.0f}"],
        ["sessions created, closed, lost, adopted, reaped",
         ", ".join(f"{sessions[name]:,}" for name in ("created", "closed", "lost", "adopted", "reaped"))],
        ["held sessions lost and replaced", f"{sessions['held_replaced']:,}"],
        ["episodes scheduled, received, running or unread at the stop, unaccounted",
         f"{episodes['scheduled']:,}, {episodes['received']:,}, "
         f"{episodes['running_at_stop'] + episodes['unread_at_stop']}, {episodes['unaccounted']}"],
        ["outcomes", outcomes], ["attempts repeated in a new session", repeated],
        ["updates, episodes learned from, dropped as stale",
         f"{episodes['updates']:,}, {episodes['learned']:,}, {episodes['dropped_stale']}"],
        ["episodes by staleness (bound " + str(plan["max_staleness"]) + ")", staleness],
        ["episodes/s; episode p50, p99",
         f"{episodes['per_second']}; {episodes['seconds']['p50_ms']:.0f}, {episodes['seconds']['p99_ms']:.0f} ms"],
        ["proxied requests by status", ", ".join(f"{s}: {n:,}" for s, n in requests["statuses"].items())],
        ["screenshot of a held session p50, p99; opening p50, p99",
         f"{requests['look']['p50_ms']}, {requests['look']['p99_ms']} ms; "
         f"{requests['open']['p50_ms']}, {requests['open']['p99_ms']} ms"],
        ["gateway memory (PSS), first, middle and last third", ", ".join(f"{part:.0f} MB" for part in memory)],
    ]  # fmt: skip
    if restarts["number"]:
        rows.append(["seconds until a restarted gateway answers", ", ".join(map(str, restarts["seconds"]))])
    checks = [f"- {'yes' if passed else '**NO**'}: {name}" for name, passed in found["checks"].items()]
    return [f"### {title}", "", *_table(["", ""], rows), "", *checks, "", _machine(found), ""]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _machine(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load_at_start']} before; {machine['date']}."
    )
