"""The studio's window under measurement: one part in one process, started by `benchmarks.studio`.

    python -m benchmarks.studio_window PART HOME '{"run_ids": [...], ...}'

Prints the result as a line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEvent, QEventLoop, Qt, QTimer
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QApplication

from benchmarks.event_loop_probe import EventLoopProbe, resident_bytes
from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService
from palaestra.runs.play.protocol import SetSpeed
from palaestra.runs.play.state import StepReport
from palaestra.studio.model.play import PlayModel
from palaestra.studio.model.settings import Settings
from palaestra.studio.qt import application
from palaestra.studio.qt.window import StudioWindow

CARTPOLE_FPS = 50.0
_WAIT_S = 120.0
_POLL_MS = 10


def wait_until(is_done: Callable[[], object], timeout_s: float = _WAIT_S) -> None:
    """Let the window live until something is done. Unlike a loop with pauses, it adds no latency."""
    loop, timer = QEventLoop(), QTimer()
    deadline = time.monotonic() + timeout_s
    timer.timeout.connect(lambda: loop.quit() if is_done() or time.monotonic() > deadline else None)
    timer.start(_POLL_MS)
    if not is_done():
        loop.exec()
    timer.stop()
    if not is_done():
        raise TimeoutError("the window did not get there")


def wait(seconds: float) -> None:
    """Let the window live for some time."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, seconds + _WAIT_S)


