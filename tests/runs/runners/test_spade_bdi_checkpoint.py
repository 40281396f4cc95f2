"""Checkpoints of BDI agents: what is in them, what is refused, warm starts, and plays."""

import asyncio
import hashlib
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.runs.runners.bdi import SHORT, bdi_python, bdi_spec, read_events
from tests.runs.runners.conftest import run, start

from palaestra.errors import CheckpointError
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.catalogue import list_checkpoints
from palaestra.runs.phase import Phase
from palaestra.runs.play.episode import open_episode
from palaestra.runs.play.plays import Plays
from palaestra.runs.play.policy_planner import PolicyPlanner
from palaestra.runs.play.protocol import LoadPolicy, unpack
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import PlayState, StepReport, read_report
from palaestra.runs.process.virtual_environment import LOCATION_VARIABLE
from palaestra.runs.runners.programs.bdi.checkpoint import AgentState, save_checkpoint
from palaestra.runs.runners.programs.bdi.skills import QLearning, SkillLibrary, Transition
from palaestra.runs.runners.spade_bdi import PLANS, PROGRAM, SpadeBdiRunner
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, TrainingStep
from palaestra.telemetry.event import Belief
from palaestra.train.play.environment import PolicyInput
from palaestra.train.play.policies import PolicyCommand, PolicyProcess

# Down, down, right, down, right, right: the shortest way around the holes of the lake.
WAY = [1, 1, 2, 1, 2, 2]
STATES = [0, 4, 8, 9, 13, 14, 15]


