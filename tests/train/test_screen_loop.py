"""A whole run on screens, with the built-in model and sessions without a browser behind a real gateway."""

import json
import os
import signal
import sys

import pytest
from tests.files.old_layout import write_as_schema_1

from palaestra.errors import CheckpointError, CollectorFailed, ConfigError
from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.files.checkpoint import checkpoint_kind
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.learner.trajectories import TrajectoryLearner
from palaestra.policy.vlm import VLMPolicy
from palaestra.policy.vlm.sampler import ProcessSampler
from palaestra.sessions.clients import provider
from palaestra.sessions.clients.provider import start_gateway
from palaestra.telemetry import JournalReader, TrainingStep
from palaestra.telemetry.event import PhaseChanged
from palaestra.train import run as run_module
from palaestra.train.held_out import load_screen_policy, play_held_out
from palaestra.train.screen_config import screen_config_from
from palaestra.train.screens import train_screens

FAKE = json.dumps([sys.executable, "-m", "palaestra.sessions.server", "--fake", "--port", "0"])


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    real = provider.subprocess.Popen
    patch = pytest.MonkeyPatch()
    patch.setattr(
        provider.subprocess, "Popen", lambda command, **how: real([*command, f"server_command={FAKE}"], **how)
    )
    with start_gateway(max_sessions=16, servers=1) as address:
        patch.undo()
        token = tmp_path_factory.mktemp("gateway") / "token"
        token.write_text(address.token)
        yield {"gateway": address.url, "token_file": str(token)}, address


def config(gateway, updates=2, **more):
    trainer = {"batch_size": 4, "num_training_steps": updates, "learning_rate": 1e-3, **more.pop("trainer", {})}
    return screen_config_from(
        {
            "experiment_name": "t", "model": {"name": "tiny", "max_new_tokens": 12, "history": 1, "lora_rank": 4},
            "tasks": [{"task": "fake/button"}], "algorithm": {"name": "ppo"}, "trainer": trainer,
            "actor": {"max_steps_per_episode": 2}, "actor_pool": {"target_concurrent_actors": 3},
            "environment": gateway[0], "telemetry": {"progress": False}, **more,
        }
    )  # fmt: skip


def steps_of(run):
    records = JournalReader(run.attempts()[-1].journal).read()
    return [record.event for record in records if isinstance(record.event, TrainingStep)]


def learned(run):
    policy = load_screen_policy(run.latest_checkpoint())[1]
    return policy.fingerprint, policy.version


def test_a_run_plays_learns_records_and_leaves_a_checkpoint_of_two_updates(gateway, tmp_path):
    outcome = train_screens(config(gateway), root=tmp_path, run_id="one")
    assert (outcome.steps, outcome.interrupted) == (8, False)
    assert [step.update for step in steps_of(outcome.run)] == [1, 2]
    assert outcome.final["policy_version"] == 2
    assert outcome.final["disagreement_max"] < 1e-3
    archive = TrajectoryArchive(outcome.run.attempts()[0].path / "trajectories")
    played = list(archive.load())
    assert len(played) == 8
    assert all(trajectory.learnable and trajectory.pictures for trajectory in played)
    assert sorted({version for one in played for turn in one.turns for version in turn.versions.tolist()}) == [0, 1]
    # Every episode names its session, and every turn the weights it was drawn from.
    assert len({trajectory.session_id for trajectory in played}) == 8
    known = load_checkpoint(outcome.checkpoint).learner.facts["fingerprints"]
    assert sorted(known) == ["0", "1", "2"]
    assert all(turn.weights == known[str(turn.versions[0])] for one in played for turn in one.turns)
    assert known["2"] == learned(outcome.run)[0]
    assert checkpoint_kind(outcome.checkpoint) == "screens"
    assert learned(outcome.run)[1] == 2


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(gateway, tmp_path):
    first = train_screens(config(gateway), root=tmp_path, run_id="a")
    again = train_screens(config(gateway), root=tmp_path, run_id="b")
    other = train_screens(config(gateway, trainer={"seed": 1}), root=tmp_path, run_id="c")
    assert learned(first.run) == learned(again.run)
    assert learned(first.run) != learned(other.run)


def test_a_resumed_run_ends_with_the_very_weights_of_one_that_was_not_stopped(gateway, tmp_path):
    whole = train_screens(config(gateway, 3), root=tmp_path, run_id="whole")
    part = train_screens(config(gateway, 1), root=tmp_path, run_id="part")
    resumed = train_screens(config(gateway, 3), root=tmp_path, run_id="-", resume=part.run)
    assert resumed.steps == whole.steps == 12
    assert learned(resumed.run) == learned(whole.run)


