"""The installed PySide6 does not lose references: some versions do so to None, and end the process after a minute."""

import sys

import pyqtgraph
import pytest
from PySide6.QtCore import QObject, QTimer, Signal

EMISSIONS = 10_000
SLACK = 500
"""References to None that come and go by themselves. One that is lost at each call would be twenty times as many."""


class Sender(QObject):
    plain = Signal()
    number = Signal(int)
    thing = Signal(object)


@pytest.mark.parametrize("constant", [None, True, False])
def test_signals_slots_and_events_keep_the_references_to_constants(qtbot, qapp, constant):
    if sys.version_info >= (3, 12):
        pytest.skip("constants are immortal")
    sender, received = Sender(), []
    sender.plain.connect(lambda: None)
    sender.number.connect(lambda number: None)
    sender.thing.connect(lambda thing: received.append(thing is constant))
    before = sys.getrefcount(constant)
    for number in range(EMISSIONS):
        sender.plain.emit()
        sender.number.emit(number)
        sender.thing.emit(constant)
        qapp.processEvents()
    counts = sys.getrefcount(constant) - before
    assert all(received)
    assert len(received) == EMISSIONS
    # The list of what was received refers to True once for each emission.
    assert abs(counts - (EMISSIONS if constant is True else 0)) < SLACK


def test_timers_and_charts_keep_the_references_to_none(qtbot):
    if sys.version_info >= (3, 12):
        pytest.skip("constants are immortal")
    plot = pyqtgraph.PlotWidget()
    qtbot.addWidget(plot)
    curve = plot.plot([0.0, 1.0], [0.0, 1.0])
    plot.show()
    ticks = []
    timer = QTimer()
    timer.timeout.connect(lambda: ticks.append(curve.setData([0.0, 1.0, len(ticks)], [0.0, 1.0, 2.0])))
    timer.start(0)
    qtbot.waitUntil(lambda: len(ticks) > 20, timeout=60_000)
    before, begun = sys.getrefcount(None), len(ticks)
    qtbot.waitUntil(lambda: len(ticks) > begun + 300, timeout=60_000)
    timer.stop()
    # `ticks` holds None once for each tick, and what Qt draws later holds some.
    assert sys.getrefcount(None) - before >= len(ticks) - begun - SLACK
