"""A window that runs for long: it keeps nothing, draws nothing twice, and collects garbage in its own thread."""

import gc
import threading
from collections import Counter
from itertools import pairwise

import pytest
from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QApplication

from palaestra.runs.phase import Phase
from palaestra.runs.series import MetricPoint
from palaestra.studio.model.chart import CurveSource
from palaestra.studio.qt.application import GarbageCollector, create_application
from palaestra.studio.qt.views.chart_view import ChartView

STEPS, INTERVALS = 100, 3
BOUNDED = ("StepReport", "MetricPoint", "FinishedEpisode", "Point")
"""What the models keep up to a limit that a short test does not reach, and the ends of the ticks of an axis."""


def count_objects():
    """The objects of the studio, of Qt and of the plots, by type; widgets and threads."""
    gc.collect()
    QApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    kinds = Counter(type(one) for one in gc.get_objects())
    counts = Counter(
        {
            f"{kind.__module__}.{kind.__qualname__}": count
            for kind, count in kinds.items()
            if str(kind.__module__).startswith(("palaestra.", "PySide6.", "pyqtgraph")) and kind.__name__ not in BOUNDED
        }
    )
    counts["widgets"] = len(QApplication.allWidgets())
    counts["threads"] = threading.active_count()
    return counts


def test_a_play_and_a_stream_of_metrics_leave_no_objects_behind(open_window, client):
    driver = open_window()
    session, browser = driver.studio.session, driver.studio.browser
    run_id = client.start_run({"steps": 1_000_000, "rate": 500}, runner="echo")
    client.wait(run_id, phases=[Phase.RUNNING], timeout_s=60)
    driver.wait(lambda: browser.runs.get(run_id) is not None)
    driver.window.show_page("play")
    driver.window._right.show()
    browser.show(run_id)
    session.choose_environment("Pendulum-v1")
    session.set_mode("agent")
    session.start(checkpoint="random")

    def run_for(steps):
        """Let that many steps of the play be received, and points of the run."""
        first = 0 if session.play.last_step is None else len(session.play.steps)
        points = browser.charts.lines("m0")[0].x[-1] if browser.charts.lines("m0") else 0
        driver.wait(lambda: len(session.play.steps) >= first + steps)
        driver.wait(lambda: browser.charts.lines("m0") and browser.charts.lines("m0")[0].x[-1] > points + 10 * steps)

    try:
        counts = []
        for _ in range(INTERVALS + 1):
            run_for(STEPS)
            counts.append(count_objects())
        # What is in flight at the moment of a count comes and goes; what is left behind grows in every interval.
        growth = {name: [after[name] - before[name] for before, after in pairwise(counts)] for name in counts[-1]}
        assert {name: more for name, more in growth.items() if min(more) > 2} == {}
    finally:
        client.stop_run(run_id, grace_s=0)


class PaintCounter(QObject):
    def __init__(self, widget):
        super().__init__(widget)
        self.paints = 0
        widget.installEventFilter(self)

    def eventFilter(self, watched, event):
        self.paints += event.type() == QEvent.Type.Paint
        return False


def test_a_chart_is_painted_once_for_each_refresh_at_any_number_of_points(open_window):
    driver = open_window()
    charts = driver.studio.browser.charts
    charts.set_sources([CurveSource("r", "r", "r")])
    charts.expect("r", "m0")
    view = ChartView(driver.studio, driver.window.theme, "m0")
    view.resize(340, 200)
    view.show()
    counter, again = PaintCounter(view.plot.viewport()), []
    for batch in range(300):
        steps = range(100 * batch, 100 * (batch + 1))
        charts.append("r", {"m0": [MetricPoint(10 * step, float(step), step / 1000) for step in steps]})
        charts.lines("m0")
        if batch < 160:
            continue
        view.refresh()
        for _ in range(5):
            QApplication.processEvents()
        counter.paints = 0
        for _ in range(5):
            QApplication.processEvents()
        if counter.paints > 2:
            again.append(len(charts.lines("m0")[0].x))
    view.close()
    assert again == []


def test_a_zoomed_chart_draws_the_points_of_its_part_only(open_window):
    driver = open_window()
    charts = driver.studio.browser.charts
    charts.set_sources([CurveSource("r", "r", "r")])
    charts.set_curve("r", "m0", [MetricPoint(step, float(step % 7), 0.0) for step in range(2000)])
    view = ChartView(driver.studio, driver.window.theme, "m0")
    view.resize(340, 200)
    view.show()
    view.refresh()
    drawn = view._curves["r"].xData
    assert (drawn[0], drawn[-1]) == (0, 1999)
    assert len(drawn) <= 2 * 340 + 2
    view.plot.getPlotItem().getViewBox().setXRange(1000, 1010, padding=0)
    view.refresh()
    assert view._curves["r"].xData.tolist() == list(range(989, 1021))
    view.close()


@pytest.fixture
def collector():
    collector = GarbageCollector(create_application())
    yield collector
    collector.close()
    collector.setParent(None)


def test_garbage_is_collected_by_the_window_and_by_nothing_else(collector):
    assert not gc.isenabled()
    places = []

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            places.append(threading.current_thread())

    def make_garbage():
        Cycle()
        return [[] for _ in range(5000)]  # far more than an automatic collection needs

    thread = threading.Thread(target=make_garbage)
    thread.start()
    thread.join()
    assert places == []
    kept = [[] for _ in range(5000)]
    assert collector.collect() >= 0
    assert places == [threading.main_thread()]
    assert len(kept) == 5000


def test_closing_the_collector_brings_the_automatic_collections_back():
    collector = GarbageCollector(create_application())
    collector.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