def test_so_does_one_that_goes_on_from_a_checkpoint_of_schema_1(gateway, tmp_path):
    whole = train_screens(config(gateway, 3), root=tmp_path, run_id="whole")
    part = train_screens(config(gateway, 1), root=tmp_path, run_id="part")
    old = part.checkpoint.rename(tmp_path / "new")
    write_as_schema_1(old, part.checkpoint)
    assert load_screen_policy(part.checkpoint)[1].fingerprint == load_screen_policy(old)[1].fingerprint
    resumed = train_screens(config(gateway, 3), root=tmp_path, run_id="-", resume=part.run)
    assert resumed.steps == whole.steps == 12
    assert learned(resumed.run) == learned(whole.run)


def kill_the_first_sampler(monkeypatch):
    real, killed = ProcessSampler.sample, []

    def sample(self, questions, *, temperature):
        answers = real(self, questions, temperature=temperature)
        if not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return answers

    monkeypatch.setattr(ProcessSampler, "sample", sample)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_played_behind_the_learners_back_nothing_is_older_than_allowed(gateway, tmp_path, monkeypatch, backend):
    kill_the_first_sampler(monkeypatch)
    asynchronous = {"collection": "asynchronous", "max_staleness": 1}
    settings = config(gateway, 3, trainer=asynchronous, inference={"backend": backend})
    outcome = train_screens(settings, root=tmp_path, run_id="back")
    assert outcome.final["update"] == 3
    assert all(step.metrics["staleness_max"] <= 1 for step in steps_of(outcome.run))
    assert all(step.metrics["trajectories_learned"] == 4 for step in steps_of(outcome.run))
    # A sampler process that dies is replaced, and the run says so.
    killed = int(backend == "process")
    assert outcome.final.get("sampler_restarts", 0) == killed
    assert outcome.run.attempts()[0].journal.read_text().count("A sampler process was replaced") == killed


@pytest.mark.parametrize("algorithm", [{"name": "rejection_sampling"}, {"name": "grpo", "group_size": 2}])
def test_a_batch_that_teaches_nothing_is_said_and_does_not_hold_up_the_run(gateway, tmp_path, algorithm):
    hopeless = {"model": {"name": "tiny", "max_new_tokens": 1, "history": 0}, "algorithm": algorithm}
    hopeless["reward"] = {"assumed_range": [-2, 2], "failure": -1.0, "unreadable": -0.5}
    outcome = train_screens(config(gateway, **hopeless), root=tmp_path, run_id="none")
    assert outcome.final["trajectories_learned"] == 0
    assert outcome.final["episode_return"] == 0.0  # the environment paid nothing
    assert outcome.final["reward_mean"] == pytest.approx(
        -1.2
    )  # cut off as bad as a mistake, after two unreadable replies
    assert outcome.final["policy_version"] == 0
    assert outcome.final["unreadable_share"] == 1.0
    text = outcome.run.attempts()[0].journal.read_text()
    assert text.count("Nothing was learned from this batch") == 2
    assert "reward.unreadable = -0.5 is above the reward of a mistake in fake/button (-1)" in text


def test_screens_that_break_are_counted_tried_again_and_never_learned_from(gateway, tmp_path):
    breaking = {"tasks": [{"task": "fake/button", "params": {"fail_at": 1}}], "actor": {"retries": 1}}
    outcome = train_screens(config(gateway, 1, **breaking), root=tmp_path, run_id="broken")
    assert outcome.final["trajectories_learned"] == 0
    assert outcome.final["environment_failures"] == 8  # four episodes, two sessions each
    archive = TrajectoryArchive(outcome.run.attempts()[0].path / "trajectories")
    assert {trajectory.outcome for trajectory in archive.load()} == {Outcome.ENVIRONMENT_FAILED}


def test_a_run_whose_screens_all_break_ends_and_says_so_instead_of_playing_on(gateway, tmp_path):
    breaking = {"tasks": [{"task": "fake/button", "params": {"fail_at": 1}}], "actor": {"retries": 0}}
    with pytest.raises(CollectorFailed, match="every session failed in 3 consecutive batches, 4 in the last one"):
        train_screens(config(gateway, 50, **breaking), root=tmp_path, run_id="broken")
    assert RunDirectory.find("broken", tmp_path).latest_checkpoint().name == "update_00000002"


@pytest.mark.parametrize("algorithm", [{"name": "rejection_sampling"}, {"name": "grpo", "group_size": 2}])
@pytest.mark.parametrize("broken", [False, True])
def test_batches_that_teach_nothing_leave_room_for_the_next_behind_the_learners_back(
    gateway, tmp_path, algorithm, broken
):
    # More batches than may wait at once: if what taught nothing kept its place, nothing more would ever be played.
    hopeless = {"model": {"name": "tiny", "max_new_tokens": 1, "history": 0}, "algorithm": algorithm}
    tasks = [{"task": "fake/button", "params": {"fail_at": 1} if broken else {}}]
    how = {"trainer": {"collection": "asynchronous", "max_staleness": 0}, "actor": {"retries": 0}, "tasks": tasks}
    if broken:
        hopeless["model"] = {"name": "tiny", "max_new_tokens": 12, "history": 0}
    outcome = train_screens(config(gateway, 2, **hopeless, **how), root=tmp_path, run_id="none")
    assert [step.metrics["trajectories_learned"] for step in steps_of(outcome.run)] == [0, 0]


