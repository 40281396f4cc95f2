"""An evaluation, or a comparison of two, as one HTML page that needs nothing else: no script, no network, no colour.

Every number stands in a table; intervals are drawn beside it. Reads on paper, on a phone, in the dark.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from palaestra.actor.ui_comparison import Pairs, UiComparison
from palaestra.actor.ui_evaluation import TaskScore, UiEvaluation
from palaestra.experience.trajectory import Outcome

__all__ = ["comparison_page", "evaluation_page", "write_page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d9dee6; --paper: #fff; --mark: #1f6feb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b4; --line: #343c48; --paper: #14181f; --mark: #6cb2ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.soft { color: var(--soft); } .headline { font-size: 1.25rem; margin: 1rem 0; }
.note { color: var(--soft); font-size: .9rem; margin: 1.5rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; }
td { white-space: nowrap; } th { font-weight: 600; vertical-align: bottom; overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 9.5rem; }
tfoot td { font-weight: 600; }
svg { display: block; width: 5.5rem; height: 1rem; } svg .axis { stroke: var(--line); }
svg .range { stroke: var(--mark); stroke-width: 2.5; } svg .dot { fill: var(--mark); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; } dd { margin: 0; }
/* On a phone a row of a table is a little list of its own. */
@media screen and (max-width: 48rem) {
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; }
  table, tbody, tfoot, tr, td { display: block; } thead { display: none; }
  tr { border-bottom: 1px solid var(--line); padding: .6rem 0; }
  td { border: 0; padding: .1rem 0; display: flex; justify-content: space-between; gap: 1rem; white-space: normal; }
  td::before { content: attr(data-label); color: var(--soft); font-weight: 400; }
  td:first-child { font-weight: 600; } td:first-child::before { content: none; } td:empty { display: none; } }
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --mark: #000; }
  body { padding: 0; max-width: none; font-size: 10pt; } table, .note { font-size: 8pt; }
  th, td { padding: .2rem .25rem; } th:first-child, td:first-child { min-width: 7rem; } svg { width: 3.5rem; }
  tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def evaluation_page(evaluation: UiEvaluation, title: str) -> str:
    """How one model did."""
    return _page(title, _evaluation(evaluation))


def comparison_page(comparison: UiComparison, title: str, *, a: str, b: str) -> str:
    """How `a` did beside `b`, and then each by itself."""
    parts = [
        *_comparison(comparison, a, b),
        f"<h2>A: {escape(a)}</h2>", *_evaluation(comparison.a), f"<h2>B: {escape(b)}</h2>", *_evaluation(comparison.b),
    ]  # fmt: skip
    return _page(title, parts)


def write_page(page: str, path: Path) -> None:
    """Write it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    os.replace(temporary, path)


def _page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def _evaluation(evaluation: UiEvaluation) -> list[str]:
    overall = evaluation.overall
    rate, (low, high) = overall.success_rate, overall.ci95
    headline = "No episode can be counted."
    if rate is not None:
        headline = (
            f"<strong>{_percent(rate)}</strong> of {len(overall.episodes)} episodes solved "
            f"<span class=soft>(95 % interval {_percent(low)} to {_percent(high)})</span>"
        )
    parts = [f"<p class=headline>{headline}</p>", _facts(evaluation), _task_table(evaluation)]
    if evaluation.passes:
        rows = [
            [str(found.k), _percent(found.pass_at_k), _percent(found.pass_hat_k), str(found.specs)]
            for found in evaluation.passes
        ]
        note = "One seed played several times: solved in at least one of k tries, and in all of k tries."
        parts.append(_table(note, ["k", "pass@k", "pass^k", "task specs"], rows))
    return parts


