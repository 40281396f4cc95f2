"""Rollouts as files: collect now, learn later, in another process if you like.

A rollout is one safetensors file with a checksum; loading it runs no code. It carries the log-probabilities of the
policy that acted, so that learning from it later can correct for what has changed since: watch `staleness` and
`behaviour_weight`.

    python examples/replay_from_disk.py
"""

import tempfile
from pathlib import Path

from palaestra.env import as_vector_env
from palaestra.experience import Rollout
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer


def save_rollouts(trainer: Trainer, directory: Path, n_rollouts: int, n_steps: int) -> list[Path]:
    return [trainer.collect_rollouts(n_steps).save(directory / f"rollout_{i}.safetensors") for i in range(n_rollouts)]


def learn_from_files(trainer: Trainer, files: list[Path], passes: int) -> list[dict[str, float]]:
    history = []
    for pass_ in range(passes):
        for file in files:
            metrics = trainer.learn(Rollout.load(file))
            print(
                f"pass {pass_}, {file.name}: loss {metrics['loss']:.2f}, staleness {metrics['staleness']:.0f}, "
                f"clipped {metrics['clip_fraction']:.0%}"
            )
            history.append(metrics)
    return history


def main(directory: Path | None = None, n_rollouts: int = 4, n_steps: int = 256, passes: int = 2, seed: int = 0):
    with tempfile.TemporaryDirectory() as temporary:
        env = as_vector_env("CartPole-v1")
        policy = ActorCritic(env.observation_space, env.action_space, seed=seed)
        trainer = Trainer(policy, env, PPO(n_epochs=2, batch_size=256), seed=seed)

        files = save_rollouts(trainer, directory or Path(temporary), n_rollouts, n_steps)
        history = learn_from_files(trainer, files, passes)
        env.close()
    return history


if __name__ == "__main__":
    main()
