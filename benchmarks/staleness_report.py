"""Tables and pictures of `benchmarks.staleness`: each cell beside the synchronous runs, with an interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.learning import IMAGES, RESULTS, interval
from benchmarks.staleness import CONTRASTS, CORRECTIONS, MODES, SLOW_STEPS, STALENESS, TASKS, Mode

__all__ = ["difference", "verdict", "write"]

ABOUT = """The published settings with shorter budgets, several seeds. Each asynchronous run is
`reproducible`, so every step it learns from (after the first few updates) is exactly *s* updates old: the worst that
`max_staleness: s` allows, and more than it usually gives. Score: mean return of the last 100 training episodes;
*evaluated*: 50 greedy episodes; *whole training*: mean of the curve, which tells slow starts. Differences to the
synchronous runs carry 95 % intervals by Welch's t over seeds; *worse* and *better* mean that the interval leaves out 0.
Among forty cells one or two such words come by chance, and five seeds overlook small losses: read the intervals.
*Weight* is `behaviour_weight`, the mean weight of a sample.
"""

FINDINGS = """
What it comes to, with the default correction: at staleness 1 and 2 no final score is shown to be worse on any task. At
4, CartPole and LunarLander show no loss (their intervals are wide), and the reach task loses a twentieth of its return.
At 8 it loses a sixth. Plain PPO at staleness 4 ends LunarLander at 7 instead of 117, and `vtrace` is worse than
synchronous there and on the reach task. At staleness 1 and 2 these two have too few seeds to say. The way is slower
also where the end is not shown to be. Part of that is mere delay: the synchronous LunarLander curve, moved by 1, 2 and
4 updates, loses 4, 8 and 16 of its mean. The budget holds only LunarLander's climb, where delay costs most.

Why the reach task suffers first: its settings move the policy fastest (`approx_kl` 0.014 per update; LunarLander 0.005,
CartPole 0.0003), so four updates ago it was another policy. A tighter `weight_limit` of 2 cuts off a tenth of the
weight there (`behaviour_weight` 0.90), which is bias, and doubles the loss; it was the default until these runs showed
it, and the default of 10 was chosen on them. CartPole, and LunarLander at 1 and 2, were run with 2, where it cuts off
nothing. Half the learning rate helps as much (1.66 at staleness 4, 1.71 in turn; three seeds with the tighter limit,
beside the table). Fewer epochs, `target_kl` and `weight_limit: 1` did not help. Looking again with unchanged weights
gives log-probabilities equal to the last bit, so it is no error of arithmetic. On this task at 4 and 8 no correction is
shown to be better than none: where `staleness` is high and `approx_kl` large, lower `max_staleness` or the learning
rate.

"""

ENOUGH = 3
"""Seeds below which nothing is called worse or better."""

SLOW = """
### The same against the clock

CartPole, 4 environments, a policy that takes 5 ms per inference and a learner that takes 40 ms per minibatch (both
sleep), `max_staleness: 1`, newest weights at every step; {steps:,} steps.

| | seeds | last 100 episodes | whole training | seconds | steps per second |
|---|---|---|---|---|---|
"""

SLOW_FINDING = """
Overlapped, the score is lower, and the interval of the difference just holds 0: {difference}. Ten seeds of the same
without the sleeping do not show it: 283 in turn, 309 at exact staleness 1, 316 with the newest weights. The gain in
time is below the table's above because four epochs make the second look at stale steps cost 8.3 % of learning, and
because other work shared the cores.
"""


def difference(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Difference of the means, and half the width of its 95 % interval (Welch)."""
    from scipy.special import stdtrit

    a, b = np.var(ours, ddof=1) / len(ours), np.var(theirs, ddof=1) / len(theirs)
    mean = float(np.mean(ours) - np.mean(theirs))
    if a + b == 0:
        return mean, 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
    return mean, float(stdtrit(freedom, 0.975)) * math.sqrt(a + b)


def verdict(mean: float, half: float) -> str:
    """Whether the interval leaves out 0."""
    if mean + half < 0:
        return "worse"
    return "better" if mean - half > 0 else "no difference shown"


