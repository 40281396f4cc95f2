"""`BrowserSession` in the player's own process: one browser, some sessions; the program beside `sessions_raw_cdp`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from benchmarks.sessions import Act, play
from palaestra.sessions.action import Click, Point
from palaestra.sessions.browser.browser import SharedBrowser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.task import TaskRequest


def acting(session: BrowserSession, points: list[list[int]]) -> Act:
    async def act(number: int) -> bytes:
        step = await session.act(Click(Point(*points[number % len(points)])), step=number)
        return step.screenshot.data

    return act


async def _main(options: argparse.Namespace) -> None:
    shared = SharedBrowser(find_chromium(options.chromium))
    try:
        sessions = [BrowserSession(shared.get) for _ in range(options.pages)]
        await asyncio.gather(*(
            session.reset(TaskRequest(options.task, options.seed + number, {"step_limit": 10**9}))
            for number, session in enumerate(sessions)
        ))  # fmt: skip
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        found = await play([acting(session, options.points) for session in sessions], options.seconds)
        print(json.dumps(found), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # stay alive, so that the parent can measure the CPU time
    finally:
        await shared.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=3, help="of the first session")
    parser.add_argument("--points", type=json.loads, default=[[15, 63]], help="where to click, in turn, as JSON")
    parser.add_argument("--chromium", default=None)
    options = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(_main(options))
    else:
        uvloop.run(_main(options))


if __name__ == "__main__":
    main()
