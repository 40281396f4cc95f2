"""What each algorithm admits, makes of it and minimises; and how one is named."""

import numpy as np
import pytest
import torch
from tests.learner.trajectories.toy import END, episode, paid, turn

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.trajectory import Outcome
from palaestra.experience.turn_scoring import TokenLogProbs
from palaestra.learner.registry import ALGORITHMS, build_algorithm, config_of
from palaestra.learner.trajectories import (
    GRPO,
    RejectionSampling,
    TrajectoryAlgorithm,
    TrajectoryPPO,
)
from palaestra.learner.trajectories.algorithm import TokenBatch


def won(name="w", reward=1.0, **more):
    return episode(turn(reward=reward), name=name, **more)


def broken(name="b"):
    return episode(turn(reward=0.0), name=name, outcome=Outcome.ENVIRONMENT_FAILED)


def admitted(algorithm, group):
    return names(algorithm.select(group, paid(group)))


def names(group):
    return [one.episode_id for one in group]


def test_rejection_sampling_keeps_what_earned_strictly_more_than_the_threshold():
    group = [won("none", 0.0), won("half", 0.5), won("whole", 1.0)]
    assert admitted(RejectionSampling(reward_threshold=0.5), group) == ["whole"]
    assert admitted(RejectionSampling(), group) == ["half", "whole"]


@pytest.mark.parametrize("name", ALGORITHMS["trajectories"])
def test_no_algorithm_admits_an_episode_whose_screen_broke(name):
    algorithm = build_algorithm(name, experience="trajectories")
    assert admitted(algorithm, [won("a"), broken(), won("c", 0.5)]) == ["a", "c"]


def test_grpo_drops_a_group_in_which_all_earned_the_same_and_one_with_a_single_member():
    grpo = GRPO()
    assert admitted(grpo, [won("a", 0.0), won("b", 0.0)]) == []
    assert admitted(grpo, [won("a", 1.0), won("b", 1.0)]) == []
    assert admitted(grpo, [won("a", 1.0), broken()]) == []
    assert admitted(grpo, [won("a", 1.0), won("b", 0.0)]) == ["a", "b"]


def test_every_turn_of_a_grpo_episode_shares_the_advantage_of_the_episode_within_its_group():
    group = [
        episode(turn(reward=0.0), turn(reward=1.0), group="g"), episode(turn(reward=0.0), group="g"),
        episode(turn(reward=4.0), group="h"), episode(turn(reward=0.0), group="h"),
    ]  # fmt: skip
    samples = GRPO(scale="none").samples(group, paid(group))
    assert [sample.advantage for sample in samples] == [0.5, 0.5, -0.5, 2.0, -2.0]
    assert [sample.weight for sample in samples] == [1 / 10] * 5  # five turns of two tokens
    assert [sample.value_target for sample in samples] == [None] * 5


def test_ppo_gives_each_turn_its_own_advantage_and_target():
    made = episode(turn(reward=0.0), turn(reward=1.0))
    ppo = TrajectoryPPO(normalize_advantage=False, gamma=0.5, gae_lambda=0.5)
    samples = ppo.samples([made], paid([made]), values=[np.array([1.0, 2.0])])
    # 1 + 0 - 2 = -1; 0 + .5*2 - 1 = 0, and .25 of -1
    assert [sample.advantage for sample in samples] == [-0.25, -1.0]
    assert [sample.value_target for sample in samples] == [0.75, 1.0]


def test_a_step_limit_ends_an_episode_unless_ppo_is_told_that_it_only_saves_time():
    made = episode(turn(reward=0.0), outcome=Outcome.TRUNCATED)
    settings = {"normalize_advantage": False, "gamma": 0.5}
    ends = TrajectoryPPO(**settings).samples([made], paid([made]), values=[np.array([2.0])])
    goes_on = TrajectoryPPO(**settings, bootstrap_truncated=True).samples(
        [made], paid([made]), values=[np.array([2.0])]
    )
    failed = TrajectoryPPO(**settings, bootstrap_truncated=True).samples(
        [episode()], paid([episode()]), values=[np.array([2.0])]
    )
    assert (ends[0].advantage, goes_on[0].advantage, failed[0].advantage) == (-2.0, -1.0, -2.0)


def test_ppo_normalises_over_the_whole_update_and_leaves_targets_alone():
    made = [episode(turn(reward=float(reward))) for reward in (0, 1, 2, 3)]
    samples = TrajectoryPPO().samples(made, paid(made), values=[np.zeros(1)] * 4)
    advantage = np.array([sample.advantage for sample in samples])
    assert advantage.mean() == pytest.approx(0)
    assert advantage.std() == pytest.approx(1)
    assert [sample.value_target for sample in samples] == [0, 1, 2, 3]


