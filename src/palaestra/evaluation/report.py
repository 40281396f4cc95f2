"""HTML reports of an evaluation or a comparison: one self-contained page without scripts.

The page starts with a chart of the success rates by task and with the first episode that was not solved. Every number
is in a table, with intervals drawn beside it. The page works in print, on phones and in dark mode.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from palaestra.evaluation.screens import PairCounts, ScreenComparison, ScreenEvaluation, TaskScore
from palaestra.evaluation.viewer import episode_key, viewer_link
from palaestra.files.atomic import write_bytes

_GRID = (0, 25, 50, 75, 100)
"""Lines of the chart, in percent."""


@dataclass(frozen=True)
class Viewer:
    """The page with the episodes, which the report links to (`evaluation.viewer`)."""

    page: str
    """Its file name, in the directory of the report."""
    labels: tuple[str, str] = ("", "")
    """Names of A and B in that page; empty if it shows one policy."""


def evaluation_page(evaluation: ScreenEvaluation, title: str, *, viewer: Viewer | None = None) -> str:
    """The report of one evaluation."""
    chart = _chart([("", evaluation)])
    first = _first_unsolved(evaluation, viewer)
    return _render_page(title, [_headline(evaluation), chart, first, *_evaluation_parts(evaluation, viewer)])


def comparison_page(
    comparison: ScreenComparison,
    title: str,
    *,
    a: str,
    b: str,
    picture: str = "",
    picture_data: bytes = b"",
    viewer: Viewer | None = None,
) -> str:
    """The comparison of `a` with `b`, followed by the report of each.

    `picture` is the name of a file beside the page with one episode of both (`evaluation.before_after`), and
    `picture_data` its content, a PNG that is shown in the page.
    """
    head, *table = _comparison_parts(comparison)
    parts = [
        head,
        _chart([(f"B: {b}", comparison.b), (f"A: {a}", comparison.a)]),
        _first_unsolved(comparison.a, viewer),
    ]
    if picture:
        text = "An episode that A solved and B did not" if comparison.overall.only_a else "The first episode of both"
        shown = ""
        if picture_data:
            shown = f'<img src="data:image/png;base64,{b64encode(picture_data).decode()}" alt="{text}, step by step">'
        parts.append(f'<p class=picture><a href="{escape(picture)}">{text}, step by step</a>{shown}</p>')
    parts += table
    for number, (name, evaluation) in enumerate(((a, comparison.a), (b, comparison.b))):
        parts += [f"<h2>{'AB'[number]}: {escape(name)}</h2>", _headline(evaluation)]
        parts += _evaluation_parts(evaluation, viewer, number)
    return _render_page(title, parts)


def write_page(page: str, path: Path) -> None:
    """Write the page atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, page.encode(errors="replace"), durable=False)


