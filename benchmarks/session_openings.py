"""Opening a session of MiniWoB with and without a page that was loaded in advance, and the processor time per episode.

`python -m benchmarks.session_openings` plays episodes of one click in two browsers in turn: one keeps loaded pages in
reserve, the other only blank ones. Processor time is of all processes of the browser, until the page in reserve is
ready again, so that loading it counts. Writes benchmarks/results/session_openings.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import facts, load
from palaestra.processes.procfs import list_descendants
from palaestra.sessions.action import Click, Point
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.task import TaskRequest

RESULTS = Path(__file__).parent / "results"
TASKS = ("click-button", "click-checkboxes", "book-flight", "email-inbox")
WARM_UP = 3
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def browser_cpu_ms(browser: Browser) -> float:
    """Processor time of the browser, of its processes and of those that have ended."""
    ticks = 0
    for pid in (browser.pid, *list_descendants(browser.pid)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks * _TICK_MS


async def play_episode(browser: Browser, task: str, seed: int) -> dict[str, Any]:
    async def get_browser() -> Browser:
        return browser

    before, begin = browser_cpu_ms(browser), time.perf_counter()
    session = BrowserSession(get_browser)
    await session.reset(TaskRequest(f"miniwob/{task}", seed))
    reset = time.perf_counter()
    screenshot = await session.screenshot()
    end = time.perf_counter()
    await session.act(Click(Point(80, 100)), step=1)
    await session.close()
    await browser.loaded_pages.settle()
    await browser.blank_pages.settle()
    await asyncio.sleep(0.03)  # the processes of the closed page end
    return {
        "task": task,
        "reset_ms": 1000 * (reset - begin),
        "open_ms": 1000 * (end - begin),
        "cpu_ms": browser_cpu_ms(browser) - before,
        "sha256": screenshot.sha256,
    }


async def play(episodes: int) -> list[dict[str, Any]]:
    rows = []
    browsers = {"blank": await Browser.start(), "loaded": await Browser.start()}
    browsers["blank"].loaded_pages.prepare = lambda *_: None  # type: ignore[method-assign]
    try:
        for task in TASKS:
            for seed in range(episodes + WARM_UP):
                pair = [{"reserve": name, **await play_episode(one, task, seed)} for name, one in browsers.items()]
                assert pair[0]["sha256"] == pair[1]["sha256"], f"{task}, seed {seed}: the first screens differ"
                rows += pair if seed >= WARM_UP else []
    finally:
        for browser in browsers.values():
            await browser.stop()
    return rows


def table(rows: list[dict[str, Any]], machine: dict[str, Any], load_at_end: Any) -> str:
    lines = [
        "<!-- written by `python -m benchmarks.session_openings` -->",
        "",
        "| task | page in reserve | reset p50 ms | reset and first screenshot p50 ms | processor ms per episode |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for task in TASKS:
        for reserve in ("blank", "loaded"):
            own = [row for row in rows if (row["task"], row["reserve"]) == (task, reserve)]
            reset, opened = (statistics.median(row[name] for row in own) for name in ("reset_ms", "open_ms"))
            cpu = statistics.mean(row["cpu_ms"] for row in own)
            lines.append(f"| `{task}` | {reserve} | {reset:.1f} | {opened:.1f} | {cpu:.0f} |")
    lines += ["", f"Load {machine['load_at_start']} before and {load_at_end} after; {machine['date']}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=20, help="per task and browser")
    options = parser.parse_args()
    machine = facts()
    rows = asyncio.run(play(options.episodes))
    result = {"machine": machine, "load_at_end": load(), "rows": rows}
    (RESULTS / "session_openings.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "session_openings.md").write_text(table(rows, machine, result["load_at_end"]))
    print(table(rows, machine, result["load_at_end"]))


if __name__ == "__main__":
    main()