def test_ppo_without_values_says_what_is_missing():
    with pytest.raises(ExperienceError, match="needs a value head"):
        TrajectoryPPO().samples([episode()], paid([episode()]))


def batch(**more):
    mask = torch.tensor([[True, True], [True, False]])
    facts = {
        "proximal": torch.tensor([[-1.0, -2.0], [-1.0, 0.0]]), "importance": torch.ones(2, 2), "mask": mask,
        "weight": mask / 4.0, "advantage": torch.tensor([1.0, -1.0]), "token_share": 1 / 4, "turn_share": 1 / 2,
    }  # fmt: skip
    return TokenBatch(**(facts | more))


def now(**more):
    facts = {"log_probs": torch.tensor([[-1.0, -2.0], [-1.0, 0.0]]), "mask": batch().mask}
    return TokenLogProbs(**(facts | more))


def test_the_loss_of_imitation_is_the_weighted_cross_entropy():
    both = torch.tensor([1.0, 1.0])
    assert RejectionSampling().loss(batch(advantage=both), now()).total.item() == (1 + 2 + 1) / 4


def test_at_ratio_one_the_loss_of_grpo_is_minus_the_weighted_advantage_and_nothing_is_clipped():
    loss = GRPO().loss(batch(), now())
    assert loss.total.item() == -(1 + 1 - 1) / 4
    assert loss.metrics["clip_fraction"].item() == 0.0
    assert loss.metrics["approx_kl"].item() == 0.0


def test_a_pull_towards_the_reference_adds_its_weighted_k3():
    reference = torch.tensor([[-1.0, -2.0], [-2.0, 0.0]])  # one token e times less likely: 1/e + 1 - 1
    loss = GRPO(kl_coef=0.5).loss(batch(reference=reference), now())
    assert loss.metrics["reference_kl"].item() == pytest.approx(np.exp(-1) / 4)
    assert loss.total.item() == pytest.approx(-0.25 + 0.5 * np.exp(-1) / 4)
    with pytest.raises(ExperienceError, match="kl_coef"):
        GRPO(kl_coef=0.5).loss(batch(), now())


def test_an_entropy_bonus_subtracts_its_weighted_mean():
    entropy = torch.tensor([[2.0, 2.0], [2.0, 0.0]])
    assert GRPO(entropy_coef=0.1).loss(batch(), now(entropy=entropy)).total.item() == pytest.approx(-0.25 - 0.1 * 1.5)
    with pytest.raises(ExperienceError, match="entropy"):
        GRPO(entropy_coef=0.1).loss(batch(), now())


def test_the_value_error_of_ppo_is_a_mean_over_turns():
    loss = TrajectoryPPO(value_coef=0.5).loss(
        batch(value_target=torch.tensor([1.0, 3.0])), now(values=torch.tensor([0.0, 0.0]))
    )
    assert loss.metrics["value_loss"].item() == 0.5 * (1 + 9) / 2
    assert loss.total.item() == -0.25 + 0.5 * 2.5


def test_algorithms_are_built_by_name_with_their_settings_checked():
    assert build_algorithm("grpo", {"group_size": 4}, experience="trajectories").group_size == 4
    assert (
        build_algorithm(
            "rejection_sampling", {"reward_threshold": 0.5}, experience="trajectories"
        ).config.reward_threshold
        == 0.5
    )
    with pytest.raises(ConfigError, match=r"Did you mean 'clip_high'"):
        build_algorithm("grpo", {"clip_hihg": 0.3}, experience="trajectories")
    with pytest.raises(ConfigError, match=r"Did you mean 'grpo'"):
        build_algorithm("gpro", experience="trajectories")
    assert "reward_threshold" in config_of("rejection_sampling", "trajectories").model_fields


class Twice(RejectionSampling):
    """A user's own."""


class WithoutRewards(RejectionSampling):
    """Written before rewards were an argument."""

    def select(self, group):
        return group


class WithoutLoss(TrajectoryAlgorithm):
    def advantages(self, trajectories, rewards):
        return [1.0] * len(trajectories)


class WithoutAdvantages(TrajectoryAlgorithm):
    def loss(self, batch, now):
        raise AssertionError


def test_a_users_own_algorithm_is_an_address_and_has_to_be_one():
    here = f"{__name__}:Twice"
    assert isinstance(build_algorithm(here, experience="trajectories"), Twice)
    for name, problem in (
        ("END", "does not derive from TrajectoryAlgorithm"),
        ("WithoutRewards", "its select takes no rewards"),
        ("WithoutLoss", "has no loss"),
        ("WithoutAdvantages", "has no advantages"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_algorithm(f"{__name__}:{name}", experience="trajectories")
    assert END == 10
