"""A checkpoint of ours as `palaestra train` writes it, for tests that need none that has learned."""

import json

import gymnasium
import torch

from palaestra.learner.checkpoint import SavedState, save_checkpoint
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.config import PolicyConfig
from palaestra.policy.storage import policy_bytes
from palaestra.train.config import config_from

CARTPOLE = {
    "env": {"id": "CartPole-v1", "num_envs": 1},
    "algorithm": {"name": "ppo"},
    "trainer": {"rollout_length": 64},
}


def own_checkpoint(path, env_id="CartPole-v1", *, env_step=4096, returns=(10.0, 30.0, 20.0), seed=0, **changes):
    """Write one; the SHA-256 of its manifest."""
    torch.manual_seed(seed)
    env = gymnasium.make(env_id)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=(8,)))
    env.close()
    data = {**CARTPOLE, "env": {"id": env_id, "num_envs": 1}, "policy": {"hidden": [8]}}
    config = json.loads(json.dumps(config_from(data).to_json()))
    config.update(changes.pop("config", {}))
    return save_checkpoint(
        path,
        kind="vector",
        policy=policy_bytes(policy),
        learner=SavedState({"moment": torch.zeros(3)}, {}),
        source=SavedState({}, {}),
        progress={"updates": 1, "steps": env_step, "episode_rewards": list(returns)},
        # Initial weights do not depend on the seed; two of different seeds must differ.
        about={"config": config, "run_id": "somewhere", "score": max(returns), "seed": seed, **changes},
    )
