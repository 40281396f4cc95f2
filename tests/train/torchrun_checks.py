"""Checks in two processes, run by test_torchrun.py under torchrun; the first process writes their results as JSON.

Each compares what two processes compute together with what one process computes from everything.
"""

import copy
import json
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from palaestra.actor.compatibility import rollout_spec
from palaestra.errors import CollectorFailed, ConfigError, NonFiniteError, RankFailed
from palaestra.learner.algorithm import RolloutAlgorithm
from palaestra.learner.batch import flatten_rollout
from palaestra.learner.ppo import PPO
from palaestra.learner.rollout_learner import RolloutLearner
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.config import PolicyConfig
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.train.run import _Run, run_updates
from palaestra.transport.ranks import ALONE, end_process, join_ranks

CHECKS = []
T, N = 6, 4


def check(function):
    CHECKS.append(function)
    return function


def actor_critic():
    box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    return ActorCritic(box, spaces.Discrete(2), PolicyConfig(hidden=(8,)), normalize_observation=True, seed=5)


def rollout(policy, *, seed=0, valid=None):
    """A made-up rollout `[T, N]` of all environments, with the log-probabilities and values of the policy."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(T, N, 3, generator=generator)
    action = torch.randint(0, 2, (T, N), generator=generator)
    with torch.no_grad():
        log_prob, _, value = policy.evaluate_actions(observation.flatten(0, 1), action.flatten())
    never = torch.zeros(T, N, dtype=torch.bool)
    return {
        "observation": observation, "action": action, "log_prob": log_prob.view(T, N), "value": value.view(T, N),
        "reward": torch.randn(T, N, generator=generator), "terminated": never, "truncated": never,
        "next_value": torch.randn(T, N, generator=generator),
        "valid": ~never if valid is None else valid,
        "policy_version": torch.full((T, N), -1), "stream": torch.arange(N).expand(T, N),
    }  # fmt: skip


def own(columns, ranks):
    """The columns of this process's environments."""
    return {key: part[:, ranks.share(N).part] for key, part in columns.items()}


def learners(ranks, make=actor_critic, algorithm=None, **settings):
    """One learner of everything, and one that learns together with the other process."""
    settings = {"batch_size": 8, "n_epochs": 2, "learning_rate": 1e-2, **settings}
    made = []
    for several in (ALONE, ranks):
        policy = make()
        spaces_of = {"observation_space": policy.observation_space, "action_space": policy.action_space}
        spec = rollout_spec(SimpleNamespace(num_envs=N, mask_size=0, **spaces_of), policy)
        made.append(RolloutLearner(policy, algorithm or PPO(**settings), spec, seed=3, compiled=False, ranks=several))
    return made


def compare(alone, together, rollouts, ranks, *, updates=3):
    """The last gradient, the weights and the metrics of both after some updates."""
    for number in range(updates):
        columns = rollouts(alone.policy, number)
        told, found = alone.learn([columns], only_once=True), together.learn([own(columns, ranks)], only_once=True)
        gradients = [FlatParameters.of(one.policy).gradient for one in (alone, together)]
        assert gradients[0].abs().max() > 1e-3, "nothing was learned"
        assert (gradients[0] - gradients[1]).abs().max() < 1e-5, (gradients[0] - gradients[1]).abs().max()
        assert told.keys() == found.keys(), told.keys() ^ found.keys()
        different = {name: (told[name], found[name]) for name in told if abs(told[name] - found[name]) > 1e-5}
        assert not different, different
    for name, weight in alone.policy.state_dict().items():
        assert torch.allclose(weight, together.policy.state_dict()[name], atol=1e-5), name
    vectors = ranks.gather(FlatParameters.of(together.policy).vector.tolist())
    assert vectors[0] == vectors[1], "the processes have different weights"


@check
def ppo_learns_from_its_share_as_one_process_from_everything(ranks):
    alone, together = learners(ranks)
    compare(alone, together, lambda policy, number: rollout(policy, seed=number), ranks)
    # The statistics of the observations, too: 3 rollouts of 24 steps.
    assert float(together.policy.encoder.normalizers["observation"].count) == 72.0


@check
def shares_may_be_unequal_and_empty(ranks):
    # Environments 0 and 1 belong to the first process, 2 and 3 to the second, of which one step is left.
    valid = torch.ones(T, N, dtype=torch.bool)
    valid[:, 2:] = False
    valid[4, 3] = True
    alone, together = learners(ranks, batch_size=1, n_epochs=1)
    compare(alone, together, lambda policy, number: rollout(policy, seed=number, valid=valid), ranks, updates=1)
    valid[4, 3] = False
    alone, together = learners(ranks, batch_size=6)
    compare(alone, together, lambda policy, number: rollout(policy, seed=number, valid=valid), ranks, updates=1)


@check
def the_policy_stops_at_the_same_minibatch(ranks):
    alone, together = learners(ranks, target_kl=1e-3, n_epochs=5, learning_rate=3e-2)
    columns = rollout(alone.policy)
    told, found = alone.learn([columns]), together.learn([own(columns, ranks)])
    assert 1 < told["policy_stopped_at"] == found["policy_stopped_at"]