def _facts(evaluation: UiEvaluation) -> str:
    overall = evaluation.overall
    versions = [version for entry in overall.episodes for version in entry.versions if version >= 0]
    facts = {
        "Environment failures": f"{overall.environment_failed}, in no rate",
        "Mean reward": f"{_number(overall.mean_return)} (standard deviation {_number(overall.std_return)})",
        "Mean steps": _number(overall.mean_length),
        "Policy versions": f"{min(versions)} to {max(versions)}" if versions else "none",
        "Time": f"{evaluation.seconds:.1f} s in all, {_number(overall.mean_seconds)} s an episode",
    }
    return "<dl>" + "".join(f"<dt class=soft>{name}</dt><dd>{value}</dd>" for name, value in facts.items()) + "</dl>"


def _task_table(evaluation: UiEvaluation) -> str:
    head = [
        "task", "solved", "rate", "95 % interval", "", "mean reward", "mean steps", "truncated", "unreadable",
        "unread turns", "screen failed",
    ]  # fmt: skip
    rows = [_task_row(task, score) for task, score in evaluation.per_task.items()]
    note = (
        "By task. The bar runs from 0 to 100 %: the rate and its 95 % interval (Wilson). Truncated: episodes that "
        "reached the step limit. Unreadable: episodes that ended because the text was no action; unread turns: the "
        "share of turns. Screen failed: environment failures, in no rate."
    )
    return _table(note, head, rows, foot=_task_row("all", evaluation.overall) if len(rows) > 1 else None)


def _task_row(task: str, score: TaskScore) -> list[str]:
    low, high = score.ci95
    rate = score.success_rate
    return [
        escape(task), f"{score.successes} of {len(score.episodes)}", _percent(rate),
        f"{100 * low:.1f} – {_percent(high)}", "" if rate is None else _bar(rate, low, high, 0.0),
        _number(score.mean_return), _number(score.mean_length), _percent(score.share(Outcome.TRUNCATED)),
        _percent(score.share(Outcome.UNREADABLE)), _percent(score.unreadable_turns), str(score.environment_failed),
    ]  # fmt: skip


def _comparison(comparison: UiComparison, a: str, b: str) -> list[str]:
    overall = comparison.overall
    low, high = overall.ci95
    headline = "No episode of A has a partner in B."
    if overall.difference is not None:
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
    return [
        f"<p>A: {escape(a)}<br>B: {escape(b)}</p>",
        f"<p class=headline>{headline}</p>",
        f"<p class=soft>Without a partner: {comparison.unpaired_a} of A, {comparison.unpaired_b} of B. Broken screens: "
        f"{comparison.a.overall.environment_failed} of A, {comparison.b.overall.environment_failed} of B. None of "
        "them is in the pairs.</p>",
        _table(note, head, rows, foot=_pairs_row("all", overall) if len(rows) > 1 else None),
    ]


def _pairs_row(task: str, pairs: Pairs) -> list[str]:
    low, high = pairs.ci95
    drawn = "" if pairs.difference is None else _bar(pairs.difference, low, high, -1.0)
    return [
        escape(task), str(len(pairs)), str(pairs.both), str(pairs.only_a), str(pairs.only_b), str(pairs.neither),
        _points(pairs.difference), f"{_points(low)} to {_points(high)}", drawn, f"{pairs.p_value:.2g}",
    ]  # fmt: skip


def _table(note: str, head: Sequence[str], rows: Iterable[Sequence[str]], foot: Sequence[str] | None = None) -> str:
    """A table of cells that are HTML already. Each knows its column, for pages too narrow for columns."""
    columns = "".join(f"<th scope=col>{cell}</th>" for cell in head)

    def line(row: Sequence[str]) -> str:
        cells = zip(head, row, strict=True)
        return "<tr>" + "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells) + "</tr>"

    last = "" if foot is None else f"<tfoot>{line(foot)}</tfoot>"
    body = "".join(line(row) for row in rows)
    return f"<p class=note>{note}</p><table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody>{last}</table>"


def _bar(value: float, low: float, high: float, least: float) -> str:
    """A dot and its interval between `least` and 1; a zero line when there is something on either side of it."""
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
