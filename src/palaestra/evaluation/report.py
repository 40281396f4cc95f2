"""HTML reports of an evaluation or a comparison: one self-contained page without scripts.

Every number is in a table, with intervals drawn beside it. The page works in print, on phones and in dark mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from palaestra.evaluation.screens import PairCounts, ScreenComparison, ScreenEvaluation, TaskScore
from palaestra.files.atomic import write_bytes


def evaluation_page(evaluation: ScreenEvaluation, title: str) -> str:
    """The report of one evaluation."""
    return _render_page(title, _evaluation_parts(evaluation))


def comparison_page(comparison: ScreenComparison, title: str, *, a: str, b: str, picture: str = "") -> str:
    """The comparison of `a` with `b`, followed by the report of each.

    `picture` is the name of a file beside the page with one episode of both (`evaluation.before_after`).
    """
    parts = _comparison_parts(comparison, a, b)
    if picture:
        text = "An episode that A solved and B did not" if comparison.overall.only_a else "The first episode of both"
        parts.append(f'<p><a href="{escape(picture)}">{text}, step by step</a></p>')
    for letter, name, evaluation in (("A", a, comparison.a), ("B", b, comparison.b)):
        parts += [f"<h2>{letter}: {escape(name)}</h2>", *_evaluation_parts(evaluation)]
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


def _evaluation_parts(evaluation: ScreenEvaluation) -> list[str]:
    overall = evaluation.overall
    headline = "No episode can be counted."
    if overall.success_rate is not None:
        low, high = overall.ci95
        headline = (
            f"<strong>{_percent(overall.success_rate)}</strong> of {overall.episodes} episodes solved "
            f"<span class=soft>(95 % interval {_percent(low)} to {_percent(high)})</span>"
        )
    parts = [f"<p class=headline>{headline}</p>", _summary(evaluation), _task_table(evaluation)]
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
        "Environment failures": f"{overall.environment_failed}, in no rate",
        "Mean reward": f"{_number(overall.mean_return)} (standard deviation {_number(overall.std_return)})",
        "Mean steps": _number(overall.mean_length),
        "Policy versions": f"{versions[0]} to {versions[1]}" if versions else "none",
        "Time": f"{evaluation.seconds:.1f} s in all, {_number(overall.mean_seconds)} s an episode",
    }
    return "<dl>" + "".join(f"<dt class=soft>{name}</dt><dd>{value}</dd>" for name, value in lines.items()) + "</dl>"


def _task_table(evaluation: ScreenEvaluation) -> str:
    head = ["task", "solved", "rate", "95 % interval", "", "mean reward", "mean steps"]
    head += ["truncated", "unreadable", "unreadable turns", "environment failures"]
    rows = [_task_row(task, score) for task, score in evaluation.per_task.items()]
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


def _comparison_parts(comparison: ScreenComparison, a: str, b: str) -> list[str]:
    overall = comparison.overall
    headline = "No episode of A has a partner in B."
    if overall.difference is not None:
        low, high = overall.ci95
        headline = (
            f"A solves <strong>{_points(overall.difference)} points</strong> against B "
            f"<span class=soft>(95 % interval {_points(low)} to {_points(high)}; p = {overall.p_value:.3g}; "
            f"{len(overall)} pairs)</span>"
        )
    rows = [_pairs_row(task, pairs) for task, pairs in comparison.per_task.items()]
    head = ["task", "pairs", "both", "only A", "only B", "neither", "points", "95 % interval", "", "p"]
    note = (
        "Episodes of equal task, parameters and seed. The bar runs from −100 to +100 points. "
        "p: exact McNemar test, two-sided. Interval: Tango's score interval for paired shares."
    )
    unpaired_a, unpaired_b = comparison.unpaired_counts
    return [
        f"<p>A: {escape(a)}<br>B: {escape(b)}</p>",
        f"<p class=headline>{headline}</p>",
        f"<p class=soft>Without a partner: {unpaired_a} of A, {unpaired_b} of B. Environment failures: "
        f"{comparison.a.overall.environment_failed} of A, {comparison.b.overall.environment_failed} of B. None of "
        "them is in the pairs.</p>",
        _table(note, head, rows, foot=_pairs_row("all", overall) if len(rows) > 1 else None),
    ]


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


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _points(difference: float | None) -> str:
    return "–" if difference is None else f"{100 * difference:+.1f}".replace("-", "−")


def _number(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}"