class Regression(RolloutAlgorithm):
    """An algorithm of two methods: the value learns the reward."""

    def prepare(self, columns):
        return flatten_rollout(columns, target=columns["reward"])

    def loss(self, policy, batch):
        return (policy.value(batch["observation"]) - batch["target"]).square().mean()


@check
def an_algorithm_of_two_methods_learns_in_two_processes(ranks):
    alone, together = learners(ranks, algorithm=Regression(batch_size=5, n_epochs=1))
    compare(alone, together, lambda policy, number: rollout(policy, seed=number), ranks)


@check
def a_vla_learns_from_its_share_as_one_process_from_everything(ranks):
    from palaestra.actor.collector import Collector
    from palaestra.env.make import EnvConfig, make_env
    from palaestra.policy.vla import VLAPolicy
    from palaestra.policy.vla.models import SmallVLA

    env = make_env(EnvConfig(id="palaestra/TableReach-v0", num_envs=N, vectorization="in_process"))
    made = []
    for several in (ALONE, ranks):
        torch.manual_seed(1)
        policy = VLAPolicy(SmallVLA(image_size=48, vocabulary=16), env.observation_space, env.action_space)
        algorithm = PPO(batch_size=8, n_epochs=2, value_clip=None)
        spec = rollout_spec(env, policy)
        made.append(RolloutLearner(policy, algorithm, spec, seed=3, compiled=False, ranks=several))
    buffer = Collector(env, made[0].policy, seed=2).collect(T)
    env.close()
    columns = {key: copy.deepcopy(part) for key, part in buffer.columns().items()}
    whole = {key: part for key, part in columns.items() if not isinstance(part, dict)}
    nested = {key: part for key, part in columns.items() if isinstance(part, dict)}
    mine = own(whole, ranks) | {key: own(part, ranks) for key, part in nested.items()}
    told, found = made[0].learn([columns]), made[1].learn([mine])
    gradients = [FlatParameters.of(one.policy).gradient for one in made]
    assert gradients[0].abs().max() > 1e-3
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5
    assert abs(told["loss"] - found["loss"]) < 1e-5


@check
def a_failure_in_one_process_is_raised_in_both_with_its_message(ranks):
    def fail_in_the_second():
        if ranks.rank == 1:
            raise OSError("the disk is gone")

    with pytest.raises(RankFailed, match=r"^process 1 of 2 \(numbered from 0\) failed with OSError: the disk is gone$"):
        ranks.run(fail_in_the_second)

    def refuse():
        raise ConfigError("a", 1, "refused")

    with pytest.raises(ConfigError, match=r"^a = 1: refused\.$"):  # the same in both: as in one process
        ranks.run(refuse)


@check
def weights_that_one_process_cannot_publish_end_the_loop_of_both(ranks):
    released = []
    batch = SimpleNamespace(experience=None)
    source = SimpleNamespace(
        next_batch=lambda: batch, raise_if_failed=None, release=lambda batch, version: released.append(version)
    )
    learner = SimpleNamespace(version=0, weights=dict)

    def update(experience, poll):
        learner.version += 1
        return {}

    def publish(version, weights):
        if ranks.is_first and version == 2:
            raise CollectorFailed("the sampler is gone")

    learner.update = update
    source.metrics = lambda batch, timing: {}
    updates = run_updates(source, learner, SimpleNamespace(publish=publish), lambda: ranks.any(False), ranks)
    next(updates)
    with pytest.raises(RankFailed, match=r"process 0 of 2 .* the sampler is gone"):
        next(updates)
    assert released == [1, 2]  # both count the update that was made


@check
def an_evaluation_that_fails_in_the_first_process_ends_both(ranks):
    def evaluate():
        raise CollectorFailed("the game is over")

    run = SimpleNamespace(_ranks=ranks, _components=SimpleNamespace(evaluate=evaluate))
    with pytest.raises(RankFailed, match=r"process 0 of 2 .* the game is over"):
        _Run._evaluate(run)


@check
def a_number_that_is_not_finite_stops_both_and_changes_no_weight(ranks):
    _, together = learners(ranks)
    before = FlatParameters.of(together.policy).vector.clone()
    columns = rollout(together.policy)
    columns["reward"][2, 3] = float("nan")  # in the second process
    with pytest.raises(RankFailed, match="process 1 of 2"):
        together.learn([own(columns, ranks)])
    columns = rollout(together.policy)
    with torch.no_grad():
        together.policy.actor[0].weight[0, 0] = float("nan")  # in both
    with pytest.raises(NonFiniteError, match=r"parameter actor\.0\.weight"):
        together.learn([own(columns, ranks)])
    assert int((FlatParameters.of(together.policy).vector == before).sum()) == len(before) - 1


# ---------------------------------------------------------------- vision-language models


