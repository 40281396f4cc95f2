"""Alarms come when they should, once, and go."""

from palaestra.runs.record import Alarm
from palaestra.runs.state.alarms import AlarmLimits, AlarmMonitor, lasting_alarms, merge_alarms
from palaestra.runs.state.progress import AttemptProgress, NonFiniteMetric

LIMITS = AlarmLimits(stall_after_s=60.0, no_episode_steps=1000)


def _codes(monitor, now):
    return [alarm.code for alarm in monitor.alarms(now, 5.0)]


def _monitor(*updates, limits=LIMITS, drift="", watchdog_gone=False):
    """A monitor that started at 0 and got this progress at these times."""
    monitor = AlarmMonitor(limits, 0.0, drift=drift)
    for now, progress in updates:
        _update(monitor, now, watchdog_gone=watchdog_gone, **progress)
    return monitor


def _update(monitor, now, *, watchdog_gone=False, **progress):
    steps = progress.get("env_step", 0)
    monitor.update(AttemptProgress(attempt=1, **progress), steps, now, watchdog_gone=watchdog_gone)
    return monitor


def test_a_quiet_beginning_is_no_alarm():
    assert _codes(_monitor((1.0, {})), 59.0) == []


def test_silence_is_a_stall_until_a_byte_or_an_event_comes():
    monitor = _monitor((10.0, {"output_bytes": 5}), (30.0, {"output_bytes": 5}))
    assert _codes(monitor, 69.9) == []
    assert _codes(monitor, 70.0) == ["stalled"]
    assert monitor.alarms(75.0, 5.0) == (Alarm("stalled", "no output and no event for 65 s", 5.0),)
    assert _codes(_update(monitor, 71.0, output_bytes=6), 72.0) == []
    assert _codes(_update(monitor, 140.0, output_bytes=6, seq=1), 141.0) == []


def test_steps_without_an_episode():
    assert _codes(_monitor((1.0, {"env_step": 999})), 2.0) == []
    assert _codes(_monitor((1.0, {"env_step": 1000})), 2.0) == ["no_episodes"]
    assert _codes(_monitor((1.0, {"env_step": 1000, "episodes": 1})), 2.0) == []
    unasked = AlarmLimits(no_episode_steps=0)
    assert _monitor((1.0, {"env_step": 10**9}), limits=unasked).alarms(2.0, 0.0) == ()


def test_a_traceback_counts_only_if_the_run_goes_on():
    monitor = _monitor((5.0, {"tracebacks": 1, "output_bytes": 1}))
    assert _codes(monitor, 14.9) == []
    assert _codes(monitor, 15.0) == ["traceback"]


def test_printed_and_recorded_episodes_may_differ_for_a_moment():
    apart = {"episode_lines": 10, "episodes": 7}
    assert _codes(_monitor((1.0, apart)), 10.9) == []
    assert _codes(_monitor((1.0, apart), (8.0, apart)), 11.0) == ["unreadable_events"]
    assert _codes(_monitor((1.0, apart), (8.0, {"episode_lines": 10, "episodes": 8})), 30.0) == []


def test_a_full_disk_is_called_that_and_other_trouble_by_its_name():
    assert _codes(_monitor((1.0, {"disk_full": True, "problem": "OSError"})), 2.0) == ["disk"]
    (alarm,) = _monitor((1.0, {"problem": "ValueError: odd"})).alarms(2.0, 0.0)
    assert alarm.text == "its telemetry cannot be read: ValueError: odd"


def test_each_kind_comes_once():
    progress = {"problem": "x", "episode_lines": 10}
    monitor = _monitor((1.0, progress), (20.0, progress), drift="other script", watchdog_gone=True)
    assert _codes(monitor, 30.0) == ["unreadable_events", "watchdog_gone", "drift"]


def test_an_alarm_is_as_old_as_its_cause():
    old = Alarm("stalled", "no output and no event for 60 s", 1.0)
    new = Alarm("stalled", "no output and no event for 99 s", 40.0)
    other = Alarm("disk", "full", 40.0)
    assert merge_alarms([old], [new, other]) == (old, other)


def test_what_is_wrong_with_the_numbers_is_said_in_numbers():
    progress = {"dropped": 1200, "first_dropped": "byte 7 of stdout.log: bad", "points_left_out": 3}
    texts = {alarm.code: alarm.text for alarm in _monitor((1.0, progress)).alarms(2.0, 0.0)}
    assert texts == {
        "dropped_events": "1,200 lines or records of its telemetry could not be read and were dropped; "
        "the first: byte 7 of stdout.log: bad",
        "left_out_metrics": "3 values have no curve (too many metrics, or steps beyond 64 bits); the journal has them",
    }


def test_metrics_that_are_not_finite_are_named_the_first_with_its_step():
    names = [NonFiniteMetric(name, 1024, float("inf")) for name in ("loss", "a", "b", "c", "d")]
    (alarm,) = _monitor((1.0, {"non_finite": tuple(names)})).alarms(2.0, 0.0)
    assert alarm.text == "loss is Infinity since step 1,024; also a, b, c and 1 more"


def test_a_metric_that_is_finite_again_is_no_alarm_of_an_ended_run():
    progress = AttemptProgress(
        attempt=1, non_finite=(NonFiniteMetric("loss", 8, float("nan"), finite_since=2),), dropped=1
    )
    assert [alarm.code for alarm in lasting_alarms(progress, 0.0)] == ["dropped_events"]


def test_a_count_that_grows_does_not_make_its_alarm_younger():
    old, new = Alarm("dropped_events", "1 line", 1.0), Alarm("dropped_events", "9 lines", 40.0)
    assert merge_alarms([old], [new]) == (Alarm("dropped_events", "9 lines", 1.0),)
