"""The runner of BDI agents: plans choose the actions, in every family of environments."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from tests.runs.runners.bdi import SHORT, bdi_spec, read_events
from tests.runs.runners.conftest import run

from palaestra.runs.runners.conformance import check_runner
from palaestra.runs.runners.spade_bdi import SpadeBdiRunner
from palaestra.runs.runners.spade_bdi_checks import SpadeBdiConfig
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


def test_beliefs_are_reported_while_an_episode_lasts(paths, machine, tmp_path):
    # Left of the start is no ice: the agent stays where it is until the time limit, which takes more than a second.
    asl = tmp_path / "stay.asl"
    asl.write_text("!live.\n+!live <- .begin_episode; while (not over) { !act }.\n@stay\n+!act <- .do(0).\n")
    config = {**SHORT, "episodes": 1, "asl": str(asl), "max_episode_steps": 40_000, "belief_interval_s": 0.1}
    plan = SpadeBdiRunner().plan(bdi_spec(config=config), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    reports = [event.beliefs for event in read_events(plan) if isinstance(event, Belief)]
    during = [report for report in reports if "over" not in report["beliefs"]]
    steps = [report["step"] for report in during]
    assert len(steps) > 2
    assert steps == sorted(set(steps))
    assert all(f"step({report['step']})" in report["beliefs"] for report in during)
    assert {report["plan"] for report in during} == {"stay"}
    assert during[-1]["intentions"][-1] == {"goal": "act", "plan": "stay"}


RECOVERY = """
!live.
+!live <- while (.more_episodes) { .begin_episode; while (not over) { !act } }.

// The first plan fails in every second step: in !choose, which has a plan for that only in the start.
@risky
+!act : step(N) & N mod 2 == 0 <- !choose(N, A); .do(A).
@down
+!act <- .do(1).
@instead
-!act <- .do(2).

