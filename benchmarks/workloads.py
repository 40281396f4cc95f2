"""What is measured: one table of workloads, the same numbers for every contender.

Plain data that imports nothing but the standard library, because it is read in two virtual environments: ours and the
rivals'. `palaestra` is never imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An environment, a network and PPO's settings."""

    name: str
    title: str
    env_id: str
    num_envs: int = 8
    num_steps: int = 128
    epochs: int = 4
    minibatch: int = 256
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    """Of half the squared error. Rivals that take the whole squared error are given half of this."""
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] = (64, 64)
    kind: str = "mlp"
    """`mlp`, `cnn`, or `module` (our torch path with a network the user wrote)."""
    our_env_id: str = ""
    """Where ours differs on purpose: the same task, compiled."""
    rivals: tuple[str, ...] = ("sb3",)

    @property
    def batch(self) -> int:
        """Steps per iteration."""
        return self.num_envs * self.num_steps


EVERYONE = ("sb3", "sbx", "skrl", "tianshou", "torchrl")

_ALL = (
    Workload(name="cartpole", title="CartPole-v1", env_id="CartPole-v1", entropy_coef=0.01, rivals=EVERYONE),
    Workload(
        name="pendulum", title="Pendulum-v1", env_id="Pendulum-v1",
        epochs=10, minibatch=64, learning_rate=1e-3, gamma=0.9, rivals=EVERYONE,
    ),
    Workload(
        name="halfcheetah", title="HalfCheetah-v5", env_id="HalfCheetah-v5",
        num_envs=1, num_steps=2048, epochs=10, minibatch=64, learning_rate=3e-4, rivals=EVERYONE,
    ),
    Workload(
        name="lunarlander", title="LunarLander-v3", env_id="LunarLander-v3",
        num_envs=16, num_steps=1024, minibatch=64, learning_rate=3e-4, gamma=0.999, gae_lambda=0.98,
        entropy_coef=0.01, rivals=EVERYONE,
    ),
    Workload(
        name="cnn84", title="CNN, 4x84x84 stack", env_id="benchmarks.synthetic:Stack84",
        kind="cnn", hidden=(), entropy_coef=0.01,
    ),
    Workload(
        name="cnn36", title="CNN, 36x36x3 frame", env_id="benchmarks.synthetic:Frame36",
        kind="cnn", hidden=(), entropy_coef=0.01,
    ),
    Workload(
        name="module", title="CartPole-v1, own nn.Module", env_id="CartPole-v1", kind="module", entropy_coef=0.01,
    ),
    Workload(
        name="compiled", title="CartPole-v1, compiled here", env_id="CartPole-v1", our_env_id="compiled/CartPole-v1",
        entropy_coef=0.01, rivals=("sb3", "sbx"),
    ),
)  # fmt: skip

WORKLOADS = {workload.name: workload for workload in _ALL}
