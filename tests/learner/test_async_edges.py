"""What happens around background collection: interruptions, later calls of `train`, pauses, weights that move."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.actor import rooms
from tests.learner.test_asynchronous import ROOMS, _nobody_is_left, _trainer, _weights

from palaestra.actor import AsyncConfig, asynchronous, collector_thread
from palaestra.env import EnvConfig, make_env
from palaestra.errors import CollectorFailed, ConfigError, EnvironmentContractError, ExperienceError
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer

__all__ = ["_nobody_is_left"]


def _stop_with_something_unread(trainer, metrics):
    ring = trainer.training.source.ring
    with ring.changed:
        assert ring.changed.wait_for(lambda: len(ring), 30)
    return False


def _begin(trainer, length, segments):
    """Start collecting, as the first batch of a training does."""
    training = trainer.training
    training.source.start(trainer.n_updates, length, segments)
    training.publisher.publish(trainer.n_updates, training.learner.weights())
    training.source._worker.start()
    training.source._worker_started = True
    return training.source


def _published(trainer):
    board = trainer.training.publisher.board
    arrays = [np.empty_like(array) for array in board._versions[0]]
    version = board.read_into(arrays)
    return version, torch.from_numpy(arrays[0]).view(torch.float32)


class InterruptedOnce(PPO):
    """Ctrl-C in the middle of the first update."""

    armed = True

    def losses(self, *args, **kwargs):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return super().losses(*args, **kwargs)


def test_an_interrupted_update_does_not_keep_its_segment_for_ever():
    trainer = _trainer(max_staleness=0, ppo=InterruptedOnce(n_epochs=1, batch_size=16))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3 * 64, 32)
    # With staleness 0 nothing is begun while something is read: a segment still lent out would stop everything.
    assert [metrics["env_step"] for metrics in trainer.train(3 * 64, 32)] == [128.0, 192.0]


def test_what_is_unread_keeps_its_masks_when_another_process_takes_over():
    trainer = _trainer("palaestra.env.toy:MaskedChoice", "process", max_staleness=3)
    trainer.train(1000, 16, callback=_stop_with_something_unread)
    ring = trainer.training.source.ring
    while len(ring) > 1:  # a ring that is full has no room for the other process
        ring.release(ring.take())
    slot = ring.full[0]
    kept = ring.segments[slot].action_mask[:16].copy()
    assert not kept.all()
    source = _begin(trainer, 16, len(ring) + 1)
    before = len(ring)
    with ring.changed:
        assert ring.changed.wait_for(lambda: len(ring) > before, 30)
    source.stop()
    assert np.array_equal(ring.segments[slot].action_mask[:16], kept)


def test_weights_that_move_to_other_memory_are_still_the_ones_published():
    trainer = _trainer(ppo=PPO(n_epochs=1, batch_size=16))

    def forget_gradients(trainer, metrics):
        trainer.policy.zero_grad(set_to_none=True)  # the flat vector is made anew

    trainer.train(6 * 64, 32, callback=forget_gradients)
    version, weights = _published(trainer)
    assert version == 6
    assert torch.equal(weights, _weights(trainer))


def test_weights_changed_by_hand_between_two_trainings_are_acted_on():
    trainer = _trainer()
    trainer.train(2 * 64, 32)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.mul_(0.5)
    source = _begin(trainer, 32, 1)
    assert source.next_batch().experience.is_full()
    source.stop()
    assert torch.equal(_published(trainer)[1], _weights(trainer))
    acted = torch.cat([parameter.detach().flatten() for parameter in trainer.collector.policy.parameters()])
    assert torch.equal(acted, _weights(trainer))


def test_an_earlier_checkpoint_brings_its_own_versions(tmp_path):
    trainer = _trainer()
    trainer.save_checkpoint(tmp_path / "start")
    trainer.train(8 * 64, 32)
    trainer.load_checkpoint(tmp_path / "start")
    # The board still at version 8 would make experience of the future: a staleness of -8.
    assert [metrics["staleness"] >= 0.0 for metrics in trainer.train(3 * 64, 32)] == [True] * 3


def test_steps_left_in_a_ring_of_other_segments_are_counted_as_dropped():
    trainer = _trainer(max_staleness=2)
    trainer.train(1000, 16, callback=_stop_with_something_unread)
    ring = trainer.training.source.ring
    lost = ring.dropped_steps + len(ring) * 16 * 2
    history = trainer.train(trainer.total_timesteps + 64, 32)
    assert lost >= 32
    assert history[0]["dropped_steps"] == lost


def test_a_thread_that_still_hangs_is_not_joined_by_a_second(monkeypatch):
    monkeypatch.setattr(collector_thread, "STOP_GRACE_S", 0.1)
    monkeypatch.setattr(collector_thread, "START_GRACE_S", 0.0)
    trainer = _trainer(f"{ROOMS}:Stuck", kwargs={"at": 40}, step_timeout=0.3)
    with pytest.raises(CollectorFailed, match="hangs"):
        trainer.train(10_000, 16)
    for length in (16, 8):
        with pytest.raises(CollectorFailed, match="thread of the last call still hangs"):
            trainer.train(10_000, length)
    rooms.LET_GO.set()
    monkeypatch.setattr(collector_thread, "STOP_GRACE_S", 10.0)
    before = trainer.total_timesteps
    trainer.train(before + 64, 16)
    assert trainer.total_timesteps == before + 64


def _hangs(monkeypatch, looks):
    """What a source that looks at each of the given times finds, the collector not having moved for so long."""
    source = _trainer(step_timeout=60.0).training.source
    found = []
    for at, still in looks:
        monkeypatch.setattr(asynchronous.time, "monotonic", lambda at=at: at)
        found.append(source._is_hung(still))
    monkeypatch.undo()
    return found


def test_a_pause_of_the_whole_machine_is_not_a_hang(monkeypatch):
    # Ctrl-Z for ten minutes: the first look finds an old step, the next one a fresh one.
    assert _hangs(monkeypatch, [(0.0, 600.0), (0.2, 0.1), (0.9, 0.3)]) == [False, False, False]


def test_a_step_that_is_still_too_long_after_a_closer_look_is_a_hang(monkeypatch):
    assert _hangs(monkeypatch, [(0.0, 61.0), (0.4, 61.4), (0.6, 61.6)]) == [False, False, True]


def test_a_replacement_after_a_resume_does_not_play_the_resumed_episodes_again(tmp_path):
    first = _trainer()
    first.train(64, 32)
    first.save_checkpoint(tmp_path / "there")
    resumed = _trainer(collector_restarts=1)
    resumed.load_checkpoint(tmp_path / "there")
    seeds = [first.collector._seed, resumed.collector._seed]
    resumed.training.source._start_new_episodes()
    seeds.append(resumed.collector._seed)
    assert len(set(seeds)) == 3


def test_nobody_else_collects_in_the_environments_that_the_thread_has():
    trainer = _trainer()
    with pytest.raises(ExperienceError, match="until train\\(\\) ends"):
        trainer.train(1000, 16, callback=lambda trainer, metrics: trainer.collect_rollouts(8))
    assert trainer.collect_rollouts(8).shape == (8, 2)


def test_overwriting_cannot_be_reproducible():
    with pytest.raises(ConfigError, match=r"trainer.reproducible = True: .*Use trainer.overflow=block"):
        _trainer(overflow="overwrite_oldest", reproducible=True)


ORPHAN = """
import os, signal
from tests.learner.test_asynchronous import _trainer

