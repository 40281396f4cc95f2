"""From raw lines to tables: best of the rounds, ratios, and the Markdown that docs/benchmarks.md includes.

Pure functions of the results; a stored `speed.json` renders again without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import WORKLOADS

__all__ = ["markdown", "show", "summary"]

Line = dict[str, Any]


def summary(lines: list[Line]) -> list[Line]:
    """One row per workload and lane: ours, SB3 and the fastest rival at their best, and the ratios."""
    rows = []
    for name in WORKLOADS:
        env_only = _best(line for line in lines if line["workload"] == name and line["contender"] == "env_only")
        for lane in _lanes(lines):
            here = [line for line in lines if line["workload"] == name and line["lane"] == lane and not line["cold"]]
            ours = _best(line for line in here if line["contender"] == "ours" and not line["variant"])
            sb3 = _best(line for line in here if line["contender"] == "sb3")
            rival = _best(line for line in here if line["contender"] not in ("ours", "env_only"))
            if ours is None:
                continue
            rows.append(
                {
                    "workload": name,
                    "lane": lane,
                    "ours": ours,
                    "sb3": sb3,
                    "fastest_rival": rival,
                    "env_only": env_only,
                    "ours_over_sb3": _ratio(ours, sb3),
                    "ours_over_fastest_rival": _ratio(ours, rival),
                    "ours_over_env_only": _ratio(ours, env_only),
                    "collect_over_env_only": _ratio(ours, env_only, "collect_steps_per_second"),
                    "ours_over_sb3_by_cpu_time": _ratio(ours, sb3, "steps_per_cpu_second", "steps_per_cpu_second"),
                    "same_parameters": sb3 is None or ours.get("parameters") == sb3.get("parameters"),
                }
            )
    return rows


def contenders(lines: list[Line]) -> list[Line]:
    """The best line of every contender, workload by workload."""
    found = []
    for name in WORKLOADS:
        for lane in _lanes(lines):
            here = [line for line in lines if line["workload"] == name and line["lane"] == lane and not line["cold"]]
            labels = list(dict.fromkeys(line["label"] for line in here))
            best = [_best(line for line in here if line["label"] == label) for label in labels]
            found += sorted((line for line in best if line), key=lambda line: -line["steps_per_second"])
    return found


def compilation(lines: list[Line]) -> list[Line]:
    """Seconds of compiling with an empty cache and with a full one, and from process start to the first update."""
    rows = []
    for name in WORKLOADS:
        here = [line for line in lines if line["workload"] == name and "compile_seconds" in line]
        cold = [line for line in here if line["cold"]]
        for contender in dict.fromkeys(line["contender"] for line in here if line["contender"] != "env_only"):
            warm = [line for line in here if line["contender"] == contender and not line["cold"]]
            if not warm:
                continue
            rows.append(
                {
                    "workload": name,
                    "contender": contender,
                    "cold_compile": cold[0]["compile_seconds"] if contender == "ours" and cold else None,
                    "compile": min(line["compile_seconds"] for line in warm),
                    "startup": min(line["startup_seconds"] for line in warm),
                    "until_first_update": min(line["until_first_update_seconds"] for line in warm),
                    "cold_until_first_update": (
                        cold[0]["until_first_update_seconds"] if contender == "ours" and cold else None
                    ),
                }
            )
    return rows


def _lanes(lines: list[Line]) -> list[str]:
    return list(dict.fromkeys(line["lane"] for line in lines))


def _best(lines: Iterable[Line]) -> Line | None:
    return max((line for line in lines if line.get("steps_per_second")), key=_speed, default=None)


def _speed(line: Line) -> float:
    return float(line["steps_per_second"])


def _ratio(
    one: Line | None, other: Line | None, key: str = "steps_per_second", other_key: str = "steps_per_second"
) -> float | None:
    if one is None or other is None or not one.get(key) or not other.get(other_key):
        return None
    return round(one[key] / other[other_key], 2)


# ---------------------------------------------------------------------- rendering


_SUMMARY_HEAD = (
    "workload", "cores", "ours", "collect", "learn", "SB3", "fastest rival", "ours / SB3", "by CPU time",
    "ours / fastest", "env alone", "ours / env", "parameters",
)  # fmt: skip


def _summary_cells(row: Line) -> list[str]:
    ours, rival = row["ours"], row["fastest_rival"]
    fastest = f"{_thousands(rival)} ({rival['contender']})" if rival else "-"
    parameters = f"{ours.get('parameters', 0):,}" + ("" if row["same_parameters"] else " (SB3 differs!)")
    return [
        WORKLOADS[row["workload"]].title, row["lane"].split()[0], _thousands(ours),
        _thousands(ours, "collect_steps_per_second"), _thousands(ours, "learn_steps_per_second"),
        _thousands(row["sb3"]), fastest, _times(row["ours_over_sb3"]),
        _times(row["ours_over_sb3_by_cpu_time"]), _times(row["ours_over_fastest_rival"]),
        _thousands(row["env_only"]), _percent(row["ours_over_env_only"]), parameters,
    ]  # fmt: skip


_CONTENDER_HEAD = ("workload", "cores", "contender", "steps/s", "collect", "learn", "steps per CPU second", "peak MB")


def _contender_cells(line: Line) -> list[str]:
    return [
        WORKLOADS[line["workload"]].title, line["lane"].split()[0], line["label"], _thousands(line),
        _thousands(line, "collect_steps_per_second"), _thousands(line, "learn_steps_per_second"),
        _thousands(line, "steps_per_cpu_second"), f"{line['peak_rss_mb']:.0f}",
    ]  # fmt: skip


_COMPILE_HEAD = (
    "workload", "contender", "compile, empty cache", "compile", "import and build", "until first update",
    "the same, empty cache",
)  # fmt: skip


def _compile_cells(row: Line) -> list[str]:
    keys = ("cold_compile", "compile", "startup", "until_first_update", "cold_until_first_update")
    return [WORKLOADS[row["workload"]].title, row["contender"], *(_seconds(row[key]) for key in keys)]


def _thousands(line: Line | None, key: str = "steps_per_second") -> str:
    value = None if line is None else line.get(key)
    return "-" if value is None else f"{value:,.0f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _tables(report: Line) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    lines = report["results"]
    return [
        ("Speed of training, steps per second", _SUMMARY_HEAD, [_summary_cells(row) for row in summary(lines)]),
        ("All contenders", _CONTENDER_HEAD, [_contender_cells(line) for line in contenders(lines)]),
        ("Compiling and starting", _COMPILE_HEAD, [_compile_cells(row) for row in compilation(lines)]),
    ]


def show(report: Line, console: Console) -> None:
    """Print the tables."""
    for title, head, rows in _tables(report):
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(head):
            table.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for sentence in _sentences(report):
        console.print(sentence, highlight=False)


def _sentences(report: Line) -> list[str]:
    said = [
        f"A {found['rollout']} CartPole rollout of {found['contender']} holds "
        f"{found['resident_bytes'] / 1e6:.2f} MB of resident memory for "
        f"{found['number_bytes'] / 1e6:.2f} MB of numbers ({found['overhead']:.2f}x)."
        for found in report.get("memory", [])
        if "overhead" in found
    ]
    startup = report.get("command_line", {})
    if "help_seconds" in startup:
        said.append(f"`palaestra --help` takes {startup['help_seconds']:.2f} s.")
    elif startup:
        said.append(f"`palaestra --help` was not measured: {startup['skipped']}")
    for name, reason in report["missing"].items():
        said.append(f"Not measured: {name}: {reason}.")
    for line in report["results"]:
        reason = line.get("skipped") or line.get("failed")
        if reason:
            said.append(f"No result: {line['label']} on {line['workload']} ({line['lane']}): {reason}")
    return list(dict.fromkeys(said))


def markdown(report: Line) -> str:
    """The fragment for the documentation, method included."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in {**machine["versions"], **_rivals(report)}.items())
    parts = [
        "<!-- written by `make bench`; edit benchmarks/report.py instead -->",
        f"Measured on {machine['date']}: {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}, load {machine['load_at_start']} before the start.",
        f"Versions: {versions}.",
        _method(report),
    ]
    for title, head, rows in _tables(report):
        parts.append(f"### {title}")
        bar = ["---", "---", *("---:" for _ in head[2:])]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in (head, bar, *rows)))
    sentences = _sentences(report)
    if sentences:
        parts.append("\n".join(f"- {sentence}" for sentence in sentences))
    return "\n\n".join(parts) + "\n"


