"""TorchRL's PPO, put together as in its own on-policy examples: a collector, GAE, a buffer and the clipped loss."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.meter import Meter, run_contender
from benchmarks.synthetic import make
from benchmarks.workloads import Workload


def _vector_env(w: Workload) -> Any:
    import gymnasium
    from torchrl.envs import GymWrapper, TransformedEnv
    from torchrl.envs.transforms import Compose, DoubleToFloat, RewardSum, StepCounter

    if w.num_envs == 1:
        env = GymWrapper(make(w.env_id), device="cpu")
    else:
        vector = gymnasium.vector
        many = vector.SyncVectorEnv([lambda: make(w.env_id)] * w.num_envs, autoreset_mode=vector.AutoresetMode.DISABLED)
        env = GymWrapper(many, device="cpu")
    return TransformedEnv(env, Compose(DoubleToFloat(), RewardSum(), StepCounter()))


def _actor_and_critic(w: Workload, env: Any) -> tuple[Any, Any]:
    import torch
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator

    single = make(w.env_id)
    inputs = single.observation_space.shape[0]
    discrete = hasattr(single.action_space, "n")
    outputs = int(single.action_space.n) if discrete else single.action_space.shape[0]

    def tower(out: int) -> Any:
        return MLP(in_features=inputs, out_features=out, num_cells=list(w.hidden), activation_class=torch.nn.Tanh)

    if discrete:
        net = TensorDictModule(tower(outputs), in_keys=["observation"], out_keys=["logits"])
        kind, keys = OneHotCategorical, ["logits"]
    else:
        bell = torch.nn.Sequential(tower(outputs), AddStateIndependentNormalScale(outputs, scale_lb=1e-8))
        net = TensorDictModule(bell, in_keys=["observation"], out_keys=["loc", "scale"])
        kind, keys = _independent_normal(), ["loc", "scale"]
    spec = env.full_action_spec_unbatched if hasattr(env, "full_action_spec_unbatched") else env.action_spec
    actor = ProbabilisticActor(net, in_keys=keys, spec=spec, distribution_class=kind, return_log_prob=True, safe=False)
    return actor, ValueOperator(tower(1), in_keys=["observation"])


def _independent_normal() -> Any:
    from torchrl.modules import IndependentNormal

    return IndependentNormal


def train(w: Workload, meter: Meter, arguments: argparse.Namespace) -> None:
    import torch
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value.advantages import GAE

    torch.set_num_threads(arguments.threads)
    env = _vector_env(w)
    actor, critic = _actor_and_critic(w, env)
    collector = Collector(env, actor, frames_per_batch=w.batch, total_frames=-1, device="cpu")
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(w.batch), sampler=SamplerWithoutReplacement(), batch_size=w.minibatch
    )
    gae = GAE(gamma=w.gamma, lmbda=w.gae_lambda, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=w.clip, loss_critic_type="l2", entropy_coeff=w.entropy_coef,
        critic_coeff=0.5 * w.value_coef, normalize_advantage=True, clip_value=w.value_clip,
    )  # fmt: skip
    parameters = list(loss.parameters())
    meter.facts["parameters"] = sum(p.numel() for p in parameters)
    adam = torch.optim.Adam(parameters, lr=w.learning_rate, eps=1e-5)
    meter.begin("collect")
    for data in collector:
        meter.begin("learn")
        with torch.no_grad():
            gae(data)
        flat = data.reshape(-1)
        for _ in range(w.epochs):
            buffer.empty()
            buffer.extend(flat)
            for batch in buffer:
                losses = loss(batch)
                whole = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                whole.backward()
                torch.nn.utils.clip_grad_norm_(parameters, w.max_grad_norm)
                adam.step()
                adam.zero_grad(set_to_none=True)
        if meter.done(w.batch):
            return
        meter.begin("collect")


if __name__ == "__main__":
    run_contender("torchrl", train, ("torchrl", "tensordict", "torch", "numpy", "gymnasium"))