def die(trainer, metrics):
    print(trainer.training.source._worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    _trainer("tests.actor.rooms:Stuck", "process", kwargs={"at": 40}).train(10_000, 16, callback=die)
"""


@pytest.mark.slow
def test_a_process_that_hangs_does_not_outlive_its_parent(tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    # The collector inherits the output and waits in its step for 60 s: the output ends when the last of them is gone.
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.run([sys.executable, script], capture_output=True, timeout=60, check=False, env=here)
    assert parent.returncode == -9
    assert int(parent.stdout) > 0


def test_ctrl_c_does_not_kill_a_process_that_has_not_started_up_yet():
    trainer = _trainer(kind="process")
    source = _begin(trainer, 32, 1)
    os.kill(source._worker.pid, signal.SIGINT)  # it cannot have imported anything by now
    assert source.next_batch().experience.is_full()
    source.stop()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


class LeavingTooSoon(rooms.Room):
    def happen(self):
        os._exit(3)


def test_an_exit_without_a_word_says_where_to_look():
    trainer = _trainer(f"{__name__}:LeavingTooSoon", "process", kwargs={"at": 40})
    with pytest.raises(
        CollectorFailed, match=r"died: exit code 3, without an error message. .* if __name__ == '__main__'"
    ):
        trainer.train(10_000, 16)


def test_a_script_without_a_main_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from tests.learner.test_asynchronous import _trainer\n_trainer(kind='process').train(64, 16)\n")
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=here)
    assert "imports it. Put what the script does under `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]


class OwnCollection(Trainer):
    """Collects in a way of its own, as a curriculum does."""

    def collect_rollouts(self, n_steps):
        return super().collect_rollouts(n_steps)


@pytest.mark.parametrize("settings", [{"buffer_type": "vla"}, {"asynchronous": AsyncConfig()}])
def test_an_overridden_collect_rollouts_is_refused_where_the_background_would_not_call_it(settings):
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    policy = ActorCritic(env.observation_space, env.action_space)
    with pytest.raises(ConfigError, match=r"OwnCollection overrides collect_rollouts.*Collect synchronously"):
        OwnCollection(policy, env, **settings)
    trainer = Trainer(policy, env, **settings)
    trainer.collect_rollouts = lambda n_steps: Trainer.collect_rollouts(trainer, n_steps)
    with pytest.raises(ConfigError, match="overrides collect_rollouts"):
        trainer.train(64, rollout_length=16)


class Adjustable(rooms.Room):
    def set_difficulty(self, level):
        self.level = level


def test_methods_of_environments_that_a_background_collector_has_are_refused():
    trainer = _trainer(f"{__name__}:Adjustable")
    trainer.env.set_difficulty(2)  # nobody collects yet
    with pytest.raises(
        EnvironmentContractError, match=r"env.set_difficulty: the asynchronous collector has the environm"
    ):
        trainer.train(1000, 16, callback=lambda trainer, metrics: trainer.env.set_difficulty(3))
    trainer.env.set_difficulty(3)
    with pytest.raises(EnvironmentContractError, match="the collector process has its own environments"):
        _trainer(f"{__name__}:Adjustable", "process").env.set_difficulty(2)