class FramePaints:
    """When which step of the play was painted."""

    def __init__(self, window: StudioWindow) -> None:
        self.paints: list[tuple[float, StepReport]] = []
        self._latencies: list[float] = []
        self._newest: StepReport | None = None
        page, show = window.play_page, window.play_page.show_frame

        def show_frame(image: Any, report: StepReport) -> None:
            self._newest = report
            show(image, report)

        page.show_frame = show_frame  # type: ignore[method-assign]
        page.picture.on_painted = self._note

    def _note(self) -> None:
        if self._newest is not None:
            self.paints.append((time.perf_counter(), self._newest))
            self._latencies.append(time.time() - self._newest.time)

    def summarize(self, pace: float) -> dict[str, Any]:
        """Gaps within episodes: between two episodes the last picture stays for a second, as it should."""
        gaps, made, steps = [], [], 0
        for (before, first), (after, second) in zip(self.paints, self.paints[1:], strict=False):
            if first.episode == second.episode and second.step > first.step:
                gaps.append(after - before)
                made.append(second.time - first.time)
                steps += second.step - first.step
        gaps.sort()
        made.sort()
        late = sorted(self._latencies)
        return {
            "made_gap_p95_ms": 1e3 * made[int(0.95 * len(made))],
            "made_to_painted_p50_ms": 1e3 * late[len(late) // 2],
            "made_to_painted_p95_ms": 1e3 * late[int(0.95 * len(late))],
            "steps_per_second_asked": pace,
            "steps_per_second": steps / sum(gaps),
            "frames_per_second": len(gaps) / sum(gaps),
            "frames": len(gaps),
            "share_of_steps_painted": len(gaps) / steps,
            "gap_p50_ms": 1e3 * gaps[len(gaps) // 2],
            "gap_p95_ms": 1e3 * gaps[int(0.95 * len(gaps))],
            "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
            "gap_max_ms": 1e3 * gaps[-1],
        }


def open_window(home: Home, *, page: str = "play", with_charts: bool = False) -> StudioWindow:
    """A window as `palaestra studio` opens it, connected."""
    settings = Settings(None)
    settings.set("page", page)
    settings.set("right_dock", with_charts)
    if application.GarbageCollector not in map(
        type, QApplication.instance().children() if QApplication.instance() else ()
    ):
        application.GarbageCollector(application.create_application())
    window = application.create_window(TrainerService(home), settings, "dark")
    window.show()
    wait_until(lambda: window.studio.connection.is_connected and window.studio.browser.runs.is_loaded)
    return window


def start_play(window: StudioWindow, mode: str, env_id: str = "CartPole-v1", checkpoint: str | None = None) -> None:
    session = window.studio.session
    session.choose_environment(env_id)
    session.set_mode(mode)  # type: ignore[arg-type]
    session.start(checkpoint=checkpoint)
    wait_until(lambda: session.play.last_step is not None and window.play_page.picture.image is not None)


def draw_runs(window: StudioWindow, run_ids: list[str]) -> None:
    """Show the curves of runs beside the play."""
    browser = window.studio.browser
    browser.show(run_ids[0])
    browser.choose(run_ids)
    wait_until(lambda: len(browser.charts.lines(next(iter(browser.details.charts), ""))) == len(run_ids))


def measure_load(home: Home, options: dict[str, Any]) -> dict[str, Any]:
    """Frames and blocks while an agent plays, another run trains and the metrics of several runs arrive."""
    window = open_window(home, with_charts=True)
    draw_runs(window, options["run_ids"])
    start_play(window, "agent", checkpoint=options["checkpoint"])
    result: dict[str, Any] = {}
    for pace in options["paces"]:
        window.studio.session.send(SetSpeed(pace / CARTPOLE_FPS))
        wait_until(lambda: (last := window.studio.session.play.last_step) is not None and last.actor == "agent")
        wait(options["warm_up_s"])
        points = count_points(window)
        probe = EventLoopProbe()
        paints = FramePaints(window)
        cpu, began = time.process_time(), time.monotonic()
        probe.start()
        wait(options["seconds"])
        blocking = probe.stop()
        took = time.monotonic() - began
        result[f"{pace:g}"] = {
            "render": paints.summarize(pace),
            "blocking": blocking,
            "points_per_second": points() / took,
            "cores_of_the_studio": (time.process_time() - cpu) / took,
        }
    window.close()
    return result


def count_points(window: StudioWindow) -> Callable[[], int]:
    """Count the points that arrive from now on."""
    browser, count = window.studio.browser, 0
    receive = browser.receive_points

    def receive_points(run_id: str, points: Any) -> None:
        nonlocal count
        count += sum(map(len, points.values()))
        receive(run_id, points)

    browser.receive_points = receive_points  # type: ignore[method-assign]
    return lambda: count


def measure_input(home: Home, options: dict[str, Any]) -> dict[str, Any]:
    """From a key press to the paint of the frame that shows its effect."""
    result = {}
    for name, env_id, keys in (
        ("cartpole", "CartPole-v1", (Qt.Key.Key_Left, Qt.Key.Key_Right)),
        ("frozen_lake", "FrozenLake-v1", (Qt.Key.Key_Left, Qt.Key.Key_Up)),
    ):
        window = open_window(home)
        window.studio.settings.set("show_grid", False)
        start_play(window, "human", env_id)
        result[name] = _press_keys(window, keys, options["presses"])
        window.close()
    return result


def _waits_for_move(play: PlayModel) -> bool:
    """Whether a key has an effect at once. The state of an episode that has just ended may be a step behind."""
    last, state = play.last_step, play.state
    return state is not None and state.waiting == "move" and last is not None and not last.is_last


def _press_keys(window: StudioWindow, keys: tuple[Qt.Key, ...], presses: int) -> dict[str, Any]:
    session, picture = window.studio.session, window.play_page.picture
    paints, times = FramePaints(window), []
    picture.setFocus()
    while len(times) < presses:
        wait_until(lambda: _waits_for_move(session.play))
        # Not in step with any timer of the window.
        wait(0.020 + 0.0037 * (len(times) % 11))
        key, count = keys[len(times) % len(keys)], session.play.input._count
        del paints.paints[:]
        began = time.perf_counter()
        for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
            QApplication.postEvent(picture, QKeyEvent(kind, key, Qt.KeyboardModifier.NoModifier))
            if kind == QEvent.Type.KeyPress:
                wait_until(lambda count=count: any(report.input > count for _, report in paints.paints))
        times.append(next(at for at, report in paints.paints if report.input > count) - began)
    times.sort()
    return {
        "presses": presses,
        "p50_ms": 1e3 * times[presses // 2],
        "p95_ms": 1e3 * times[int(0.95 * presses)],
        "max_ms": 1e3 * times[-1],
    }


def measure_first_curve(home: Home, options: dict[str, Any]) -> dict[str, Any]:
    """From choosing a long run to the first paint of its curve, each time in a new window."""
    times, metric = [], options["metric"]
    for _ in range(options["tries"]):
        window = open_window(home, page="runs")
        wait(1.0)  # what a window reads at its start has arrived
        began = time.perf_counter()
        window.studio.browser.show(options["run_id"])
        board = window.pages["runs"].charts  # type: ignore[attr-defined]
        wait_until(lambda board=board: any(len(curve.xData) for curve in _find_curves(board, metric)))
        board.chart(metric).plot.viewport().repaint()
        times.append(1e3 * (time.perf_counter() - began))
        window.close()
    times.sort()
    return {"tries": len(times), "median_ms": times[len(times) // 2], "max_ms": times[-1], "all_ms": times}


def _find_curves(board: Any, metric: str) -> list[Any]:
    view = board._views.get(metric)
    return [] if view is None else [curve for curve in view._curves.values() if curve.xData is not None]


def measure_memory(home: Home, options: dict[str, Any]) -> dict[str, Any]:
    """Memory and objects over some minutes of play and streams."""
    window = open_window(home, with_charts=True)
    draw_runs(window, options["run_ids"])
    start_play(window, "agent", checkpoint=options["checkpoint"])
    samples = []
    began = time.monotonic()
    while time.monotonic() - began < options["seconds"]:
        gc.collect()
        samples.append(
            {
                "at_s": time.monotonic() - began,
                "resident_mb": resident_bytes() / 1e6,
                "objects": len(gc.get_objects()),
                "widgets": len(QApplication.allWidgets()),
                "threads": threading.active_count(),
            }
        )
        wait(options["sample_every_s"])
    window.close()
    later = [sample for sample in samples if sample["at_s"] >= min(60.0, options["seconds"] / 2)]
    span_min = (later[-1]["at_s"] - later[0]["at_s"]) / 60
    return {
        "seconds": options["seconds"],
        "resident_mb_first": samples[0]["resident_mb"],
        "resident_mb_last": samples[-1]["resident_mb"],
        **{
            f"{name}_per_minute": (later[-1][name] - later[0][name]) / span_min
            for name in ("resident_mb", "objects", "widgets", "threads")
        },
        "samples": samples,
    }


PARTS: dict[str, Callable[[Home, dict[str, Any]], dict[str, Any]]] = {
    "load": measure_load,
    "input": measure_input,
    "first_curve": measure_first_curve,
    "memory": measure_memory,
}


def main() -> None:
    part, home, options = sys.argv[1:]
    result = PARTS[part](Home(Path(home)), json.loads(options))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
