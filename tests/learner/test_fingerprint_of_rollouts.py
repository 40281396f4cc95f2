"""Which weights acted: a rollout is told apart by their fingerprint, not by a counter that two policies can share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from palaestra.actor import AsyncConfig
from palaestra.env import EnvConfig, make_env
from palaestra.experience import Rollout, combine_rollouts
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.policy.fingerprint import policy_fingerprint
from palaestra.train import Trainer

CARTPOLE = EnvConfig(id="compiled/CartPole-v1", num_envs=2)


def policy_for(seed: int = 0) -> ActorCritic:
    env = make_env(CARTPOLE)
    return ActorCritic(env.observation_space, env.action_space, seed=seed)


def trainer_for(policy: ActorCritic | None = None, **settings: Any) -> Trainer:
    algorithm = PPO(batch_size=16, n_epochs=1, learning_rate=1e-2)
    return Trainer(policy or policy_for(), make_env(CARTPOLE), algorithm, **settings)


def test_a_rollout_records_the_fingerprint_of_the_weights_that_acted() -> None:
    trainer = trainer_for()
    first = trainer.collect_rollouts(8)
    assert first["policy_fingerprint"].unique().tolist() == [policy_fingerprint(trainer.policy)]
    trainer.learn(first)
    second = trainer.collect_rollouts(8)
    assert second["policy_fingerprint"].unique().tolist() == [policy_fingerprint(trainer.policy)]
    assert second["policy_fingerprint"][0, 0] != first["policy_fingerprint"][0, 0]


@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_a_rollout_of_another_policy_at_the_same_version_is_weighed_and_counted_as_foreign(compiled: Any) -> None:
    stranger = trainer_for(policy_for(seed=5)).collect_rollouts(16)
    metrics = trainer_for(compiled=compiled).learn(stranger)
    assert metrics["foreign_steps"] == 1.0
    assert metrics["staleness"] == metrics["staleness_max"] == 1.0
    assert metrics["behaviour_weight"] != 1.0


def test_the_share_of_foreign_steps_in_a_list_is_counted() -> None:
    trainer = trainer_for()
    own, stranger = trainer.collect_rollouts(16), trainer_for(policy_for(seed=5)).collect_rollouts(16)
    metrics = trainer.learn([own, stranger])
    assert metrics["foreign_steps"] == metrics["staleness"] == 0.5


def test_experience_of_the_same_weights_is_fresh_whoever_counted_its_version() -> None:
    shared = policy_for()
    learner, collector = trainer_for(shared), trainer_for(shared)
    learner.learn(learner.collect_rollouts(8))
    fresh = collector.collect_rollouts(8)
    assert fresh["policy_version"].unique().tolist() == [0]  # that trainer has never learned
    metrics = learner.learn(fresh)
    assert metrics["staleness"] == 0.0
    assert "foreign_steps" not in metrics
    assert "behaviour_weight" not in metrics


def test_a_policy_given_other_weights_without_a_new_version_is_noticed() -> None:
    trainer = trainer_for()
    rollout = trainer.collect_rollouts(8)
    trainer.policy.load_state_dict(policy_for(seed=5).state_dict())
    assert trainer.learn(rollout)["foreign_steps"] == 1.0


def test_a_rollout_saved_without_a_fingerprint_is_judged_by_its_version(tmp_path: Any) -> None:
    trainer = trainer_for()
    old = trainer.collect_rollouts(16)
    del old["policy_fingerprint"]
    loaded = Rollout.load(old.save(tmp_path / "old.rollout"))
    assert "policy_fingerprint" not in loaded.keys()
    assert [trainer.learn(loaded)["staleness"] for _ in range(2)] == [0.0, 1.0]


def test_a_saved_and_a_combined_rollout_keep_the_fingerprint_and_say_where_none_was_recorded(tmp_path: Any) -> None:
    trainer = trainer_for()
    one, two, old = (trainer.collect_rollouts(8) for _ in range(3))
    mark = int(one["policy_fingerprint"][0, 0])
    assert Rollout.load(one.save(tmp_path / "one.rollout"))["policy_fingerprint"].unique().tolist() == [mark]
    assert combine_rollouts([one, two])["policy_fingerprint"].unique().tolist() == [mark]
    del old["policy_fingerprint"]
    assert combine_rollouts([two, old])["policy_fingerprint"][:, 0].tolist() == [mark] * 8 + [0] * 8


@pytest.mark.parametrize("collector", ["thread", "process"])
def test_the_background_collector_records_the_learners_fingerprints(collector: Any) -> None:
    marks: dict[int, int] = {}

    class Remembering(Trainer):
        def learn(self, rollout: Any) -> dict[str, float]:
            marks[self.n_updates] = policy_fingerprint(self.policy)
            versions = rollout["policy_version"].reshape(-1).tolist()
            expected = [marks[version] for version in versions]
            assert rollout["policy_fingerprint"].reshape(-1).tolist() == expected
            return super().learn(rollout)

    config = CARTPOLE.model_copy(update={"id": "CartPole-v1"})
    settings = AsyncConfig(collector=collector, max_staleness=1)
    trainer = Remembering(policy_for(), make_env(config), PPO(n_epochs=1), asynchronous=settings, env_config=config)
    trainer.train(5 * 32, rollout_length=16)
    assert len(set(marks.values())) == 5


# ---------------------------------------------------------------------- the same data twice


def test_trainers_of_one_policy_with_the_default_seed_play_different_episodes() -> None:
    shared = policy_for()
    trainers = [trainer_for(shared) for _ in range(3)]
    rollouts = [trainer.collect_rollouts(32) for trainer in trainers]
    assert trainers[0].seed == 0
    assert len({trainer.seed for trainer in trainers}) == 3
    assert not torch.equal(rollouts[0]["observation"], rollouts[1]["observation"])
    assert combine_rollouts(rollouts).batch_size == (32, 6)
    assert trainer_for(policy_for()).seed == 0  # of a policy of its own


def test_combining_the_same_experience_twice_warns_and_says_what_to_do() -> None:
    rollouts = [trainer_for(seed=3).collect_rollouts(16) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"rollouts 0 and 1 are the same, step by step.*give each its own seed"):
        assert combine_rollouts(rollouts).batch_size == (16, 4)