def _cells(runs: list[dict[str, Any]], task: str) -> dict[Mode, list[dict[str, Any]]]:
    return {
        mode: sorted(
            (r for r in runs if (r["task"], r["staleness_wanted"], r["correction"]) == (task, *_key(mode))),
            key=lambda run: run["seed"],
        )
        for mode in (*MODES, *CONTRASTS.get(task, ()))
    }


def _key(mode: Mode) -> tuple[int, str]:
    return mode.staleness, mode.correction


def markdown(runs: list[dict[str, Any]]) -> str:
    """A table per task, and what it comes to."""
    parts = [ABOUT, "\n", *_summary(runs), FINDINGS]
    for name, task in TASKS.items():
        cells = _cells(runs, name)
        if len(cells[Mode()]) < 2:
            continue
        settings = "".join(f", `{setting}`" for setting in task.settings)
        updates = cells[Mode()][0]["updates"]
        parts += [
            f"**{task.title}**: `configs/{task.config}.yaml`, {task.steps:,} steps, {updates} updates{settings}.\n\n",
            "| s | correction | seeds | last 100 episodes | difference | | evaluated | whole training | difference "
            "| weight |\n|---|---|---|---|---|---|---|---|---|---|\n",
            *(_row(mode, cells) for mode in cells if len(cells[mode]) > 1),
            f"\n![return against steps and time](images/staleness_{name}.png)\n\n",
        ]
    return "".join(parts) + _slow([run for run in runs if run["task"] == "slow"])


def _row(mode: Mode, cells: dict[Mode, list[dict[str, Any]]]) -> str:
    ours, sync = cells[mode], cells[Mode()]
    digits = 2 if abs(np.mean([r["training"] for r in sync])) < 10 else 1

    def shown(field: str) -> str:
        mean, half = interval([run[field] for run in ours])
        return f"{mean:.{digits}f} ± {half:.{digits}f}"

    def against(field: str) -> tuple[float, float]:
        return difference([run[field] for run in ours], [run[field] for run in sync])

    if mode == Mode():
        cells_text = ("", "", shown("evaluation"), shown("mean_over_training"), "")
        first = "0 | synchronous"
    else:
        (mean, half), (area, area_half) = against("training"), against("mean_over_training")
        word = verdict(mean, half) if len(ours) >= ENOUGH else "too few seeds"
        cells_text = (
            f"{mean:+.{digits}f} ± {half:.{digits}f}", f"**{word}**" if word in ("worse", "better") else word,
            shown("evaluation"), shown("mean_over_training"), f"{area:+.{digits}f} ± {area_half:.{digits}f}",
        )  # fmt: skip
        first = f"{mode.staleness} | {mode.correction}"
    weights = [run["behaviour_weight"] for run in ours if "behaviour_weight" in run]
    weight = f"{np.mean(weights):.3f}" if weights else "–"
    difference_, word, evaluated, area, area_difference = cells_text
    return (
        f"| {first} | {len(ours)} | {shown('training')} | {difference_} | {word} | {evaluated} | {area} "
        f"| {area_difference} | {weight} |\n"
    )


def _summary(runs: list[dict[str, Any]]) -> list[str]:
    """Per correction: where it is significantly worse, by the final score and by the whole training."""
    lines = ["| correction | s | cells | final score worse | whole training worse |\n|---|---|---|---|---|\n"]
    for correction in CORRECTIONS:
        for limit, staleness in (("1 to 4", (1, 2, 4)), ("8", (8,))):
            worse: dict[str, list[str]] = {"training": [], "mean_over_training": []}
            count = 0
            for name, task in TASKS.items():
                cells = _cells(runs, name)
                for s in staleness:
                    ours, sync = cells[Mode(s, correction)], cells[Mode()]
                    if min(len(ours), len(sync)) < ENOUGH:
                        continue
                    count += 1
                    for field, places in worse.items():
                        if verdict(*difference([r[field] for r in ours], [r[field] for r in sync])) == "worse":
                            places.append(f"{task.title.split(' ')[0].rpartition('-')[0]} at {s}")
            if count:
                said = [f"{len(places)}{': ' if places else ''}{', '.join(places)}" for places in worse.values()]
                lines.append(f"| `{correction}` | {limit} | {count} | {said[0]} | {said[1]} |\n")
    return lines