def _render_page(title: str, parts: Iterable[str]) -> str:
    assets = files("palaestra.evaluation") / "assets"
    template, style = ((assets / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    values = {"title": escape(title), "style": style, "body": "\n".join(parts)}
    # In one pass, so that placeholders in a title are not replaced.
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def _headline(evaluation: ScreenEvaluation) -> str:
    overall = evaluation.overall
    headline = "No episode can be counted."
    if overall.success_rate is not None:
        low, high = overall.ci95
        headline = (
            f"<strong>{_percent(overall.success_rate)}</strong> of {overall.episodes} episodes solved "
            f"<span class=soft>(95 % interval {_percent(low)} to {_percent(high)})</span>"
        )
    return f"<p class=headline>{headline}</p>"


def _chart(series: Sequence[tuple[str, ScreenEvaluation]]) -> str:
    """Success rates by task with their intervals, of one evaluation or of B and A below each other."""
    tasks = list(dict.fromkeys(task for _, evaluation in series for task in evaluation.per_task))
    rows = []
    for task in tasks:
        scores = [evaluation.per_task.get(task) for _, evaluation in series]
        shown = [(place, score) for place, score in enumerate(scores) if score is not None]
        marks = "".join(_mark(score, place, len(series)) for place, score in shown)
        values = " → ".join("–" if score is None else _whole_percent(score.success_rate) for score in scores)
        grid = "".join(f"<line class=axis x1={x}% x2={x}% y1=0 y2=100% />" for x in _GRID)
        height = 10 + 14 * len(series)
        rows.append(
            f"<div class=task>{escape(task)}</div><div class=plot>"
            f'<svg height={height} aria-hidden="true">{grid}{marks}</svg></div><div class=value>{values}</div>'
        )
    if not rows:
        return ""
    ticks = "".join(f"<span>{x} %</span>" for x in _GRID)
    kinds = _kinds(len(series))
    names = (
        f"<span><i class={kind}></i>{escape(name)}</span>"
        for kind, (name, _) in zip(kinds, series, strict=True)
        if name
    )
    legend = f"<p class=legend>{''.join(names)}<span class=soft>success rate with 95 % interval</span></p>"
    return f"{legend}<div class=chart>{''.join(rows)}<div></div><div class=ticks>{ticks}</div><div></div></div>"


def _mark(score: TaskScore, place: int, count: int) -> str:
    """A dot with its interval."""
    if score.success_rate is None:
        return ""
    kind, y = _kinds(count)[place], 12 + 14 * place
    low, high, rate = (round(100 * share, 2) for share in (*score.ci95, score.success_rate))
    return (
        f"<line class='range {kind}' x1={low}% x2={high}% y1={y} y2={y} />"
        f"<circle class='dot {kind}' cx={rate}% cy={y} r=4.5 />"
    )


def _kinds(count: int) -> list[str]:
    """Style of each series: the last one is the one of interest."""
    return [*["other"] * (count - 1), "main"]


def _first_unsolved(evaluation: ScreenEvaluation, viewer: Viewer | None) -> str:
    """The first episode that was not solved, which is what a reader wants to see next."""
    entry = next((entry for entry in evaluation.valid_entries if not entry.success), None)
    if entry is None:
        return ""
    how = {"truncated": "step limit reached", "unreadable": "unreadable replies"}.get(entry.outcome.value, "not solved")
    reason = f": {entry.reason}" if entry.reason and entry.outcome.value == "failure" else ""
    where = f"{entry.task}, seed {entry.seed}; {how} after {entry.steps} steps{reason}"
    text = f"<strong>{escape(entry.instruction or entry.task)}</strong> <span class=soft>({escape(where)})</span>"
    if viewer is not None:
        link = viewer_link(viewer.page, key=episode_key(entry.episode_id, viewer.labels[0]))
        text += f' <a href="{escape(link)}">Look at it</a>'
    return f"<p class=first><span class=soft>First episode that was not solved:</span> {text}</p>"


def _evaluation_parts(evaluation: ScreenEvaluation, viewer: Viewer | None, number: int = 0) -> list[str]:
    parts = [_summary(evaluation), _task_table(evaluation, viewer, number)]
    if evaluation.passes:
        rows = [
            [str(passes.k), _percent(passes.pass_at_k), _percent(passes.pass_hat_k), str(passes.specs)]
            for passes in evaluation.passes
        ]
        note = "One seed played several times: solved in at least one of k tries, and in all of k tries."
        parts.append(_table(note, ["k", "pass@k", "pass^k", "task specs"], rows))
    return parts


def _summary(evaluation: ScreenEvaluation) -> str:
    overall, versions = evaluation.overall, evaluation.policy_versions
    lines = {
        "Environment failures": f"{overall.environment_failed} (not part of the rate)",
        "Mean reward": f"{_number(overall.mean_return)} (standard deviation {_number(overall.std_return)})",
        "Mean steps": _number(overall.mean_length),
        "Policy version": " to ".join(str(version) for version in sorted(set(versions))) if versions else "none",
        "Time": f"{evaluation.seconds:.1f} s in all, {_number(overall.mean_seconds)} s an episode",
    }
    return "<dl>" + "".join(f"<dt class=soft>{name}</dt><dd>{value}</dd>" for name, value in lines.items()) + "</dl>"


def _task_table(evaluation: ScreenEvaluation, viewer: Viewer | None, number: int) -> str:
    head = ["task", "solved", "rate", "95 % interval", "", "mean reward", "mean steps"]
    head += ["truncated", "unreadable", "unreadable turns", "environment failures"]
    rows = [_task_row(task, score) for task, score in evaluation.per_task.items()]
    if viewer is not None:
        label = viewer.labels[number]
        for row, (task, score) in zip(rows, evaluation.per_task.items(), strict=True):
            if unsolved := score.episodes - score.successes:
                link = viewer_link(viewer.page, task=task, label=label, unsolved=True)
                row[0] += f' <a href="{escape(link)}">{unsolved} not solved</a>'
    note = (
        "By task. The bar runs from 0 to 100 %: the rate and its 95 % interval (Wilson). Truncated: episodes that "
        "reached the step limit. Unreadable: episodes that ended after unreadable replies; unreadable turns: the "
        "share of turns. Environment failures are not part of any rate."
    )
    return _table(note, head, rows, foot=_task_row("all", evaluation.overall) if len(rows) > 1 else None)


def _task_row(task: str, score: TaskScore) -> list[str]:
    rate, (low, high) = score.success_rate, score.ci95
    solved, interval = f"{score.successes} of {score.episodes}", f"{100 * low:.1f} – {_percent(high)}"
    bar = "" if rate is None else _bar(rate, low, high, 0.0)
    means = map(_number, (score.mean_return, score.mean_length))
    shares = map(_percent, (score.truncated_share, score.unreadable_share, score.unreadable_turns))
    return [escape(task), solved, _percent(rate), interval, bar, *means, *shares, str(score.environment_failed)]


def _describe_difference(difference: float) -> str:
    points = f"{abs(100 * difference):.1f}"
    if points == "0.0":
        return "A and B have <strong>the same</strong> success rate"
    side = "above" if difference > 0 else "below"
    return f"The success rate of A is <strong>{points} percentage points {side}</strong> that of B"


def _comparison_parts(comparison: ScreenComparison) -> list[str]:
    overall = comparison.overall
    headline = "No episode of A has a partner in B."
    if overall.difference is not None:
        low, high = overall.ci95
        headline = (
            f"{_describe_difference(overall.difference)} "
            f"<span class=soft>(95 % interval {_points(low)} to {_points(high)}; p = {overall.p_value:.3g}; "
            f"{len(overall)} pairs)</span>"
        )
        if low <= 0 <= high:
            headline += "<br><span class=soft>The interval includes zero: the difference may be chance.</span>"
    rows = [_pairs_row(task, pairs) for task, pairs in comparison.per_task.items()]
    head = ["task", "pairs", "both", "only A", "only B", "neither", "points", "95 % interval", "", "p"]
    note = (
        "Episodes of equal task, parameters and seed. The bar runs from −100 to +100 points. "
        "p: exact McNemar test, two-sided. Interval: Tango's score interval for paired shares."
    )
    return [
        f"<p class=headline>{headline}</p>",
        *_excluded_parts(comparison),
        _table(note, head, rows, foot=_pairs_row("all", overall) if len(rows) > 1 else None),
    ]


def _excluded_parts(comparison: ScreenComparison) -> list[str]:
    """How many episodes are in no pair, if there are any."""
    counts = {
        "Without a partner": comparison.unpaired_counts,
        "Environment failures": (comparison.a.overall.environment_failed, comparison.b.overall.environment_failed),
    }
    shown = [f"{name}: {a} of A, {b} of B." for name, (a, b) in counts.items() if a or b]
    return [f"<p class=soft>{' '.join(shown)} None of them is in the pairs.</p>"] if shown else []


def _pairs_row(task: str, pairs: PairCounts) -> list[str]:
    low, high = pairs.ci95
    bar = "" if pairs.difference is None else _bar(pairs.difference, low, high, -1.0)
    counts = (len(pairs), pairs.both, pairs.only_a, pairs.only_b, pairs.neither)
    interval = f"{_points(low)} to {_points(high)}"
    return [escape(task), *map(str, counts), _points(pairs.difference), interval, bar, f"{pairs.p_value:.2g}"]


def _table(note: str, head: Sequence[str], rows: Iterable[Sequence[str]], foot: Sequence[str] | None = None) -> str:
    """A table of HTML cells. Each cell names its column, for narrow pages."""

    def line(row: Sequence[str]) -> str:
        cells = zip(head, row, strict=True)
        return "<tr>" + "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells) + "</tr>"

    columns = "".join(f"<th scope=col>{cell}</th>" for cell in head)
    last = "" if foot is None else f"<tfoot>{line(foot)}</tfoot>"
    body = "".join(map(line, rows))
    return f"<p class=note>{note}</p><table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody>{last}</table>"


def _bar(value: float, low: float, high: float, least: float) -> str:
    """A dot and its interval between `least` and 1, with a zero line if `least` is negative."""
    x = [round(4 + 92 * (number - least) / (1 - least), 2) for number in (value, low, high)]
    zero = "<line class=axis x1=50 x2=50 y1=1 y2=11 />" if least < 0 else ""
    return (
        f'<svg viewBox="0 0 100 12" aria-hidden="true"><line class=axis x1=4 x2=96 y1=6 y2=6 />{zero}'
        f"<line class=range x1={x[1]} x2={x[2]} y1=6 y2=6 /><circle class=dot cx={x[0]} cy=6 r=3.5 /></svg>"
    )


def _whole_percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _points(difference: float | None) -> str:
    return "–" if difference is None else f"{100 * difference:+.1f}".replace("-", "−")


def _number(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}"
