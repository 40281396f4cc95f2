"""The tables of `benchmarks.sessions`."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]

NAMES = {
    "raw": "raw CDP, picture at once", "settled": "raw CDP, settled picture",
    "session": "`BrowserSession` in process", "server": "session servers over HTTP",
    "gateway": "through the gateway", "client": "through the gateway, with `GatewayClient`'s sessions",
}  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    parts = ["<!-- written by `python -m benchmarks.sessions` -->\n"]
    if result["openings"]:
        parts.append(_openings(result))
    if result["steps"]:
        parts.append(_steps(result))
    parts.append(
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, `{result['chromium']}`, "
        f"load {machine['load_at_start']} before and {result['load_at_end']} after; {machine['date']}.\n"
    )
    return "\n".join(parts)


def _openings(result: dict[str, Any]) -> str:
    lines = [
        "| task | way | open p50 | reset p50 | first screenshot p50 | all p50 | all p99 | close p50 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in result["openings"]:
        way = {"session": "in process", "server": "session server", "gateway": "gateway"}[one["way"]]
        lines.append(
            f"| `{one['task']}` | {way} | {one['open']['p50']:.1f} | {one['reset']['p50']:.1f} "
            f"| {one['screenshot']['p50']:.1f} | **{one['all']['p50']:.1f}** | {one['all']['p99']:.1f} "
            f"| {one['close']['p50']:.1f} |"
        )
    loads = "; ".join(f"`{task}` {found['p50']:.1f}" for task, found in result["navigation"].items())
    lines += ["", f"Of that, the page's own loading, p50: {loads}.", ""]
    return "\n".join(lines)


def _steps(result: dict[str, Any]) -> str:
    lines = [
        "| agents | browsers | way | steps/s, median | best round | of raw by the clock / processor "
        "| of settled raw by the clock / processor | processor per step: browser + ours ms | step p50 / p99 ms "
        "| strangers |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one['agents']} | {one['browsers']} | {NAMES[one['contender']]} | {one['median']:.0f} | {one['best']:.0f} "
        f"| {_shares(one['of_raw'])} | **{_shares(one['of_settled'])}** "
        f"| {one['browser_cpu_ms']:.1f} + {one['our_cpu_ms']:.1f} "
        f"| {one['p50']:.1f} / {one['p99']:.1f} | {one['others_share']:.0%} |"
        for one in result["steps"]
    ]
    return "\n".join([*lines, ""])


def _shares(of: dict[str, float] | None) -> str:
    return "–" if of is None else f"{of['clock']:.0%} / {of['processor']:.0%}"
