"""skrl's PPO agent, driven as its own sequential trainer drives it, with tracking and checkpoints off."""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

from benchmarks.meter import Meter, run_contender
from benchmarks.synthetic import make
from benchmarks.workloads import Workload


def _models(w: Workload, env: Any) -> dict[str, Any]:
    import gymnasium
    import torch
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
    from torch import nn

    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}

    def tower(outputs: int) -> nn.Sequential:
        sizes = (env.observation_space.shape[0], *w.hidden)
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))

    class Choice(CategoricalMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            self.net = tower(int(env.action_space.n))

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {}

    class Bell(GaussianMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            GaussianMixin.__init__(self, clip_actions=False)
            self.net = tower(self.num_actions)
            self.log_std = nn.Parameter(torch.zeros(self.num_actions))

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = tower(1)

        def compute(self, inputs: Any, role: str = "") -> Any:
            return self.net(inputs["observations"]), {}

    return {"policy": Choice() if discrete else Bell(), "value": Value()}


def train(w: Workload, meter: Meter, arguments: argparse.Namespace) -> None:
    import gymnasium
    import torch
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory

    torch.set_num_threads(arguments.threads)
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    env = wrap_env(gymnasium.vector.SyncVectorEnv([lambda: make(w.env_id)] * w.num_envs, **same_step), verbose=False)
    models = _models(w, env)
    config = PPO_CFG(
        rollouts=w.num_steps, learning_epochs=w.epochs, mini_batches=w.batch // w.minibatch,
        discount_factor=w.gamma, gae_lambda=w.gae_lambda, learning_rate=w.learning_rate, ratio_clip=w.clip,
        value_clip=w.value_clip, entropy_loss_scale=w.entropy_coef, value_loss_scale=0.5 * w.value_coef,
        grad_norm_clip=w.max_grad_norm,
    )  # fmt: skip
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=w.num_steps, num_envs=w.num_envs, device="cpu")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    agent = PPO(models=models, memory=memory, cfg=config, device="cpu", **spaces)
    agent.init()
    agent.enable_training_mode(True)
    meter.facts["parameters"] = sum(p.numel() for model in models.values() for p in model.parameters())
    _loop(w, meter, env, agent)


def _loop(w: Workload, meter: Meter, env: Any, agent: Any) -> None:
    import torch

    clipped = getattr(env.action_space, "high", None) is not None
    bounds = [torch.as_tensor(b) for b in (env.action_space.low, env.action_space.high)] if clipped else []
    total = meter.iterations_left * w.num_steps
    observations, _ = env.reset()
    meter.begin("collect")
    for t in range(total):
        with torch.no_grad():
            actions, _ = agent.act(observations, None, timestep=t, timesteps=total)
            sent = torch.clamp(actions, *bounds) if clipped else actions
            after, rewards, terminated, truncated, infos = env.step(sent)
            agent.record_transition(
                observations=observations, states=None, actions=actions, rewards=rewards, next_observations=after,
                next_states=None, terminated=terminated, truncated=truncated, infos=infos, timestep=t, timesteps=total,
            )  # fmt: skip
            observations = after
        last = (t + 1) % w.num_steps == 0
        if last:
            meter.begin("learn")
        agent.post_interaction(timestep=t, timesteps=total)
        if last:
            if meter.done(w.batch):
                return
            meter.begin("collect")


if __name__ == "__main__":
    run_contender("skrl", train, ("skrl", "torch", "numpy", "gymnasium"))
