"""Trajectories become rates with intervals; broken screens become none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.experience.episodes import episode, turn

from palaestra.evaluation.screens import PairCounts, ScreenComparison, ScreenEvaluation
from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import TrajectoryEntry

S, F, T, U, E = Outcome.SUCCESS, Outcome.FAILURE, Outcome.TRUNCATED, Outcome.UNREADABLE, Outcome.ENVIRONMENT_FAILED


def played(task, seed, outcome, *, steps=1, **more):
    made = episode(
        *[turn(reward=1.0 if outcome is S and i == steps - 1 else 0.0) for i in range(steps)],
        task={"task": task, "seed": seed, "params": more.pop("params", {})}, outcome=outcome, **more,
    )  # fmt: skip
    return TrajectoryEntry.of(made)


def test_three_of_four_are_75_percent_and_the_broken_screen_is_not_among_them():
    found = ScreenEvaluation.from_episodes(
        [played("a/x", seed, outcome) for seed, outcome in enumerate([S, S, F, S, E])]
    )
    facts = found.to_json()
    assert facts["episodes"] == 4
    assert facts["success_rate"] == 0.75
    assert facts["environment_failed"] == 1
    assert facts["ci95"] == pytest.approx([0.3006, 0.9544], abs=1e-4)
    assert facts["mean_return"] == 0.75
    assert facts["std_return"] == pytest.approx(0.4330, abs=1e-4)  # sqrt(3/4 * 1/4)
    assert json.loads(json.dumps(facts)) == facts


def test_a_broken_screen_that_had_paid_is_still_no_reward():
    paid = TrajectoryEntry.of(episode(turn(reward=5.0), outcome=E))
    assert ScreenEvaluation.from_episodes([paid, played("a/x", 1, F)]).to_json()["mean_return"] == 0.0


def test_every_task_has_a_row_of_its_own():
    found = ScreenEvaluation.from_episodes(
        [
            played("b/y", 0, T, steps=4), played("a/x", 0, S, steps=2), played("b/y", 1, S, steps=2),
            played("b/y", 2, E), played("a/x", 1, U, steps=3),
        ]
    )  # fmt: skip
    rows = found.to_json()["per_task"]
    assert list(rows) == ["a/x", "b/y"]
    assert (rows["b/y"]["episodes"], rows["b/y"]["environment_failed"], rows["b/y"]["mean_length"]) == (2, 1, 3.0)
    assert rows["b/y"]["truncated_share"] == 0.5
    assert rows["a/x"]["unreadable_share"] == 0.5
    assert found.to_json()["truncated_share"] == 0.25


def test_unreadable_turns_are_a_share_of_turns():
    made = episode(turn(), turn(action=None, unreadable="no call"), turn(), turn())
    assert ScreenEvaluation.from_episodes([made]).to_json()["unreadable_turns"] == 0.25


def test_pass_at_k_needs_repeated_specs_and_says_how_many_counted():
    once = ScreenEvaluation.from_episodes([played("a/x", seed, S) for seed in range(5)])
    assert once.to_json()["passes"] == []
    # seed 0: one of four right; seed 1: both of two; a failure of the screen is no try
    found = ScreenEvaluation.from_episodes(
        [*(played("a/x", 0, outcome) for outcome in (S, F, F, F, E)), *(played("a/x", 1, S) for _ in range(2))]
    )
    assert found.to_json()["passes"] == [
        {"k": 1, "pass_at_k": 0.625, "pass_hat_k": 0.625, "specs": 2},
        {"k": 2, "pass_at_k": 0.75, "pass_hat_k": 0.5, "specs": 2},
        {"k": 4, "pass_at_k": 1.0, "pass_hat_k": 0.0, "specs": 1},
    ]


def test_other_parameters_are_another_spec():
    found = ScreenEvaluation.from_episodes([played("a/x", 0, S, params={"size": size}) for size in (1, 2)])
    assert found.passes == ()


def test_seconds_run_from_the_first_start_to_the_last_end():
    found = ScreenEvaluation.from_episodes(
        [played("a/x", 0, S, started_at=100.0, seconds=5.0), played("a/x", 1, F, started_at=102.0, seconds=9.0)]
    )
    assert found.to_json()["seconds"] == 11.0
    assert found.to_json()["mean_seconds"] == 7.0


@pytest.mark.parametrize("outcomes", [[], [E, E]])
def test_without_an_episode_there_is_no_rate_and_no_crash(outcomes):
    facts = ScreenEvaluation.from_episodes([played("a/x", 0, outcome) for outcome in outcomes]).to_json()
    assert facts["episodes"] == 0
    assert facts["environment_failed"] == len(outcomes)
    assert facts["success_rate"] is facts["mean_return"] is facts["return_ci95"] is None
    assert facts["ci95"] == [0.0, 1.0]


def test_the_return_of_one_episode_has_no_interval():
    facts = ScreenEvaluation.from_episodes([played("a/x", 0, S)]).to_json()
    assert (facts["mean_return"], facts["return_ci95"]) == (1.0, None)


def test_all_solved_is_one_and_its_interval_is_below():
    facts = ScreenEvaluation.from_episodes([played("a/x", seed, S) for seed in range(10)]).to_json()
    assert facts["success_rate"] == facts["ci95"][1] == 1.0
    assert facts["ci95"][0] == pytest.approx(0.7225, abs=1e-4)


def test_trajectories_and_their_entries_score_the_same():
    made = [episode(outcome=S), episode(turn(), turn(), outcome=F)]
    assert ScreenEvaluation.from_episodes(made) == ScreenEvaluation.from_episodes(
        [TrajectoryEntry.of(one) for one in made]
    )


def compared(a, b):
    return ScreenComparison(
        ScreenEvaluation.from_episodes([played("a/x", seed, outcome) for seed, outcome in enumerate(a)]),
        ScreenEvaluation.from_episodes([played("a/x", seed, outcome) for seed, outcome in enumerate(b)]),
    )


def test_twelve_seeds_of_which_nine_are_won_by_a_and_one_by_b():
    found = compared([S] * 9 + [F] + [S, F], [F] * 9 + [S] + [S, F])
    facts = found.to_json()
    assert [facts[name] for name in ("both", "only_a", "only_b", "neither", "pairs")] == [1, 9, 1, 1, 12]
    assert facts["difference"] == pytest.approx(8 / 12)
    assert facts["p_value"] == 22 / 1024
    assert 0 < facts["ci95"][0] < 8 / 12 < facts["ci95"][1] < 1
    assert json.loads(json.dumps(facts)) == facts


def test_what_has_no_partner_is_counted_and_left_out():
    facts = compared([S, S, E, F], [F, E, S]).to_json()
    assert facts["pairs"] == 1
    assert (facts["unpaired_a"], facts["unpaired_b"]) == (2, 1)
    assert (facts["environment_failed_a"], facts["environment_failed_b"]) == (1, 1)


def test_equal_seeds_with_other_parameters_do_not_meet():
    a = ScreenEvaluation.from_episodes([played("a/x", 0, S, params={"n": 1})])
    b = ScreenEvaluation.from_episodes([played("a/x", 0, S, params={"n": 2})])
    assert ScreenComparison(a, b).to_json()["pairs"] == 0


def test_repeated_specs_meet_in_order_of_play():
    a = ScreenEvaluation.from_episodes([played("a/x", 0, outcome) for outcome in (S, S, F)])
    b = ScreenEvaluation.from_episodes([played("a/x", 0, outcome) for outcome in (F, S)])
    assert ScreenComparison(a, b).overall == PairCounts(both=1, only_a=1)
    assert ScreenComparison(a, b).unpaired_counts[0] == 1


def test_nothing_in_common_says_nothing():
    facts = compared([], []).to_json()
    assert facts["difference"] is None
    assert facts["ci95"] == [-1.0, 1.0]
    assert facts["p_value"] == 1.0


@given(st.lists(st.tuples(st.sampled_from([S, F, T, U, E]), st.sampled_from([S, F, E])), max_size=30))
def test_every_episode_is_in_a_pair_left_over_or_broken(outcomes):
    found = compared([a for a, _ in outcomes], [b for _, b in outcomes])
    facts = found.to_json()
    assert facts["pairs"] + facts["unpaired_a"] + facts["environment_failed_a"] == len(outcomes)
    assert facts["pairs"] + facts["unpaired_b"] + facts["environment_failed_b"] == len(outcomes)
    assert sum(row["pairs"] for row in facts["per_task"].values()) == facts["pairs"]