+!choose(N, A) <- .policy_action(nothing, A).
@first
-!choose(0, A) <- A = 0.
"""


def test_a_failed_plan_is_replaced_by_the_plan_for_the_failure_of_its_goal_or_of_the_goal_above(
    paths, machine, tmp_path
):
    (tmp_path / "plans.asl").write_text(RECOVERY)
    config = {**SHORT, "episodes": 1, "asl": str(tmp_path / "plans.asl")}
    plan = SpadeBdiRunner().plan(bdi_spec(config=config), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    events = read_events(plan)
    # Left (against the edge), down, right: into the hole at (1, 1).
    (episode,) = [event for event in events if isinstance(event, EpisodeSummary)]
    last = [event for event in events if isinstance(event, Belief)][-1].beliefs
    assert episode.length == 3
    assert {"at(1,1)", "outcome(failure)", "last_action(2)"} <= set(last["beliefs"])
    assert last["plan"] == "instead"
    metrics = [event.metrics for event in events if isinstance(event, TrainingStep)][-1]
    assert (metrics["recovered_failures"], metrics["plans_used"]) == (2, 3)


def test_a_plan_for_a_failure_that_fails_itself_ends_the_run(paths, machine, tmp_path):
    (tmp_path / "plans.asl").write_text("!live.\n+!live <- .begin_episode; .do(7).\n-!live <- .do(8).\n")
    config = {**SHORT, "asl": str(tmp_path / "plans.asl")}
    plan = SpadeBdiRunner().plan(bdi_spec(config=config), paths, machine)

    code, output = run(plan)

    assert code == 1
    assert "a plan failed: " in output.splitlines()[-1]
    assert "plans.asl:3: action 8 is not one of 0 to 3" in output.splitlines()[-1]
    assert "action 7" not in output.splitlines()[-1]


@pytest.mark.parametrize("recovery", ["", "-!live <- !live.\n"])
def test_a_goal_that_calls_itself_without_end_is_a_failed_run_with_file_and_line(paths, machine, tmp_path, recovery):
    (tmp_path / "plans.asl").write_text(f"!live.\n+!live <-\n  !live.\n{recovery}")
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "asl": str(tmp_path / "plans.asl")}), paths, machine)

    code, output = run(plan)

    assert code == 1
    assert "plans.asl:3: +!live is nested in 10,000 goals, and no more are possible" in output.splitlines()[-1]


def test_plans_may_repeat_episodes_and_steps_by_recursion(paths, machine, tmp_path):
    (tmp_path / "plans.asl").write_text(
        "!live.\n"
        "+!live : .more_episodes <- .begin_episode; !act; !live.\n+!live <- true.\n"
        "+!act : over <- true.\n+!act <- .do(0 / 2); !act.\n"
    )
    config = {**SHORT, "episodes": 200, "asl": str(tmp_path / "plans.asl"), "max_episode_steps": 10}
    plan = SpadeBdiRunner().plan(bdi_spec(config=config), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    events = read_events(plan)
    assert sum(isinstance(event, EpisodeSummary) for event in events) == 200
    shown = [len(event.beliefs["intentions"]) for event in events if isinstance(event, Belief)]
    assert max(shown) <= 100


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


@pytest.mark.parametrize(
    ("env_id", "config", "plans", "least"),
    [
        # The shortest way along the cliff has 13 steps; a fall would cost 100.
        ("CliffWalking-v1", {"episodes": 60, "q_learning": {"epsilon_start": 0.1, "learning_rate": 0.5}}, 4, -60),
        # Without a plan a random taxi earns about -770.
        ("Taxi-v4", {"episodes": 150, "q_learning": {"epsilon_start": 0.1, "learning_rate": 0.5}}, 4, -20),
        # 14 steps to the first goal, 9 to the second.
        ("palaestra/GridWorld-v0", {"episodes": 60, "env_kwargs": {"later_goals": [[30, 5, 0]]}}, 3, -20),
    ],
)
def test_the_plans_of_every_family_reach_their_aim(paths, machine, env_id, config, plans, least):
    plan = SpadeBdiRunner().plan(bdi_spec(env_id=env_id, config=config, seed=1), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    events = read_events(plan)
    returns = [event.episode_return for event in events if isinstance(event, EpisodeSummary)]
    last = [event for event in events if isinstance(event, TrainingStep)][-1].metrics
    assert np.mean(returns[-20:]) > least
    assert last["success_rate"] > 0.8
    assert last["plans_used"] == plans
    if env_id == "CliffWalking-v1":
        assert min(returns) > -300, "it never falls: 500 steps at most cost 1 each, and most episodes are far shorter"


def test_the_plans_follow_a_goal_that_moves_and_return_to_a_known_one_at_once(paths, machine):
    moves = [[20, 5, 0], [40, 7, 7]]
    config = {"episodes": 50, "env_kwargs": {"later_goals": moves}}
    plan = SpadeBdiRunner().plan(bdi_spec(env_id="palaestra/GridWorld-v0", config=config, seed=1), paths, machine)

    code, output = run(plan)

    assert code == 0, output
    returns = [event.episode_return for event in read_events(plan) if isinstance(event, EpisodeSummary)]
    # The cached policy of the first goal is as good as before; at most every fifth episode searches for a better one.
    assert returns[40:44] == [max(returns[:20])] * 4
    assert -100 < max(returns[20:40]) <= -9


def test_the_plans_in_the_documentation_work(paths, machine, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "bdi.md").read_text()
    (text,) = [block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "!live." in block]
    (tmp_path / "hold.asl").write_text(text)
    spec = bdi_spec(config={**SHORT, "asl": "hold.asl"}, seed=1, invoked_from=tmp_path)
    assert "refused" not in {finding.level for finding in SpadeBdiRunner().preflight(spec, machine)}

    code, output = run(plan := SpadeBdiRunner().plan(spec, paths, machine))

    assert code == 0, output
    returns = [event.episode_return for event in read_events(plan) if isinstance(event, EpisodeSummary)]
    assert returns[-10:] == [1.0] * 10


def test_every_action_key_and_metric_is_in_the_documentation(paths, machine):
    page = (Path(__file__).parents[3] / "docs" / "bdi.md").read_text()
    program = Path(SpadeBdiRunner.plan.__code__.co_filename).with_name("programs") / "bdi"
    actions = set(re.findall(r'\("(\.\w+)", \d\)', (program / "actions.py").read_text()))
    metrics = set(re.findall(r'^            "(\w+)": ', (program / "training.py").read_text(), re.MULTILINE))
    keys = {key for key in SpadeBdiConfig.model_fields if key != "xmpp"}
    beliefs = set(
        re.findall(r'Percept\("(\w+)"', (program / "worlds.py").read_text() + (program / "agent.py").read_text())
    )

    assert len(actions) == 16
    assert [name for name in sorted(actions) if f"`{name}" not in page] == []
    assert [name for name in sorted(metrics | keys) if f"`{name}" not in page and f".{name}`" not in page] == []
    assert [name for name in sorted(beliefs) if not re.search(rf"`{name}[(`]", page)] == []


def test_a_peer_that_is_no_account_is_refused_by_name_and_the_case_of_an_account_does_not_matter(machine):
    (refused,) = SpadeBdiRunner().preflight(bdi_spec(config={"xmpp": {"peers": ["bad peer"]}}), machine)

    assert "'bad peer' is not the JID of an account, such as operator@example.org" in refused.text
    config = SpadeBdiConfig.model_validate({"xmpp": {"peers": ["Operator@Example.org"]}})
    assert config.xmpp.peers == ("operator@example.org",)


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
        ({"config": {"xmpp": {"host": "localhost", "jid": "an agent@localhost"}}}, "flag", ""),
        ({"config": {"xmpp": {"peers": ["operator@localhost", "bad peer"]}}}, "flag", ""),
        ({"config": {"xmpp": {"peers": ["localhost"]}}}, "flag", ""),
        # Messages are compared with the account, without the resource of its connection.
        ({"config": {"xmpp": {"peers": ["operator@localhost/desk"]}}}, "flag", ""),
        ({"config": {"save_as": "../outside"}}, "flag", ""),
        # The value of such a variable would be stored with the command of the run.
        ({"config": {"xmpp": {"password_variable": "HOME"}}}, "flag", ""),
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
