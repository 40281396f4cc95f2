"""NaN metrics and unreadable telemetry of a run are visible in every command."""

import json
from dataclasses import replace

import pytest
from tests.runs.serving import service_thread

from palaestra.cli.runs.table import format_note
from palaestra.runs import TrainerService
from palaestra.runs.ingest.event_file import EventFileTail, parse_scalars
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.rebuild import read_run
from palaestra.runs.store.registry import Registry, open_registry_read_only
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import Journal


def finished(home, **config):
    with service_thread(home):
        trainer = TrainerService(home)
        run_id = trainer.start_run({"steps": 8, "metrics": 1, "episodes_every": 2, **config}, runner="echo")
        record = trainer.wait(run_id, timeout_s=30)
        recent = trainer.recent_metrics(run_id, 2)
        events = [getattr(item, "event", None) for item in trainer.stream_events(run_id)]
    streamed = [event.metrics for event in events if isinstance(event, TrainingStep)]
    return record, recent, streamed


def strict(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("speak", ["journal", "stdout", "tensorboard"])
def test_a_diverged_run_does_not_read_as_its_last_finite_number(palaestra, home, speak):
    record, recent, streamed = finished(home, speak=speak, nan_from=6)
    name = "m0" if speak != "tensorboard" else "losses/m0"

    assert (record.phase, record.code) == ("succeeded", "non_finite")
    assert record.reason == f"{name} is NaN since step 60"
    assert [str(point.value) for point in recent[name]] == ["nan", "nan"]
    assert [str(metrics[name]) for metrics in streamed][-4:] == ["5.0", "nan", "nan", "nan"]
    assert [alarm.code for alarm in record.alarms] == ["non_finite"]
    assert [one.reason for one in RunEventLog(home.run(record.run_id)).read() if one.kind == "alarm"] == [record.reason]
    assert read_run(home.run(record.run_id)).alarms == record.alarms

    document = strict(palaestra("runs", "show", record.run_id, "--json").out)
    assert document["metrics"][name] == "NaN"
    shown = palaestra("runs", "show", record.run_id).out
    assert f"succeeded: {name} is NaN since step 60" in shown
    assert f"  {name}" + " " * (len("episode/return") - len(name)) + "  NaN\n" in shown
    assert f"! {name} is NaN since step 60" in palaestra("runs", "list").out
    assert format_note(replace(record, alarms=())) == f"! {name} is NaN since step 60"


def test_a_diverged_run_is_compared_and_exported_as_it_is(palaestra, home, tmp_path):
    bad, _, _ = finished(home, nan_from=6)
    good, _, _ = finished(home)

    compared = strict(palaestra("runs", "compare", bad.run_id, good.run_id, "--json").out)
    assert compared["metrics"]["m0"] == ["NaN", 4.5]
    assert palaestra("runs", "compare", bad.run_id, good.run_id).code == 0

    out = tmp_path / "out"
    assert palaestra("runs", "export-tensorboard", bad.run_id, "--into", out).code == 0
    (path,) = out.iterdir()
    records = [parse_scalars(framed.payload) for framed in EventFileTail(path).read(1000)]
    assert [str(value) for r in records for tag, value in r.values if tag == "m0"][-4:] == ["5.0", "nan", "nan", "nan"]


@pytest.mark.parametrize("speak", ["journal", "stdout"])
def test_dropped_lines_are_an_alarm_that_stays(palaestra, home, speak):
    record, recent, _ = finished(home, speak=speak, corrupt_line="middle")

    assert (record.phase, record.code) == ("succeeded", "dropped_events")
    assert record.reason.startswith("1 line or record of its telemetry could not be read and was dropped; the first: ")
    assert recent["m0"][-1].value == 8.0
    assert "! dropped_events: 1 line" in palaestra("runs", "show", record.run_id).out


def test_a_healthy_run_has_no_alarm(palaestra, home):
    record, _, _ = finished(home)
    assert (record.phase, record.reason, record.alarms) == ("succeeded", "done", ())


def test_returns_that_are_nan_are_stored_and_listed_as_nan(palaestra, home):
    record, _, _ = finished(home)
    registry = Registry.open(home.registry)
    registry.put(replace(record, episode_return=float("nan")))
    registry.close()
    assert str(open_registry_read_only(home).get(record.run_id).episode_return) == "nan"
    assert strict(palaestra("runs", "list", "--json").out)[0]["episode_return"] == "NaN"


def test_a_diverged_run_of_train_alone_says_so_too(palaestra, home):
    attempt = home.run("solo").attempt(1)
    attempt.path.mkdir(parents=True)
    (home.run("solo").path / "resolved.json").write_text("{}")
    with Journal(attempt.journal) as journal:
        journal.emit(EpisodeSummary(env_step=8, episode=1, env_index=0, episode_return=float("nan"), length=8))
        journal.emit(TrainingStep(1, 8, {"loss": float("nan"), "explained_variance": float("nan")}))

    (row,) = strict(palaestra("runs", "list", "--json").out)
    assert row["episode_return"] == "NaN"
    assert [(alarm["code"], alarm["text"]) for alarm in row["alarms"]] == [("non_finite", "loss is NaN at step 8")]


def test_an_update_of_ten_thousand_metrics_is_found_at_the_end_of_a_journal(palaestra, home):
    attempt = home.run("solo").attempt(1)
    attempt.path.mkdir(parents=True)
    (home.run("solo").path / "resolved.json").write_text("{}")
    with Journal(attempt.journal) as journal:
        metrics = {f"layer_{i:05}/gradient_norm": float("nan") for i in range(10_000)}
        journal.emit(TrainingStep(1, 4096, metrics))

    (row,) = strict(palaestra("runs", "list", "--json").out)
    assert (row["env_step"], row["alarms"][0]["code"]) == (4096, "non_finite")