def test_what_waits_to_be_learned_from_is_in_the_checkpoint(gateway, tmp_path):
    settings = config(gateway, 2, trainer={"collection": "asynchronous"}, algorithm={"name": "ppo"})
    outcome = train_screens(settings, root=tmp_path, run_id="queue")
    found = load_checkpoint(outcome.checkpoint)
    assert found.source.facts["ready"] == len(found.source.tensors)
    assert found.about["config"]["algorithm"]["name"] == "ppo"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": {"name": "/no/such/model"}}, "model.name"),
        ({"model": {"name": "tiny", "lora_target_option": "custom", "lora_target_modules": ["q_prod"]}}, "q_prod"),
        ({"actor": {"codec": "qwen4"}}, "no codec has this name"),
        ({"environment": {"gateway": "http://127.0.0.1:9"}}, "cannot be reached"),
        ({"tasks": [{"task": "fake/button"}, {"task": "fake/no"}]}, r"tasks\[1\].task = 'fake/no': the only task is"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run_directory_exists(gateway, tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        train_screens(config(gateway, **wrong), root=tmp_path, run_id="no")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_architecture_is_refused(gateway, tmp_path):
    outcome = train_screens(config(gateway, 1), root=tmp_path, run_id="one")
    other = config(gateway).model.model_copy(update={"lora_rank": 8})
    with pytest.raises(CheckpointError, match="another architecture"):
        VLMPolicy.from_config(other).load(load_checkpoint(outcome.checkpoint).policy)


def test_a_damaged_checkpoint_is_refused(gateway, tmp_path):
    outcome = train_screens(config(gateway, 1), root=tmp_path, run_id="one")
    state = outcome.checkpoint / "state.json"
    state.write_text(state.read_text().replace('"episodes"', '"episode"'))
    with pytest.raises(CheckpointError, match=r"state.json is truncated \(\d+ of \d+ bytes\)"):
        load_checkpoint(outcome.checkpoint)


def test_held_out_tasks_are_the_same_for_everybody_and_are_played_in_order(gateway, tmp_path):
    settings = config(gateway)
    policy = VLMPolicy.from_config(settings.model)
    played = play_held_out(settings, policy, gateway[1], episodes=3)
    assert [one.task["seed"] for one in played] == [1_000_000_000, 1_000_000_001, 1_000_000_002]
    greedy = play_held_out(settings, policy, gateway[1], episodes=2, greedy=True, samples=2)
    assert [one.task["seed"] for one in greedy] == [1_000_000_000] * 2 + [1_000_000_001] * 2
    assert greedy[0].turns[0].text == greedy[1].turns[0].text


def test_a_run_that_has_made_its_updates_is_not_resumed(gateway, tmp_path):
    whole = train_screens(config(gateway, 1), root=tmp_path, run_id="whole")
    with pytest.raises(ConfigError, match=r"num_training_steps = 1: run whole has made 1 updates already"):
        train_screens(config(gateway, 1), root=tmp_path, run_id="-", resume=whole.run)
    assert len(whole.run.attempts()) == 1


@pytest.mark.parametrize("error", [CollectorFailed("the floor gave way."), OSError(28, "No space left on device")])
def test_whatever_ends_a_run_names_the_command_that_resumes_it(gateway, tmp_path, monkeypatch, error):
    def fail(self, trajectories, **how):
        raise error

    monkeypatch.setattr(TrajectoryLearner, "update", fail)
    with pytest.raises(type(error)) as raised:
        train_screens(config(gateway), root=tmp_path, run_id="failing")
    message = " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    command = "Resume with: palaestra train --resume failing"
    assert message.endswith(command)
    assert "update_00000000" in message
    phases = [
        record.event for record in JournalReader(tmp_path / "failing" / "attempt_1" / "metrics.jsonl").read()
        if isinstance(record.event, PhaseChanged)
    ]  # fmt: skip
    assert phases[-1].phase == "failed"
    assert phases[-1].reason.endswith(command)


def test_a_full_disk_does_not_hide_what_ended_a_run(gateway, tmp_path, monkeypatch):
    really_update, really_write = TrajectoryLearner.update, run_module.save_checkpoint

    def update(self, trajectories, **how):
        if self.n_updates == 1:
            raise CollectorFailed("the floor gave way.")
        return really_update(self, trajectories, **how)

    def write(path, **rest):
        if path.name != "update_00000000":
            raise OSError(28, "No space left on device")
        return really_write(path, **rest)

    monkeypatch.setattr(TrajectoryLearner, "update", update)
    monkeypatch.setattr(run_module, "save_checkpoint", write)
    with pytest.raises(CollectorFailed, match=r"gave way. The last good state is .*update_00000000. Resume with: "):
        train_screens(config(gateway), root=tmp_path, run_id="full")
    assert "No checkpoint could be written" in (tmp_path / "full" / "attempt_1" / "metrics.jsonl").read_text()