def write_lake_agent(path, *, has_policy=False, steps=0, **changes):
    """A checkpoint whose table prefers the shortest way; returns its SHA-256."""
    library = SkillLibrary(16, 4, QLearning(epsilon_start=0.1), seed=0)
    for state, action in zip(STATES, WAY, strict=False):
        library.get("ice").q[state, action] = 1.0
    library.get("ice").steps = steps
    if has_policy:
        way = zip(STATES, WAY, STATES[1:], strict=False)
        library.cache("ice", 10, [Transition(s, a, float(s == 14), t, s == 14) for s, a, t in way])
    state = AgentState(
        **{"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}, "family": "frozen_lake", "states": 16}
        | {"actions": 4, "episode": 10, "env_step": 60, "beliefs": ["hole(1,1)"], "plans": []}
        | changes
    )
    return save_checkpoint(str(path), state, library, (PLANS / "frozen_lake.asl").read_text())


def test_files_are_arrays_and_json_and_every_one_has_its_hash(tmp_path):
    sha256 = write_lake_agent(tmp_path / "step_60")

    raw = (tmp_path / "step_60" / "manifest.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == sha256
    files = json.loads(raw)["files"]
    assert sorted(files) == ["agent.json", "plans.asl", "q_tables.npz"]
    for name, entry in files.items():
        data = (tmp_path / "step_60" / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    with np.load(tmp_path / "step_60" / "q_tables.npz", allow_pickle=False) as tables:
        assert tables["ice"].shape == (16, 4)
        assert tables["ice"][0].tolist() == [0, 1, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_60"]


def _refusal(machine, checkpoint, **options):
    findings = SpadeBdiRunner().preflight(bdi_spec(config=SHORT, warm_start=str(checkpoint), **options), machine)
    return [(one.check, one.text) for one in findings if one.level == "refused"]


def test_a_changed_byte_a_missing_file_and_another_shape_are_refused_before_the_run(machine, tmp_path):
    write_lake_agent(tmp_path / "good")
    assert _refusal(machine, tmp_path / "good") == []
    for name in ("q_tables.npz", "agent.json", "plans.asl"):
        damaged = tmp_path / f"damaged-{name}"
        write_lake_agent(damaged)
        data = bytearray((damaged / name).read_bytes())
        data[len(data) // 2] ^= 1
        (damaged / name).write_bytes(data)
        assert _refusal(machine, damaged) == [("warm_start", f"{name} was changed or damaged: its SHA-256 differs")]
    write_lake_agent(tmp_path / "missing")
    (tmp_path / "missing" / "q_tables.npz").unlink()
    ((_, text),) = _refusal(machine, tmp_path / "missing")
    assert "q_tables.npz" in text
    write_lake_agent(tmp_path / "large", states=64)
    assert _refusal(machine, tmp_path / "large") == [
        ("warm_start", "its tables have 64 states and 4 actions, the environment has 16 and 4")
    ]


def test_a_checkpoint_of_another_environment_of_the_same_size_is_refused_before_the_run_and_at_its_start(
    paths, machine, tmp_path
):
    write_lake_agent(tmp_path / "lake")
    config = {"episodes": 2, "env_kwargs": {"rows": ["S...", "....", "....", "...G"]}}
    spec = bdi_spec(env_id="palaestra/GridWorld-v0", config=config, warm_start=str(tmp_path / "lake"))

    findings = SpadeBdiRunner().preflight(spec, machine)
    code, output = run(SpadeBdiRunner().plan(spec, paths, machine))

    reason = "it was trained in FrozenLake-v1, and the environment is palaestra/GridWorld-v0"
    (refused,) = [one for one in findings if one.level == "refused"]
    assert (refused.check, refused.text) == ("warm_start", reason)
    assert refused.remedy == "Use it in FrozenLake-v1 with the arguments {'is_slippery': False}"
    assert code == 1
    assert reason in output.splitlines()[-1]


def test_tables_that_do_not_fit_their_own_description_are_refused(machine, tmp_path):
    write_lake_agent(tmp_path / "agent", states=64)

    ((check, text),) = _refusal(machine, tmp_path / "agent")

    assert check == "warm_start"
    assert "64 states" in text
    write_lake_agent(tmp_path / "other", states=64)
    spec = bdi_spec(config={"env_kwargs": {"map_name": "8x8"}}, warm_start=str(tmp_path / "other"))
    ((text,),) = [[one.text] for one in SpadeBdiRunner().preflight(spec, machine) if one.level == "refused"]
    assert "the table of ice is not 64 x 4 finite numbers" in text


def test_a_warm_start_begins_with_what_the_first_run_learned_and_found(paths, machine, tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "home"))
    config = {**SHORT, "save_as": "lake"}
    first = SpadeBdiRunner().plan(bdi_spec(config=config, seed=1), paths, machine)
    code, output = run(first)
    assert code == 0, output
    kept = tmp_path / "home" / "var" / "training" / "custom" / "spade_bdi" / "lake"
    assert sorted(path.name for path in kept.iterdir()) == ["agent.json", "manifest.json", "plans.asl", "q_tables.npz"]
    again = paths.run_dir.with_name("another")
    own = replace(
        paths, run_id="another", run_dir=again, attempt_dir=again / "attempt_1", work_dir=again / "attempt_1" / "work"
    )
    spec = bdi_spec(config={**SHORT, "episodes": 4}, seed=2, warm_start="lake")
    assert "refused" not in {finding.level for finding in SpadeBdiRunner().preflight(spec, machine)}

    code, output = run(second := SpadeBdiRunner().plan(spec, own, machine))

    assert code == 0, output
    events = read_events(second)
    # The cached policy crosses the lake in six steps from the first episode on.
    assert [(e.episode_return, e.length) for e in events if isinstance(e, EpisodeSummary)] == [(1.0, 6)] * 4
    before = [event for event in read_events(first) if isinstance(event, Belief)][-1].beliefs["beliefs"]
    after = [event for event in events if isinstance(event, Belief)][-1].beliefs["beliefs"]
    holes = [text for text in before if text.startswith("hole(")]
    assert holes
    assert [text for text in after if text.startswith("hole(")] == holes
    assert _refusal(machine, "lake", env_id="CliffWalking-v1")
    (refused,) = SpadeBdiRunner().preflight(bdi_spec(config=config), machine)
    assert (refused.check, refused.remedy) == ("flag", "Choose another name, or remove it")


def test_a_policy_that_leads_into_a_hole_is_dropped_and_another_way_is_found(paths, machine, tmp_path):
    # Both epsilon and the table say that nothing is left to learn.
    write_lake_agent(tmp_path / "agent", has_policy=True, steps=1_000_000, beliefs=[])
    # A lake of the same size with a hole on the way of the policy, in its third state.
    lake = ["SFFF", "FHFH", "HFFF", "FFFG"]
    config = {"episodes": 60, "report_every": 1, "env_kwargs": {"is_slippery": False, "desc": lake}}
    config["q_learning"] = {"learning_rate": 0.5}
    spec = bdi_spec(config=config, seed=1, warm_start=str(tmp_path / "agent"))

    code, output = run(plan := SpadeBdiRunner().plan(spec, paths, machine))

    assert code == 0, output
    events = read_events(plan)
    episodes = [(event.episode_return, event.length) for event in events if isinstance(event, EpisodeSummary)]
    metrics = [event.metrics for event in events if isinstance(event, TrainingStep)]
    assert episodes[0] == (0.0, 2), "the policy leads into the hole"
    assert [metrics[0][name] for name in ("policy_repairs", "cached_policies")] == [0, 1]
    # The plans judge an episode after its report.
    assert [metrics[1][name] for name in ("policy_repairs", "cached_policies")] == [1, 0]
    assert metrics[1]["epsilon"] > 0.9, "the skill explores again"
    assert 1.0 in [episode_return for episode_return, _ in episodes[:10]], (
        "not after hundreds of steps along the old way"
    )
    assert [episode_return for episode_return, _ in episodes[-20:]] == [1.0] * 20
    assert [metrics[-1][name] for name in ("policy_repairs", "cached_policies")] == [1, 1]
    beliefs = [event for event in events if isinstance(event, Belief)][-1].beliefs["beliefs"]
    assert "hole(0,2)" in beliefs


def test_a_run_that_is_stopped_keeps_its_checkpoint_under_its_name(paths, machine, tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "home"))
    config = {**SHORT, "episodes": 10_000_000, "save_as": "lake"}
    plan = SpadeBdiRunner().plan(bdi_spec(config=config, seed=1), paths, machine)
    log = Attempt(plan.paths.attempt_dir).stdout

    with start(plan) as process:
        deadline = time.monotonic() + 60
        while not (log.exists() and "EpisodeSummary" in log.read_text()):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130

    (saved,) = [event for event in read_events(plan) if isinstance(event, CheckpointSaved)]
    kept = tmp_path / "home" / "var" / "training" / "custom" / "spade_bdi" / "lake"
    assert hashlib.sha256((kept / "manifest.json").read_bytes()).hexdigest() == saved.sha256
    assert _refusal(machine, "lake") == []


def test_a_name_that_another_run_took_meanwhile_is_replaced_and_nothing_else_is_left(
    paths, machine, tmp_path, monkeypatch
):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "home"))
    agents = tmp_path / "home" / "var" / "training" / "custom" / "spade_bdi"
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "save_as": "lake"}, seed=1), paths, machine)
    write_lake_agent(agents / "lake")
    (agents / "lake" / "notes.txt").write_text("of the other run")

    code, output = run(plan)

    assert code == 0, output
    (saved,) = [event for event in read_events(plan) if isinstance(event, CheckpointSaved)]
    assert hashlib.sha256((agents / "lake" / "manifest.json").read_bytes()).hexdigest() == saved.sha256
    assert [path.name for path in agents.iterdir()] == ["lake"]
    assert not (agents / "lake" / "notes.txt").exists()


