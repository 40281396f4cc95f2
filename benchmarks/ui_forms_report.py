"""Tables and learning curves of `benchmarks.ui_forms`, from its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.ui_runs import ALGORITHMS, COLOURS, format_share, format_table
from palaestra.evaluation.screens import PairCounts
from palaestra.evaluation.statistics import wilson_interval

WAYS = ("sampled", "greedy")
FORM_STAGES = {
    "pretrained": "pretrained",
    "after_other_forms": "after the other forms",
    "warm_start": "after demonstrations of it",
    "grpo": "after GRPO on it",
}
AGAINST = {"pretrained": "against the pretrained model", "warm_start": "against the warm start"}
DRAWS = 10_000
WINDOW = 4
"""Updates on either side over which a curve is averaged: an update plays sixteen groups of twenty-four tasks."""

Outcomes = dict[str, str]
"""By task, a character per held-out seed: 1 solved, 0 not solved, - the session failed."""


def count_outcomes(characters: str) -> tuple[int, int]:
    """Successes and episodes, without failed sessions."""
    return characters.count("1"), len(characters) - characters.count("-")


def count_pairs(after: str, before: str) -> PairCounts:
    """Pairs of equal seed; those with a failed session are left out."""
    pairs = [pair for pair in zip(after, before, strict=True) if "-" not in pair]
    return PairCounts(*(pairs.count(kind) for kind in (("1", "1"), ("1", "0"), ("0", "1"), ("0", "0"))))


def paired_difference(after: Sequence[str], before: str) -> tuple[float, float, float] | None:
    """Success rate of the runs minus that of `before`, and its 95 % interval; None without pairs.

    One run: Tango's score interval. Several: percentiles of a bootstrap over held-out seeds, because the runs share the
    episodes of `before`; it does not include the variation between training seeds.
    """
    if len(after) == 1:
        pairs = count_pairs(after[0], before)
        return None if pairs.difference is None else (pairs.difference, *pairs.ci95)
    by_seed = [
        np.mean([float(one) - float(start) for one in played])
        for start, *own in zip(before, *after, strict=True)
        if start != "-" and (played := [one for one in own if one != "-"])
    ]
    if not by_seed:
        return None
    differences = np.array(by_seed)
    draws = np.random.default_rng(0).choice(differences, (DRAWS, len(differences))).mean(axis=1)
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(differences.mean()), float(low), float(high)


def format_difference(difference: tuple[float, float, float] | None) -> str:
    """A difference and its interval, in points."""
    if difference is None:
        return "–"
    middle, low, high = (100 * number for number in difference)
    return f"{middle:+.0f} ({low:+.0f} to {high:+.0f})"


def join_tasks(outcomes: Outcomes) -> str:
    """All tasks after each other."""
    return "".join(outcomes[task] for task in sorted(outcomes))


def build_stage_rows(results: dict, way: str) -> list[list[str]]:
    """A row per task and one for all: each stage, and each algorithm with its differences to the stages before."""
    stages = {name: results["stages"][name][way] for name in AGAINST if has(results, name, way)}
    if not stages:
        return []
    runs = runs_by_algorithm(results, way)
    titles = [way, *(name.replace("_", " ") for name in stages)]
    for algorithm in runs:
        titles += [algorithm.replace("_", " "), *(AGAINST[name] for name in stages)]
    rows = [titles]
    tasks = sorted(stages["pretrained"])
    for name, select in [("all", join_tasks), *((f"`{task}`", lambda one, task=task: one[task]) for task in tasks)]:
        row = [name, *(format_share(count_outcomes(select(one))) for one in stages.values())]
        for own in runs.values():
            played = [select(run[way]) for run in own]
            row.append(format_share(count_outcomes("".join(played))))
            row += [format_difference(paired_difference(played, select(one))) for one in stages.values()]
        rows.append(row)
    return rows


def has(results: dict, stage: str, way: str) -> bool:
    """Whether a stage was measured."""
    return way in results["stages"].get(stage, {})


def runs_by_algorithm(results: dict, way: str) -> dict[str, list[dict]]:
    """The evaluated runs, in the order of `ALGORITHMS`."""
    runs = {name: [one for one in results["runs"] if one["algorithm"] == name and way in one] for name in ALGORITHMS}
    return {name: own for name, own in runs.items() if own}


def build_seed_rows(results: dict) -> list[list[str]]:
    """A row per run: success in each way that was measured, and the minutes of training."""
    ways = [way for way in WAYS if any(way in run for run in results["runs"])]
    rows = [["algorithm", "seed", *ways, "minutes of training"]]
    for algorithm, own in runs_by_algorithm(results, "sampled").items():
        for run in own:
            shares = [format_share(count_outcomes(join_tasks(run[way]))) if way in run else "–" for way in ways]
            rows.append([algorithm.replace("_", " "), str(run["seed"]), *shares, f"{run['minutes']:.0f}"])
    return rows


def build_form_rows(results: dict) -> list[list[str]]:
    """A row per stage of `data_entry/form`: success, and the mean reward, which counts single rows of the sheet."""
    rows = [["`data_entry/form`", *(title for way in WAYS for title in (way, f"mean reward, {way}"))]]
    for stage, name in FORM_STAGES.items():
        measured = results["form"].get(stage, {})
        if all(way in measured for way in WAYS):
            cells = [
                (format_share(count_outcomes(join_tasks(measured[way]))), f"{measured[f'{way}_return']:.2f}")
                for way in WAYS
            ]
            rows.append([name, *(text for pair in cells for text in pair)])
    return rows


def describe(results: dict) -> str:
    """How the results were measured."""
    settings, machine = results["settings"], results.get("machine", {})
    parts = [f"the model {settings['model']}"] if "model" in settings else []
    parts.append(f"held-out seeds from {settings['held_out']:,}, {settings['episodes']} episodes per evaluation")
    if settings.get("demonstrations"):
        parts.append(f"{settings['demonstrations']} demonstrations per task")
        if settings["warm_start"]:
            rate = f" with learning rate {settings['warm_start_rate']:g}" if "warm_start_rate" in settings else ""
            parts[-1] += f", imitated in {settings['warm_start']} updates{rate}"
    if results["runs"]:
        parts.append(f"{settings['updates']} updates of reinforcement")
        if settings.get("share_percent"):
            parts[-1] += f" with {settings['share_percent']} % of demonstrations"
    where = f" {machine['date']}, {machine['processor']}, {machine['cores']} cores." if machine else ""
    return f"Measured by `python -m benchmarks.ui_forms`: {'; '.join(parts)}.{where} Per cent solved (95 % interval).\n"


def write_report(results: dict, table: Path, curves: Path) -> None:
    """The tables as Markdown, and the curves as PNG."""
    tables = [build_stage_rows(results, way) for way in WAYS]
    tables += [build_seed_rows(results), build_form_rows(results)]
    table.write_text("\n".join([describe(results), *(format_table(rows) for rows in tables if len(rows) > 1)]))
    if any(run.get("curves") for run in results["runs"]):
        draw_curves(results, curves)


def smooth_with_gaps(rates: Sequence[float | None]) -> list[float]:
    """The mean of each update and its neighbours; NaN where the task was not played in any of them."""
    means = []
    for place in range(len(rates)):
        near = [rate for rate in rates[max(0, place - WINDOW) : place + WINDOW + 1] if rate is not None]
        means.append(float(np.mean(near)) if near else float("nan"))
    return means


def draw_curves(results: dict, path: Path) -> None:
    """A chart per task: success in training, dotted lines for the stages before, held-out success at the end."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    tasks = sorted({task for run in results["runs"] for task in run["curves"]})
    columns = min(5, len(tasks))
    lines = -(-len(tasks) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(2.6 * columns, 2.2 * lines + 0.6),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for chart, task in zip(axes.flat, tasks, strict=False):
        draw_task(chart, results, task)
    for chart in axes.flat[len(tasks) :]:
        chart.axis("off")
    handles = {
        label: line for chart in axes.flat for line, label in zip(*chart.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns, frameon=False)
    figure.supxlabel("updates")
    figure.supylabel("solved (%)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_task(chart, results: dict, task: str) -> None:
    """The chart of one task."""
    for stage, style in (("pretrained", ":"), ("warm_start", "--")):
        if has(results, stage, "sampled") and task in (outcomes := results["stages"][stage]["sampled"]):
            solved, episodes = count_outcomes(outcomes[task])
            label = f"{stage.replace('_', ' ')}, held out"
            chart.axhline(100 * solved / max(1, episodes), color="#888", linewidth=1, linestyle=style, label=label)
    for algorithm, colour in COLOURS.items():
        runs = [run for run in results["runs"] if run["algorithm"] == algorithm and task in run["curves"]]
        for number, run in enumerate(runs):
            curve = 100 * np.array(smooth_with_gaps(run["curves"][task]))
            label = algorithm.replace("_", " ") if number == 0 else None
            updates = np.arange(1, len(curve) + 1)
            chart.plot(updates, curve, color=colour, linewidth=1.5, alpha=0.5 if len(runs) > 1 else 1, label=label)
        ends = "".join(run["sampled"][task] for run in runs if "sampled" in run)
        solved, episodes = count_outcomes(ends)
        if episodes:
            middle, (low, high) = solved / episodes, wilson_interval(solved, episodes)
            spread = [[100 * (middle - low)], [100 * (high - middle)]]
            end = max(len(run["curves"][task]) for run in runs)
            chart.errorbar([end], [100 * middle], spread, color=colour, marker="o", markersize=4, capsize=2)
    chart.set_title(task, fontsize=9)
    chart.set_ylim(0, 100)
    chart.spines[["top", "right"]].set_visible(False)
