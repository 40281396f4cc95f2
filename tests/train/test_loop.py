"""What happens around the updates: best checkpoints, retention, failure, telemetry that breaks."""

import json

import pytest

from palaestra.actor import Collector
from palaestra.errors import EnvironmentContractError, NonFiniteError
from palaestra.files.checkpoint import list_checkpoints
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.learner.rollout_learner import RolloutLearner
from palaestra.telemetry import CheckpointSaved, JournalReader
from palaestra.telemetry.event import PhaseChanged
from palaestra.train import config_from, train


def _config(**trainer):
    defaults = {"total_timesteps": 6 * 32, "rollout_length": 16, "checkpoint_every": 1}
    return config_from(
        {
            "env": {"id": "CartPole-v1", "num_envs": 2},
            "algorithm": {"n_epochs": 1, "batch_size": 32},
            "trainer": defaults | trainer,
            "telemetry": {"progress": False},
        }
    )


def _events(attempt):
    return [record.event for record in JournalReader(attempt.journal).read()]


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    outcome = train(_config(eval_every=1, eval_episodes=2, keep_checkpoints=2), root=tmp_path, run_id="a")
    attempt = outcome.run.attempts()[0]
    saved = [event for event in _events(attempt) if isinstance(event, CheckpointSaved) and event.metric is not None]
    top = max(event.metric for event in saved)
    best = outcome.run.best_checkpoint()
    assert json.loads((attempt.checkpoints / "best.json").read_text())["score"] == top
    assert load_checkpoint(best).about["score"] == top
    kept = {path.name for path in list_checkpoints(attempt.checkpoints)}
    assert kept == {"update_00000005", "update_00000006", best.name}


def test_a_run_that_evaluates_scores_no_checkpoint_by_training_returns(tmp_path):
    outcome = train(_config(eval_every=4, eval_episodes=2, checkpoint_every=100), root=tmp_path, run_id="a")
    saved = [event for event in _events(outcome.run.attempts()[0]) if isinstance(event, CheckpointSaved)]
    assert [(event.update, event.metric is not None) for event in saved] == [(0, False), (4, True), (6, False)]
    assert outcome.run.best_checkpoint().name == "update_00000004"


def test_a_run_that_breaks_numerically_leaves_its_last_good_weights(tmp_path, monkeypatch):
    calls = []
    update = RolloutLearner.update

    def breaking(self, experience, **settings):
        calls.append(1)
        if len(calls) == 3:
            experience.reward[:] = float("inf")
        return update(self, experience, **settings)

    monkeypatch.setattr(RolloutLearner, "update", breaking)
    with pytest.raises(NonFiniteError, match="update_00000002"):
        train(_config(checkpoint_every=100), root=tmp_path, run_id="a")
    checkpoint = load_checkpoint(tmp_path / "a" / "attempt_1" / "checkpoints" / "update_00000002")
    assert checkpoint.progress["updates"] == 2
    tensors = [*checkpoint.learner.tensors.values(), *checkpoint.source.tensors.values()]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def test_a_failing_environment_is_a_failed_phase_in_the_journal(tmp_path, monkeypatch):
    def failing(self, *args, **kwargs):
        raise EnvironmentContractError("environment 1 fell over")

    monkeypatch.setattr(Collector, "collect", failing)
    with pytest.raises(EnvironmentContractError):
        train(_config(), root=tmp_path, run_id="a")
    phases = [e for e in _events_of(tmp_path) if isinstance(e, PhaseChanged)]
    assert [phase.phase for phase in phases] == ["running", "failed"]
    assert "fell over" in phases[-1].reason


def _events_of(root):
    return [record.event for record in JournalReader(root / "a" / "attempt_1" / "metrics.jsonl").read()]


def test_evaluation_and_checkpoints_do_not_change_what_is_learned(tmp_path):
    plain = train(_config(checkpoint_every=100), root=tmp_path, run_id="a")
    busy = train(_config(eval_every=2, eval_episodes=2), root=tmp_path, run_id="b")
    files = [load_checkpoint(o.checkpoint).policy.read_bytes() for o in (plain, busy)]
    assert files[0] == files[1]