def _slow(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return ""
    lines = [SLOW.format(steps=SLOW_STEPS)]
    scores = {s: [run["training"] for run in runs if run["staleness_wanted"] == s] for s in (0, 1)}
    between = "{:+.0f} ± {:.0f}".format(*difference(scores[1], scores[0]))
    for title, staleness in (("in turn", 0), ("overlapped", 1)):
        some = [run for run in runs if run["staleness_wanted"] == staleness]
        (score, half), (area, area_half) = (
            interval([run[key] for run in some]) for key in ("training", "mean_over_training")
        )
        seconds = float(np.mean([run["seconds"] for run in some]))
        lines.append(
            f"| {title} | {len(some)} | {score:.1f} ± {half:.1f} | {area:.1f} ± {area_half:.1f} | {seconds:.0f} "
            f"| {SLOW_STEPS / seconds:.0f} |\n"
        )
    return "".join(
        [
            *lines,
            SLOW_FINDING.format(difference=between),
            "\n![return against steps and time](images/staleness_slow.png)\n",
        ]
    )


# ---------------------------------------------------------------------- pictures

COLOURS = {0: "#222222", 1: "#8fbce6", 2: "#4a90d0", 4: "#1f5a9e", 8: "#b5532b"}


def _mean_curve(runs: list[dict[str, Any]], axis: int) -> tuple[Any, Any]:
    curves = [np.array(run["curve"]) for run in runs]
    first, last = max(curve[0, axis] for curve in curves), min(curve[-1, axis] for curve in curves)
    grid = np.linspace(first, last, 150)
    return grid, np.mean([np.interp(grid, curve[:, axis], curve[:, 2]) for curve in curves], axis=0)


def _panel(axes: Any, rows: dict[str, tuple[str, list[dict[str, Any]]]], axis: int, *, seeds: bool = False) -> None:
    for label, (colour, runs) in rows.items():
        if not runs:
            continue
        for run in runs if seeds else []:
            curve = np.array(run["curve"])
            axes.plot(curve[:, axis], curve[:, 2], color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(*_mean_curve(runs, axis), color=colour, linewidth=1.6, label=label)
    axes.set_xlabel("seconds" if axis else "environment steps", fontsize=8)
    if not axis:
        axes.xaxis.set_major_formatter(lambda at, _: f"{at / 1000:.0f}k" if at else "0")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _picture(name: str, panels: list[tuple[str, dict[str, tuple[str, Any]], int]], *, seeds: bool = False) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(3.2 * len(panels), 3.0), dpi=130, layout="constrained", sharey=True
    )
    for axes, (title, rows, axis) in zip(all_axes, panels, strict=True):
        _panel(axes, rows, axis, seeds=seeds)
        axes.set_title(title, fontsize=9)
    all_axes[0].set_ylabel("return, last 100 episodes", fontsize=8)
    all_axes[0].legend(frameon=False, fontsize=7, loc="best")
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"staleness_{name}.png")
    pyplot.close(figure)


def _pictures(runs: list[dict[str, Any]]) -> None:
    for name, task in TASKS.items():
        cells = _cells(runs, name)
        if not cells[Mode()]:
            continue

        def rows(correction: str, cells: dict[Mode, Any] = cells) -> dict[str, tuple[str, Any]]:
            stale = {f"staleness {s}": (COLOURS[s], cells[Mode(s, correction)]) for s in STALENESS}
            return {"synchronous": (COLOURS[0], cells[Mode()])} | stale

        panels = [(f"{task.title.split(' ')[0]}, {c}", rows(c), 0) for c in CORRECTIONS]
        _picture(name, [*panels, ("decoupled, by the clock (shared core)", rows("decoupled"), 1)])
    slow = {
        label: (COLOURS[s], [run for run in runs if run["task"] == "slow" and run["staleness_wanted"] == s])
        for label, s in (("in turn", 0), ("overlapped", 1))
    }
    if all(found for _, found in slow.values()):
        slow["overlapped"] = ("#b5532b", slow["overlapped"][1])
        _picture("slow", [("slow policy, by steps", slow, 0), ("slow policy, by the clock", slow, 1)], seeds=True)


def write(runs: list[dict[str, Any]]) -> None:
    """`results/staleness.md` and the pictures."""
    (RESULTS / "staleness.md").write_text(markdown(runs))
    _pictures(runs)