def play_episodes():
    """The policy, and the 11 episodes of one and two turns that it played."""
    from tests.learner.trajectories.played import build_policy, play_groups

    policy = build_policy()
    return policy, [one for group in play_groups(policy, range(3)) for one in group][:-1]


def trajectory_learner(policy, ranks, **settings):
    from palaestra.learner.trajectories.built_in import GRPO
    from palaestra.learner.trajectories.learner import TrajectoryLearner
    from palaestra.learner.trajectories.update import UpdateConfig
    from palaestra.policy.weight_sync import whole_tensor

    class Alternating(GRPO):
        """Every episode is learned from; every third one was good."""

        group_size = 1

        def select(self, group, rewards):
            return list(group)

        def advantages(self, trajectories, rewards):
            return [1.0 if number % 3 == 0 else -0.5 for number in range(len(trajectories))]

    settings = {"microbatch_turns": 3, "learning_rate": 1e-3, "max_grad_norm": 0.1, **settings}
    learner = TrajectoryLearner(
        policy, Alternating(), UpdateConfig(**settings), lora=True, ranks=ranks, kept_versions=0
    )
    updater, gradients = learner._updater, []
    take_step = updater._step

    def record_and_step():
        gradients.append([whole_tensor(p.grad).clone() for p in updater.parameters if p.grad is not None])
        return take_step()

    updater._step = record_and_step
    return learner, gradients


def compare_trajectories(ranks, policy, episodes, *, tolerance=1e-5, **settings):
    from tests.learner.trajectories.played import build_policy

    alone, told = trajectory_learner(build_policy(), ALONE, **settings)
    together, found = trajectory_learner(policy, ranks, **settings)
    first = alone.update(episodes)
    # Only the first process has the batch.
    second = together.update(episodes if ranks.is_first else [])
    assert first["trajectories_learned"] == second["trajectories_learned"] == len(episodes)
    assert len(told) == len(found)
    for ours, theirs in zip(told, found, strict=True):
        assert max(float(gradient.abs().max()) for gradient in ours) > 1e-3
        worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        assert worst < tolerance, worst
    for name in ("loss", "grad_norm", "policy_loss", "tokens_learned", "disagreement_max"):
        assert abs(first[name] - second[name]) < max(10 * tolerance, 1e-4), (name, first[name], second[name])
    return together


@check
def a_vlm_learns_its_share_of_the_turns_as_one_process_all_of_them(ranks):
    policy, episodes = play_episodes()
    compare_trajectories(ranks, policy, episodes)


@check
def one_turn_is_learned_from_by_two_processes(ranks):
    policy, episodes = play_episodes()
    one = next(episode for episode in episodes if len(episode) == 1)
    compare_trajectories(ranks, policy, [one])


@check
def a_vlm_in_parts_learns_as_one_process_with_all_weights(ranks):
    policy, episodes = play_episodes()
    policy.shard(samples=ranks.is_first)
    layer = policy.learner.model.model.language_model.layers[0].self_attn.q_proj.base_layer.weight
    assert layer.to_local().numel() == layer.numel() // 2
    learner = compare_trajectories(ranks, policy, episodes, minibatches=2, epochs=2)
    policy.publish(learner.version)
    saved = policy.gather_for_save()
    state = learner.state()
    assert all(type(tensor) is torch.Tensor for tensor in state.tensors.values())
    if not ranks.is_first:
        return
    # A checkpoint of the parts is one of the whole: it loads into one process.
    from tests.learner.trajectories.played import build_policy

    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder) / "model")
        whole = build_policy()
        whole.load(Path(folder) / "model")
    assert whole.fingerprint == policy._acting_fingerprint
    again, _ = trajectory_learner(whole, ALONE, minibatches=2, epochs=2)
    again.load_state(state)
    assert again.version == 1


@check
def a_vlm_in_parts_computes_in_bfloat16_and_recomputes_its_layers(ranks):
    from tests.learner.trajectories.played import MODEL

    from palaestra.policy.vlm import VLMPolicy

    _, episodes = play_episodes()
    policy = VLMPolicy.from_config(MODEL.model_copy(update={"gradient_checkpointing": True}), seed=1)
    policy.shard(compute_dtype=torch.bfloat16, samples=ranks.is_first)
    assert policy.half_precision
    learner = compare_trajectories(ranks, policy, episodes, tolerance=0.05)
    assert all(parameter.dtype == torch.float32 for parameter in learner._updater.parameters)


def main():
    results = {}
    with join_ranks(600.0) as ranks:
        for function in (one for one in CHECKS if one.__name__ in sys.argv[2:] or len(sys.argv) == 2):
            fault = ""
            try:
                function(ranks)
            except Exception:  # noqa: BLE001  reported
                fault = traceback.format_exc()
                sys.stderr.write(fault)
            faults = ranks.gather(fault)  # fails if one process is still inside the check
            results[function.__name__] = "\n".join(f"process {n}: {text}" for n, text in enumerate(faults) if text)
        if ranks.is_first:
            Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    end_process(0)
