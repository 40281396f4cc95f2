"""The runner of BDI agents: plans choose the actions, and what the libraries hide is a reason."""

import dataclasses

import numpy as np
import pytest
from tests.runs.runners.bdi import SHORT, bdi_spec, read_events
from tests.runs.runners.conftest import run

from palaestra.runs.runners.conformance import check_runner
from palaestra.runs.runners.spade_bdi import SpadeBdiRunner
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, TrainingStep
from palaestra.telemetry.event import Belief, PhaseChanged

LAKE_HOLES = {"hole(1,1)", "hole(3,1)", "hole(3,2)", "hole(0,3)"}


def test_the_plans_cross_the_lake_and_every_hole_is_fallen_into_once(paths, machine):
    plan = SpadeBdiRunner().plan(bdi_spec(config=SHORT, seed=1), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    events = read_events(plan)
    episodes = [event for event in events if isinstance(event, EpisodeSummary)]
    assert [event.episode for event in episodes] == list(range(1, 61))
    # Where actions have certain results, a path that worked is never left again.
    assert [event.episode_return for event in episodes[-30:]] == [1.0] * 30
    steps = [event for event in events if isinstance(event, TrainingStep)]
    assert [event.update for event in steps] == [20, 40, 60]
    last = steps[-1].metrics
    assert last["actions_by_plan"] + last["actions_by_policy"] + last["actions_by_skill"] == pytest.approx(1)
    assert (last["cached_policies"], last["skills"], last["policy_repairs"]) == (1, 1, 0)
    assert last["epsilon"] < 1
    beliefs = [event for event in events if isinstance(event, Belief)][-1].beliefs
    holes = {text for text in beliefs["beliefs"] if text.startswith("hole(")}
    assert holes <= LAKE_HOLES
    assert sum(event.episode_return == 0 and event.length < 100 for event in episodes) == len(holes)
    assert {"at(3,3)", "goal(3,3)", "outcome(success)", "has_policy(ice,1)"} <= set(beliefs["beliefs"])
    assert beliefs.keys() == {"beliefs", "intentions", "plan", "confidence", "episode", "step", "q_values"}
    assert np.array(beliefs["q_values"]).shape == (16, 4)
    assert (beliefs["episode"], beliefs["confidence"]) == (60, 1.0)
    assert [event.env_step for event in events if isinstance(event, CheckpointSaved)] == [episodes[-1].env_step]
    assert events[-1] == PhaseChanged("succeeded", "done")


def test_intentions_name_the_goal_and_the_plan_of_every_level(paths, machine):
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "episodes": 1}, seed=1), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    first = next(event for event in read_events(plan) if isinstance(event, Belief))
    assert first.beliefs["intentions"] == [
        {"goal": "live", "plan": "+!live"},
        {"goal": "cross", "plan": "+!cross"},
        {"goal": "act", "plan": "explore"},
    ]
    assert first.beliefs["plan"] == "explore"


def test_the_same_seed_gives_the_same_episodes_and_another_seed_others(paths, machine):
    episodes = []
    for number, seed in enumerate((3, 3, 4), 1):
        attempt = paths.run_dir / f"attempt_{number}"
        own = dataclasses.replace(paths, attempt=number, attempt_dir=attempt, work_dir=attempt / "work")
        config = {"episodes": 40, "env_kwargs": {"is_slippery": True}}
        plan = SpadeBdiRunner().plan(bdi_spec(config=config, seed=seed), own, machine)
        code, output = run(plan)
        assert code == 0, output
        events = read_events(plan)
        episodes.append([(e.episode_return, e.length) for e in events if isinstance(e, EpisodeSummary)])

    first, second, other = episodes
    assert first == second
    assert first != other


def test_it_conforms(tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "elsewhere"))
    directory = tmp_path / "runs"
    directory.mkdir()
    check_runner(SpadeBdiRunner, bdi_spec(config=SHORT), directory)


@pytest.mark.parametrize(
    ("options", "check", "remedy"),
    [
        ({"script": "dqn"}, "script", "asl=FILE"),
        ({"env_id": None}, "env", "--env"),
        ({"config": {"episode": 3}}, "flag", "episodes"),
        ({"config": {"asl": "nowhere.asl"}}, "asl", "AgentSpeak file"),
        ({"config": {"xmpp": {"host": "localhost"}}}, "flag", ""),
        ({"config": {"save_as": "../outside"}}, "flag", ""),
        ({"warm_start": "nothing"}, "warm_start", "step_N"),
        ({"python": "/nowhere"}, "python", "virtualenv"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_without_an_interpreter(
    machine, tmp_path, monkeypatch, options, check, remedy
):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    (refused,) = SpadeBdiRunner().preflight(bdi_spec(**options), machine)

    assert (refused.level, refused.check) == ("refused", check)
    assert remedy in refused.remedy
