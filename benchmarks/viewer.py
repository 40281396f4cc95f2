"""How fast the trajectory viewer opens: synthetic episodes, every picture different, in a real browser.

    python -m benchmarks.viewer [--episodes 1000] [--turns 5] [--width 160 --height 210] [--beside]

Prints one JSON document: size of the file; seconds until the list can be used, until an episode is on the screen with
its first picture decoded, until a search has been answered; and the same as seconds of computing (cpu), which a busy
machine does not stretch. The middle of three runs.
"""

import argparse
import asyncio
import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from palaestra.evaluation.viewer import MAX_BYTES, write_viewer
from palaestra.experience.trajectory import Outcome, Trajectory, Turn
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.screen import Size

WORDS = "click the blue button then type hello into the field below and submit it".split()
OPENED = "document.documentElement.dataset.ready === 'yes'"
SEARCH = """(() => {
  const search = document.getElementById('search');
  search.value = 'task-7 hello';
  search.dispatchEvent(new Event('input'));
})()"""
SHOWN = "[...document.querySelectorAll('.screen img')].some((i) => i.complete && i.naturalWidth > 0)"


def screen(rng, width, height):
    """Something like a page: boxes, lines of text, a little noise where a photograph would be."""
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    for _ in range(12):
        x, y = int(rng.integers(width - 30)), int(rng.integers(height - 12))
        colour = tuple(int(c) for c in rng.integers(0, 255, 3))
        draw.rectangle((x, y, x + int(rng.integers(20, width // 3)), y + 14), fill=colour)
        draw.text((x + 3, y + 1), " ".join(rng.choice(WORDS, 3)), fill="black")
    side = max(8, width // 12)
    picture.paste(Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)), (2, height - side - 2))
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


def episode(rng, number, turns, screens):
    """An episode with pictures that no other has: what follows the end of a PNG is not drawn, and makes it another."""
    chosen = rng.integers(len(screens), size=turns + 1)
    pictures = [screens[place] + b"%d.%d" % (number, turn) for turn, place in enumerate(chosen)]
    height, width = (int.from_bytes(pictures[0][at : at + 4], "big") for at in (20, 16))
    names = [hashlib.sha256(data).hexdigest() for data in pictures]
    made = []
    for i in range(turns):
        tokens = rng.integers(0, 400, 40)
        at = [int(rng.integers(width)), int(rng.integers(height))]
        made.append(
            Turn(
                pictures=(names[i],), image_sizes=((width, height),), token_ids=tokens, versions=[number // 50] * 40,
                prompt_ids=[*rng.integers(0, 400, 250), *[7] * 300], log_probs=-rng.exponential(0.3, 40),
                text=" ".join(rng.choice(WORDS, 20)), action={"kind": "click", "at": at}, reward=float(i == turns - 1),
            )
        )  # fmt: skip
    task = {
        "task": f"suite/task-{number % 20}", "seed": number, "params": {}, "instruction": " ".join(WORDS[:8]),
        "step_limit": 10, "width": width, "height": height,
    }  # fmt: skip
    return Trajectory(
        f"episode-{number:05d}", task, tuple(made), list(Outcome)[number % 5], dict(zip(names, pictures, strict=True)),
        last_picture=names[-1], seconds=2.0,
    )  # fmt: skip


def cpu_s(group):
    """What the browser and its children have computed so far."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) * (int(fields[2]) == group)
    return total / os.sysconf("SC_CLK_TCK")


async def measure(path, last):
    """Open the page in a browser and work with it."""
    browser = await Browser.start()
    try:
        page = await browser.open(Size(1280, 900))

        async def ask(expression):
            settings = {"expression": expression, "returnByValue": True}
            answer = await browser.cdp.call("Runtime.evaluate", settings, session=page.session, timeout=120)
            return answer["result"].get("value")

        async def until(expression):
            start = time.perf_counter()
            while not await ask(expression):
                await browser.tick(page, 1000 * time.monotonic(), timeout=60)
            return time.perf_counter() - start

        start, before = time.perf_counter(), cpu_s(browser.pid)
        await browser.cdp.call("Page.navigate", {"url": path.as_uri()}, session=page.session, timeout=120)
        await until(OPENED)
        await browser.draw(page, timeout=60)
        found = {"open_s": time.perf_counter() - start, "open_cpu_s": cpu_s(browser.pid) - before}
        for name, doing, done in (("episode", f"location.hash = '{last}'; 1", SHOWN), ("search", SEARCH, "true")):
            start, before = time.perf_counter(), cpu_s(browser.pid)
            await ask(doing)
            await until(done)
            await ask("document.body.offsetHeight")  # force a layout after the change
            found |= {f"{name}_s": time.perf_counter() - start, f"{name}_cpu_s": cpu_s(browser.pid) - before}
        return found
    finally:
        await browser.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--height", type=int, default=210)
    parser.add_argument("--beside", action="store_true")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    screens = [screen(rng, given.width, given.height) for _ in range(50)]
    made = (episode(rng, n, given.turns, screens) for n in range(given.episodes))
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        written = write_viewer(made, Path(directory) / "page.html", max_bytes=0 if given.beside else 4 * MAX_BYTES)
        document = {**vars(given), "pictures": written.pictures, "file_mb": written.bytes / 2**20}
        document["write_s"] = time.perf_counter() - start
        runs = [asyncio.run(measure(written.path, f"episode-{given.episodes - 1:05d}")) for _ in range(3)]
    document |= {name: round(sorted(run[name] for run in runs)[1], 3) for name in runs[0]}
    document["load_average"] = os.getloadavg()[0]
    print(json.dumps(document))


if __name__ == "__main__":
    main()
