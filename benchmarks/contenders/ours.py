"""Palaestra as shipped: defaults everywhere but in what the workload prescribes.

`--variant global` clips actor and critic by their common norm, as the rivals do; the default clips them apart, which
is also what lets a second core learn the critic meanwhile. `--variant envpool` steps the environments of EnvPool;
`--variant bfloat16` has convolutions of that type.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.meter import Meter, Skip, run_contender
from benchmarks.workloads import Workload


def _own_network(observation_space: Any, action_space: Any) -> Any:
    """What a user would write: two plain towers."""
    import torch
    from torch import nn

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs, outputs = observation_space.shape[0], int(action_space.n)
            self.actor = nn.Sequential(
                nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )
            self.critic = nn.Sequential(
                nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
            )

        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.actor(observation), self.critic(observation).squeeze(-1)

    torch.manual_seed(1)
    return Towers()


def _trainer(w: Workload, arguments: argparse.Namespace) -> Any:
    import torch

    from palaestra.env.make import EnvConfig, make_env
    from palaestra.errors import ConfigError
    from palaestra.learner.ppo import PPO
    from palaestra.policy.actor_critic import ActorCritic
    from palaestra.policy.config import PolicyConfig
    from palaestra.train.trainer import Trainer

    torch.set_num_threads(arguments.threads)
    try:
        backend = "envpool" if arguments.variant == "envpool" else "gymnasium"
        env = make_env(EnvConfig(id=w.our_env_id or w.env_id, num_envs=w.num_envs, backend=backend))
    except (ConfigError, ImportError) as error:
        raise Skip(str(error)) from error
    spaces = env.observation_space, env.action_space
    network = _own_network(*spaces) if w.kind == "module" else None
    precision: Any = "bfloat16" if arguments.variant == "bfloat16" else "float32"
    policy = ActorCritic(*spaces, PolicyConfig(hidden=w.hidden, image_precision=precision), network=network, seed=1)
    algorithm = PPO(
        n_epochs=w.epochs, batch_size=w.minibatch, learning_rate=w.learning_rate, gamma=w.gamma,
        gae_lambda=w.gae_lambda, clip_range=w.clip, value_clip=w.value_clip, entropy_coef=w.entropy_coef,
        value_coef=w.value_coef, max_grad_norm=w.max_grad_norm,
        grad_clip="global" if arguments.variant == "global" else "separate",
    )  # fmt: skip
    return Trainer(policy, env, algorithm, seed=1)


def train(w: Workload, meter: Meter, arguments: argparse.Namespace) -> None:
    """The public `Trainer.train`. One clock for the whole, the trainer's own metric for where it divides."""
    trainer = _trainer(w, arguments)
    meter.facts["parameters"] = sum(p.numel() for p in trainer.policy.parameters())

    def split(_: Any, metrics: dict[str, float]) -> bool:
        if meter.done(w.batch, learned_for=metrics["learn_seconds"]):
            return False
        meter.begin("collect")
        return True

    meter.begin("collect")
    trainer.train(total_timesteps=meter.iterations_left * w.batch, rollout_length=w.num_steps, callback=split)


if __name__ == "__main__":
    run_contender("ours", train, ("torch", "numpy", "numba", "gymnasium"))