def test_a_checkpoint_that_cannot_be_kept_is_a_failed_run_with_its_path(paths, machine, tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "home"))
    agents = tmp_path / "home" / "var" / "training" / "custom" / "spade_bdi"
    plan = SpadeBdiRunner().plan(bdi_spec(config={**SHORT, "save_as": "lake"}, seed=1), paths, machine)
    agents.mkdir(parents=True)
    (agents / "lake").write_text("a file")

    code, output = run(plan)

    assert code == 1
    (saved,) = [event for event in read_events(plan) if isinstance(event, CheckpointSaved)]
    assert f"the checkpoint {saved.path} cannot be kept as {agents / 'lake'}" in output.splitlines()[-1]
    assert [path.name for path in agents.iterdir()] == ["lake"]


def test_only_complete_agents_are_offered_as_names(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    agents = tmp_path / "var" / "training" / "custom" / "spade_bdi"
    write_lake_agent(agents / "lake")
    for name in ("pond.123.tmp", ".sea.123.new"):
        (agents / name).mkdir()

    (refused,) = SpadeBdiRunner().preflight(bdi_spec(warm_start="pond"), machine)

    assert refused.remedy == "Known names: lake"


def test_the_table_of_the_skill_in_use_is_drawn_and_none_while_it_is_unknown(tmp_path):
    library = SkillLibrary(64, 4, QLearning(), seed=0)
    for name, value in (("goal_5_0", 5.0), ("goal_7_7", 7.0)):
        library.get(name).q[:] = value
    goals = [[0, 5, 0], [1, 7, 7]]
    state = AgentState("palaestra/GridWorld-v0", {"later_goals": goals}, "grid_world", 64, 4)
    sha256 = save_checkpoint(str(tmp_path / "agent"), state, library, (PLANS / "grid_world.asl").read_text())
    command = [bdi_python(), str(PROGRAM), "act", str(tmp_path / "agent"), "--sha256", sha256]
    policy = PolicyProcess(PolicyCommand(argv=tuple(command)))

    def read():
        while True:
            for message in policy.read():
                return message.header

    try:
        tables = [read().get("q_table", "none announced")]
        values = []
        for episode in range(2):
            policy.begin("", episode)
            for cell in (0, 1, 2):
                policy.ask(PolicyInput({"": np.array([cell])}))
                answer = read()
                tables.append(answer.get("q_table", "none announced"))
                values.append(answer["outputs"]["q_values"])
    finally:
        policy.close()

    # Two skills: which one is in use is known once the plans have learned from the first step of an episode.
    first, second = [[5.0] * 4] * 64, [[7.0] * 4] * 64
    assert tables == [
        "none announced",
        *["none announced", first, "none announced"],
        *["none announced", second, "none announced"],
    ]
    assert values == [[], [5.0] * 4, [5.0] * 4, [], [7.0] * 4, [7.0] * 4]


def _play(home, checkpoint, **options):
    """The agent's steps of one recorded episode, the status of its policy, and the id of the recording."""
    spec = PlaySpec(
        env_id="FrozenLake-v1",
        parameters={"is_slippery": False},
        mode="agent",
        speed=100.0,
        auto_reset=False,
        checkpoint=str(checkpoint),
        **options,
    )

    async def get_runner(name):
        assert name == "spade-bdi"
        return SpadeBdiRunner()

    async def body():
        plays = Plays(home, PolicyPlanner(home, get_runner).plan, idle_timeout_s=60)
        try:
            record = await plays.start(spec)
            steps, status = [], None
            with plays.get(record.play_id).subscribe() as messages:
                while not (steps and steps[-1].is_last):
                    report = read_report(unpack(await asyncio.wait_for(messages.next(), 120)))
                    if isinstance(report, PlayState):
                        assert report.loading is None or report.loading.state == "loading", report.loading
                        status = report.policy or status
                    elif isinstance(report, StepReport) and report.step:
                        steps.append(report)
            return steps, status, record.play_id
        finally:
            await plays.close()

    return asyncio.run(body())


def test_a_pretrained_table_plays_one_episode_which_can_be_replayed(tmp_path, monkeypatch):
    bdi_python()
    monkeypatch.setenv(LOCATION_VARIABLE, str(Path(sys.prefix) / "environments"))
    home = Home(tmp_path.resolve() / "var" / "training")
    write_lake_agent(tmp_path / "pretrained")

    steps, status, _ = _play(home, tmp_path / "pretrained")

    assert [step.action for step in steps] == WAY
    assert {step.actor for step in steps} == {"agent"}
    assert (steps[-1].episode_return, steps[-1].terminated) == (1.0, True)
    assert (status.state, status.agent_id, status.name) == ("ready", "spade-bdi/bdi", "bdi, 60 steps")
    assert [step.outputs["plan"] for step in steps] == ["explore"] * 6
    assert "hole(1,1)" in steps[0].outputs["beliefs"]
    assert [step.outputs["q_values"][action] for step, action in zip(steps, WAY, strict=True)] == [1.0] * 6
    (directory,) = [path for path in home.episodes.iterdir() if path.is_dir()]
    demonstration = open_episode(home, directory.name).demonstration()
    assert demonstration.actions.tolist() == WAY
    assert demonstration.observations[""].reshape(-1).tolist() == STATES


def test_a_checkpoint_of_a_run_is_registered_and_plays(tmp_path):
    home = Home(tmp_path.resolve() / "var" / "training")
    with TrainerOrchestrator(home.base) as orchestrator:
        run_id = orchestrator.launch("spade-bdi", SHORT, env_id="FrozenLake-v1", seed=1, python=bdi_python())
        list(orchestrator.stream(run_id))
        assert orchestrator.run(run_id).phase is Phase.SUCCEEDED
    (checkpoint,) = list_checkpoints(home, run_id=run_id)
    assert (checkpoint.format, checkpoint.agent_id) == ("spade_bdi", "spade-bdi/bdi")
    assert checkpoint.env_signature["observation_space"]["n"] == 16

    steps, status, _ = _play(home, checkpoint.checkpoint_id)

    assert steps[-1].episode_return == 1.0
    assert {step.outputs["plan"] for step in steps} == {"follow_policy"}
    assert status.name == f"bdi, {checkpoint.env_step} steps"


def test_a_damaged_checkpoint_does_not_play(tmp_path):
    home = Home(tmp_path.resolve() / "var" / "training")
    write_lake_agent(tmp_path / "agent")
    (tmp_path / "agent" / "q_tables.npz").write_bytes(b"something else")

    async def get_runner(name):
        return SpadeBdiRunner()

    spec = PlaySpec(env_id="FrozenLake-v1", mode="agent", recording=False)
    with pytest.raises(CheckpointError, match=r"q_tables.npz is (truncated|too long)"):
        asyncio.run(PolicyPlanner(home, get_runner).plan(LoadPolicy(str(tmp_path / "agent"), True, ""), spec))


def test_a_policy_is_the_path_without_its_detours():
    library = SkillLibrary(6, 2, QLearning(), seed=0)
    # 0 → 1 → 2 → 1 → 3, where the way to 2 and back was of no use.
    steps = [
        Transition(0, 1, -1.0, 1, False),
        Transition(1, 0, -1.0, 2, False),
        Transition(2, 0, -1.0, 1, False),
        Transition(1, 1, -1.0, 3, True),
    ]

    first = library.cache("way", 7, steps)

    assert first.actions[:3] == (1, 1, 0)
    assert (first.score, first.confidence, first.episode) == (-2.0, 1.0, 7)
    worse = [Transition(0, 0, -3.0, 3, True)]
    assert library.cache("way", 8, worse) is first
    better = [Transition(0, 0, -1.0, 3, True)]
    assert library.cache("way", 9, better).actions[0] == 0


def test_knowledge_forbids_actions_and_they_take_part_in_no_maximum():
    library = SkillLibrary(2, 3, QLearning(learning_rate=0.5, discount=1.0, epsilon_start=1.0), seed=0)
    library.get("a").q[1] = [-4.0, 0.0, -2.0]
    assert library.forbid("a", 1, 1)

    error = library.learn("a", 0, 0, -1.0, 1, terminated=False)

    # The target is -1 + max(-4, -2) = -3, of which half is learned.
    assert (error, library.get("a").q[0, 0]) == (-3.0, -1.5)
    assert {library.choose("a", 1) for _ in range(50)} == {0, 2}
    assert library.forbid("a", 1, 0)
    assert not library.forbid("a", 1, 2), "one action is always left"
    assert library.choose_best("a", 1) == 2
    library.allow_all("a")
    assert library.get("a").q[1].tolist() == [0.0, 0.0, -2.0]


def test_a_truncated_episode_still_has_a_future_and_a_terminated_one_has_none():
    library = SkillLibrary(2, 1, QLearning(learning_rate=1.0, discount=0.5), seed=0)
    library.get("a").q[1, 0] = 8.0

    library.learn("a", 0, 0, 1.0, 1, terminated=False)
    assert library.get("a").q[0, 0] == 5.0
    library.learn("a", 0, 0, 1.0, 1, terminated=True)
    assert library.get("a").q[0, 0] == 1.0


def test_confidence_counts_episodes_without_exploration_once_half_of_the_window_is_known():
    library = SkillLibrary(1, 1, QLearning(confidence_window=4), seed=0)
    skill = library.get("a")
    library.finish_episode("a", success=True, has_explored=True)
    library.finish_episode("a", success=True, has_explored=False)
    assert skill.confidence is None

    for success in (False, True, True, False):
        library.finish_episode("a", success=success, has_explored=False)

    assert skill.confidence == 0.5
    assert skill.episodes == 6


def test_epsilon_falls_with_the_steps_of_the_skill():
    library = SkillLibrary(1, 1, QLearning(epsilon_start=1.0, epsilon_end=0.2, epsilon_decay_steps=4), seed=0)
    seen = []
    for _ in range(6):
        seen.append(library.epsilon("a"))
        library.learn("a", 0, 0, 0.0, 0, terminated=True)

    assert seen == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    library.reset_exploration("a")
    assert library.epsilon("a") == 1.0
    library.explores = False
    assert library.epsilon("a") == 0.0
