"""The methods of the client that are one route each: what they send, and the types they return."""

import pytest
from tests.runs.checkpoints.own import own_checkpoint

from palaestra.errors import ConfigError, IllegalTransition, UnknownRun
from palaestra.files.atomic import write_json
from palaestra.runs.comparison import Comparison
from palaestra.runs.phase import Phase
from palaestra.runs.runner import RunnerCapabilities


def test_the_documents_of_a_run_are_read(served):
    run_id = served.done(steps=4)
    trainer = served.trainer
    assert [event.kind for event in trainer.run_events(run_id)][-1] == "succeeded"
    assert trainer.run_spec(run_id)["config"] == {"steps": 4}
    assert trainer.run_command(run_id)["argv"] == trainer.run_command(run_id, 1)["argv"]
    assert trainer.resolved(run_id)["steps"] == 4
    with pytest.raises(ConfigError, match="no such attempt"):
        trainer.resolved(run_id, 7)
    with pytest.raises(UnknownRun):
        trainer.resolved("nobody")


def test_the_resolved_configuration_is_that_of_the_attempt_and_shows_no_secret(served):
    run_id = served.done()
    run = served.home.run(run_id)
    write_json(run.attempt(1).resolved, {"steps": 5, "hub": {"api_key": "not-for-everyone"}})
    assert served.trainer.resolved(run_id) == {"steps": 5, "hub": {"api_key": "***"}}
    run.attempt(1).resolved.unlink()
    assert served.trainer.resolved(run_id)["steps"] == 3


def test_runs_are_compared_and_a_number_that_is_none_stays_a_number(served):
    first, second = served.done(steps=3), served.done(steps=5)
    comparison = served.trainer.compare([first, second])
    assert isinstance(comparison, Comparison)
    assert [column.run.run_id for column in comparison.runs] == [first, second]
    assert comparison.configuration["steps"] == [3, 5]
    # Metric i is u + i at update u; the mean of the last ten updates.
    assert comparison.metrics["m0"] == [2.0, 3.0]


def test_a_diverged_metric_is_nan_in_a_comparison(served):
    run_id = served.done(steps=3, nan_from=2)
    other = served.done(steps=3)
    values = served.trainer.compare([run_id, other]).metrics["m0"]
    assert values[0] != values[0]
    assert values[1] == 2.0


def test_a_run_is_archived_restored_deleted_and_restored(served):
    trainer, run_id = served.trainer, served.done()
    assert trainer.archive_run(run_id).archived
    with pytest.raises(ConfigError, match="is archived"):
        trainer.run_events(run_id)
    assert not trainer.restore_run(run_id).archived
    assert trainer.delete_run(run_id).run_id == run_id
    with pytest.raises(UnknownRun):
        trainer.run(run_id)
    assert trainer.restore_run(run_id).phase is Phase.SUCCEEDED
    assert [action.action for action in trainer.gc()] == []


def test_a_draining_service_says_so(served):
    assert served.trainer.drain(True) is True
    assert served.trainer.drain(False) is False


def test_runners_and_their_schemas_are_listed(served):
    runners = served.trainer.runners()
    assert isinstance(runners["echo"], RunnerCapabilities)
    assert runners["cleanrl"].runs_foreign_code
    assert "steps" in served.trainer.runner_schema("echo")["properties"]
    with pytest.raises(UnknownRun):
        served.trainer.runner_schema("ecko")


def test_metrics_are_listed_and_read_together(served):
    run_id = served.done(steps=30, metrics=2)
    trainer = served.trainer
    names = trainer.metric_names(run_id)
    assert (names["m0"].points, names["m0"].source) == (30, "journal")
    series = trainer.metric_series(run_id, ["m0", "m1"], first=10, last=30)
    assert [point.value for point in series["m1"]] == [2.0, 3.0, 4.0]
    assert set(trainer.metric_series(run_id)) == set(names)
    with pytest.raises(ConfigError, match="no such metric"):
        trainer.metric_series(run_id, ["m0", "nothing"])


def test_resource_usage_and_tracking_are_read(served):
    run_id = served.done()
    assert all(sample.rss_mb >= 0 for sample in served.trainer.system(run_id, last=3))
    assert served.trainer.tracking(run_id).state == "off"


def test_checkpoints_are_imported_and_verified(served, tmp_path):
    own_checkpoint(tmp_path / "checkpoint")
    trainer = served.trainer
    record = trainer.import_checkpoint(tmp_path / "checkpoint", agent_id="me/ppo", env_id="")
    assert trainer.verify_checkpoint(record.checkpoint_id).fits
    assert trainer.checkpoints(agent="me/ppo")[0].checkpoint_id == record.checkpoint_id
    with pytest.raises(ConfigError, match="No such file"):
        trainer.import_checkpoint(tmp_path / "nothing")
    assert trainer.deployments() == []
    with pytest.raises(ConfigError):
        trainer.withdraw("CartPole-v1")


def test_the_bytes_of_a_clip_are_read_by_its_name(served):
    run_id = served.done()
    attempt = served.home.run(run_id).attempt(1)
    attempt.videos.mkdir()
    (attempt.videos / "a clip #1.webm").write_bytes(b"0123456789")
    (clip,) = served.trainer.videos(run_id)
    assert (clip.name, clip.size_bytes) == ("attempt_1/videos/a clip #1.webm", 10)
    assert served.trainer.video_bytes(run_id, clip.name) == b"0123456789"
    with pytest.raises(UnknownRun, match="no such clip"):
        served.trainer.video_bytes(run_id, "attempt_1/stdout.log")
    with pytest.raises((ConfigError, IllegalTransition)):
        served.trainer.record_video(run_id)
