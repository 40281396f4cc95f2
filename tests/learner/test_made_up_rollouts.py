"""What `learn` makes of data that no collector wrote: plural names, flat samples, columns that follow from others."""

import numpy as np
import pytest
import torch

from palaestra.env import EnvConfig, make_env
from palaestra.errors import ExperienceError
from palaestra.experience import Rollout
from palaestra.learner import PPO
from palaestra.learner.batch import read_columns
from palaestra.policy import ActorCritic
from palaestra.train import Trainer

VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def flat(**more):
    """Four steps of one environment."""
    base = {
        "observations": torch.zeros(4, 4),
        "actions": torch.zeros(4, dtype=torch.int64),
        "rewards": torch.ones(4),
        "values": VALUES,
        "log_probs": torch.full((4,), -0.7),
    }
    return base | more


@pytest.fixture
def trainer():
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    policy = ActorCritic(env.observation_space, env.action_space, seed=0)
    return Trainer(policy, env, PPO(batch_size=16, n_epochs=1), seed=0)


def test_plural_columns_are_the_singular_ones_and_are_stored_once(trainer):
    rollout = trainer.collect_rollouts(8)
    assert rollout["observations"].data_ptr() == rollout["observation"].data_ptr()
    for name in ("observations", "actions", "rewards", "values", "log_probs", "next_values"):
        assert name in rollout
    assert "actions" not in rollout.keys()
    assert "dones" not in rollout
    assert rollout[2:4]["rewards"].shape == (2, 2)
    with pytest.raises(KeyError):
        rollout["actionz"]


def test_a_whole_rollout_under_plural_names_teaches_the_same(trainer):
    rollout = trainer.collect_rollouts(8)
    plural = {"observation": "observations", "action": "actions", "log_prob": "log_probs", "value": "values"}
    renamed = {plural.get(key, key): entry for key, entry in rollout.columns().items()}
    assert {key: entry.data_ptr() for key, entry in read_columns(renamed).items()} == {
        key: entry.data_ptr() for key, entry in read_columns(rollout).items()
    }


def test_done_ends_the_task_and_the_next_value_is_that_of_the_step_after():
    columns = read_columns(flat(dones=torch.tensor([0.0, 1.0, 0.0, 0.0])))
    # The last step goes on, so it gives its value to the one before and nothing else.
    assert columns["next_value"].tolist() == [[2.0], [0.0], [4.0]]
    assert columns["terminated"].tolist() == [[False], [True], [False]]
    assert not columns["truncated"].any()
    assert columns["observation"].shape == (3, 1, 4)
    whole = read_columns(flat(terminated=torch.tensor([False, False, False, True])))
    assert whole["next_value"].tolist() == [[2.0], [3.0], [4.0], [0.0]]


def test_done_beside_truncated_leaves_the_rest_to_termination():
    done, cut = torch.tensor([0, 1, 1, 0]), torch.tensor([False, True, False, False])
    columns = read_columns(flat(dones=done, truncated=cut, next_values=torch.zeros(4)))
    assert columns["terminated"].squeeze(1).tolist() == [False, False, True, False]


def test_advantages_and_returns_are_learned_from_as_they_are(trainer):
    given = read_columns(flat(advantages=torch.arange(4.0), returns=VALUES + 1))
    batch = trainer.algorithm.prepare(given, given["advantage"], given["target"])
    assert batch["advantage"].tolist() == [0, 1, 2, 3]
    assert batch["target"].tolist() == [2, 3, 4, 5]
    assert read_columns(flat(returns=VALUES + 1))["advantage"].squeeze(1).tolist() == [1, 1, 1, 1]
    metrics = trainer.learn(flat(advantages=torch.arange(4.0), returns=VALUES + 1))
    assert (metrics["return_mean"], metrics["staleness"]) == (3.5, 0.0)


def test_numpy_arrays_and_double_precision_are_converted_and_left_as_they_were(trainer):
    given = flat(rewards=np.ones(4), dones=np.zeros(4, bool), values=np.arange(4.0))
    trainer.learn(given)
    assert given["rewards"].dtype == np.float64
    assert set(given) == {"observations", "actions", "rewards", "values", "log_probs", "dones"}


def test_several_environments_side_by_side_keep_their_streams():
    wide = {key: torch.stack([value, value + 1], 1) for key, value in flat().items()}
    columns = read_columns(wide | {"dones": torch.zeros(4, 2)})
    assert columns["next_value"].tolist() == [[2.0, 3.0], [3.0, 4.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (flat(), "has no next_value, terminated, truncated, policy_version"),
        ({"observations": torch.zeros(4, 4), "dones": torch.zeros(4)}, "has no action, log_prob, value"),
        (flat(truncated=torch.tensor([False, True, False, False])), "truncated steps and no next_value"),
        (flat(dones=torch.zeros(3)), "has no next_value"),
        (flat(reward=torch.ones(4), dones=torch.zeros(4)), "has reward twice, once as rewards|once as reward"),
        ({key: value[:1] for key, value in flat(dones=torch.zeros(4)).items()}, "Give at least two steps"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(trainer, given, message):
    before = trainer.n_updates
    with pytest.raises(ExperienceError, match=message):
        trainer.learn(given)
    assert trainer.n_updates == before


def test_a_rollout_saved_by_torch_is_loaded_by_torch_in_its_restricted_mode(trainer, tmp_path):
    rollout = trainer.collect_rollouts(8)
    torch.save(rollout, tmp_path / "rollout.pt")
    loaded = torch.load(tmp_path / "rollout.pt")  # weights_only is the default
    assert isinstance(loaded, Rollout)
    assert bool((loaded == rollout).all())