def _rivals(report: Line) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in report["results"]:
        if line["contender"] not in ("ours", "env_only"):
            found |= line.get("versions", {})
    ours = report["machine"]["versions"]
    apart = {name: version for name, version in found.items() if name in ours and ours[name] != version}
    return {name: version for name, version in found.items() if name not in ours} | {
        f"{name} (rivals')": version for name, version in apart.items()
    }


def _method(report: Line) -> str:
    kind = "**A smoke run: too short to quote.** " if report["quick"] else ""
    return (
        f"{kind}Every contender is a process of its own; they take turns (ours, rival, rival, ..., ours again) for "
        f"{report['rounds']} rounds, and each one's best round counts. A run lasts {report['seconds']:g} s after its "
        "first iteration, which is set apart. Settings, networks and simulator versions are the same for all; value "
        "losses are brought to the same scale; Gymnasium's checker is off for all. *One*: pinned to one core, "
        "one thread. *Two*: free; SB3 runs there with one and with two torch threads, so does ours where the policy is "
        "a CNN, and the better result counts. Ours clips actor and critic gradients apart, its default; "
        "`ours (global)` clips them together, as the rivals do. SB3 computes advantages at the end of collection, "
        "ours at the beginning of learning. *Env alone* steps the environments with actions drawn beforehand, the "
        "faster of a plain loop and `SyncVectorEnv`. *By CPU time* is ours / SB3 in steps per processor second, which "
        "a busy machine disturbs less (and which counts both of our cores). *Compile* is what the first iteration "
        "took beyond a usual one; "
        "our kernels are then kept on disk. SBX has no value clipping."
    )
