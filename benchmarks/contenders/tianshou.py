"""Tianshou 2's PPO: its collector and its `update`, the two calls its on-policy trainer makes."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.meter import Meter, run_contender
from benchmarks.synthetic import make
from benchmarks.workloads import Workload


def _algorithm(w: Workload, env: Any) -> Any:
    import gymnasium
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    def tower() -> Net:
        shape = env.observation_space.shape
        return Net(state_shape=shape, hidden_sizes=list(w.hidden), activation=torch.nn.Tanh)

    def normal(parameters: Any) -> Any:
        return torch.distributions.Independent(torch.distributions.Normal(*parameters), 1)

    policy: Any
    critic: Any
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        actor = DiscreteActor(preprocess_net=tower(), action_shape=int(env.action_space.n), softmax_output=False)
        critic = DiscreteCritic(preprocess_net=tower())
        policy = DiscreteActorPolicy(actor=actor, action_space=env.action_space)
    else:
        bell = ContinuousActorProbabilistic(preprocess_net=tower(), action_shape=env.action_space.shape, unbounded=True)
        critic = ContinuousCritic(preprocess_net=tower())
        policy = ProbabilisticActorPolicy(
            actor=bell, dist_fn=normal, action_space=env.action_space, action_scaling=False, action_bound_method="clip"
        )
    return PPO(
        policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=w.learning_rate, eps=1e-5), eps_clip=w.clip,
        value_clip=True, advantage_normalization=True, vf_coef=0.5 * w.value_coef, ent_coef=w.entropy_coef,
        max_grad_norm=w.max_grad_norm, gae_lambda=w.gae_lambda, gamma=w.gamma,
    )  # fmt: skip


def train(w: Workload, meter: Meter, arguments: argparse.Namespace) -> None:
    import torch
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.torch_utils import torch_train_mode

    torch.set_num_threads(arguments.threads)
    algorithm = _algorithm(w, make(w.env_id))
    env = DummyVectorEnv([lambda: make(w.env_id)] * w.num_envs)
    collector = Collector(algorithm, env, VectorReplayBuffer(w.batch, w.num_envs), raise_on_nan_in_buffer=False)
    collector.reset()
    meter.facts["parameters"] = sum(p.numel() for p in algorithm.parameters())
    for _ in range(meter.iterations_left):
        meter.begin("collect")
        with policy_within_training_step(algorithm.policy):
            collector.collect(n_step=w.batch)
            meter.begin("learn")
            with torch_train_mode(algorithm):
                algorithm.update(buffer=collector.buffer, batch_size=w.minibatch, repeat=w.epochs)
        collector.reset_buffer(keep_statistics=True)
        if meter.done(w.batch):
            return


if __name__ == "__main__":
    run_contender("tianshou", train, ("tianshou", "torch", "numpy", "gymnasium"))
