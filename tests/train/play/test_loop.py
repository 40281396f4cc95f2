"""The rules of a play, with a counting environment and a policy that answers when the test says so."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from palaestra.errors import ConfigError
from palaestra.runs.play.episode import EpisodeWriter
from palaestra.runs.play.protocol import (
    Act,
    Message,
    Pause,
    RemovePolicy,
    Reset,
    SetMode,
    SetRecording,
    SetSpeed,
    SingleStep,
    TakeControl,
)
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import Controls, EnvironmentDescription, PlayNotice, PlayState, PolicyStatus, StepReport
from palaestra.train.play.environment import EncodedPicture, PolicyInput, Result
from palaestra.train.play.loop import PlayLoop


class Counting:
    """Counts steps; action 9 is refused; the episode ends at step `length`."""

    def __init__(self, *, turn_based=False, idle=0, length=5, fps=10.0):
        self.description = EnvironmentDescription(
            env_id="Counting",
            kind="gymnasium",
            action_space={"type": "Discrete", "n": 2, "start": 0},
            controls=Controls(kind="choices", idle=idle),
            turn_based=turn_based,
            fps=fps,
        )
        self.count, self.length, self.seeds, self.pictures = 0, length, [], 0

    def reset(self, seed):
        self.seeds.append(seed)
        self.count = 0

    def step(self, action):
        if action == 9:
            raise ConfigError("action", action, "is not an action")
        self.count += 1
        return Result(1.0, self.count == self.length, False)

    def picture(self):
        self.pictures += 1
        return EncodedPicture(b"\xff\xd8\xff", 4, 3)

    def policy_input(self):
        return PolicyInput({"": np.array([self.count])})

    def grid(self, q_table):
        return None

    def random_action(self):
        return 0

    def close(self):
        pass


class Scripted:
    """A policy whose answers the test releases."""

    def __init__(self, ready=None):
        self.asked, self.begun, self.is_closed = [], [], False
        self.messages = deque() if ready is None else deque([Message({"type": "ready", **ready})])

    def begin(self, instruction, seed):
        self.begun.append(seed)

    def ask(self, observation):
        self.asked.append(int(observation.arrays[""][0]))

    def answer(self, action, **header):
        self.messages.append(Message({"type": "action", "action": action, **header}))

    def read(self):
        while self.messages:
            message = self.messages.popleft()
            if message.type == "eof":
                raise EOFError("the policy process ended with exit code 1")
            yield message

    def fileno(self):
        return -1

    def close(self):
        self.is_closed = True


class Play:
    """A loop with a clock that the test moves, and everything that it sent."""

    def __init__(self, tmp_path, environment=None, **spec):
        self.environment = environment or Counting()
        self.sent, self.now = [], 100.0
        names = iter(range(1000))
        self.loop = PlayLoop(
            self.environment,
            PlaySpec(env_id="Counting", **spec),
            "play",
            send=lambda report, payload: self.sent.append(report),
            new_recording=lambda record: EpisodeWriter(tmp_path / f"e{next(names)}", replace(record, episode_id="e")),
            wall_clock=lambda: 7.0,
        )
        self.loop.begin(self.now)

    def run(self, seconds):
        """Call `tick` at each deadline until the time has passed."""
        end = self.now + seconds
        while True:
            for policy in tuple(self.loop.policies()):
                self.loop.read_policy(policy)
            due = self.loop.deadline()
            if due is None or due > end + 1e-9:
                break
            self.now = max(self.now, due)
            self.loop.tick(self.now)
        self.now = end
        self.loop.tick(self.now)

    def send(self, control):
        self.loop.handle(control, self.now)

    def load(self, policy, name="new"):
        self.loop.load(policy, PolicyStatus(state="loading", name=name, checkpoint=name))
        self.loop.read_policy(policy)

    @property
    def steps(self):
        return [report for report in self.sent if isinstance(report, StepReport) and report.step > 0]

    @property
    def state(self):
        return [report for report in self.sent if isinstance(report, PlayState)][-1]

    @property
    def notices(self):
        return [report.text for report in self.sent if isinstance(report, PlayNotice)]


@pytest.fixture
def start(tmp_path):
    """Start plays that are closed after the test."""
    plays = []

    def start_play(environment=None, **spec):
        plays.append(Play(tmp_path, environment, **spec))
        return plays[-1]

    yield start_play
    for play in plays:
        play.loop.close()


FITS = {"action_space": {"type": "Discrete", "n": 2, "start": 0}}


def test_an_environment_that_goes_on_takes_ten_steps_a_second_with_the_idle_action(start):
    play = start(Counting(length=100))
    play.run(1.0)
    assert len(play.steps) == 10
    assert {(step.action, step.actor) for step in play.steps} == {(0, "human")}


def test_a_held_action_is_repeated_until_it_is_released(start):
    play = start(Counting(length=100))
    play.send(Act(1, input=5))
    play.run(0.3)
    play.send(Act(None, input=6))
    play.run(0.2)
    assert [step.action for step in play.steps] == [1, 1, 1, 0, 0]
    assert [step.input for step in play.steps] == [5, 5, 5, 6, 6]


def test_an_environment_without_an_idle_action_stands_still_until_a_key_is_held(start):
    play = start(Counting(idle=None))
    play.run(1.0)
    assert (len(play.steps), play.state.waiting) == (0, "move")
    play.send(Act(1))
    play.run(0.2)
    assert len(play.steps) == 3  # at once, and after 0.1 and 0.2 s


def test_a_turn_based_environment_makes_one_step_for_each_move(start):
    play = start(Counting(turn_based=True))
    play.run(1.0)
    assert play.steps == []
    play.send(Act(1))
    play.send(Act(0))
    play.run(1.0)
    assert [step.action for step in play.steps] == [1, 0]
    assert play.state.waiting == "move"


def test_a_move_is_made_at_once_and_does_not_wait_for_the_pace(start):
    play = start(Counting(turn_based=True, fps=10.0))
    play.send(Act(1))
    play.run(0.02)
    play.send(Act(0))
    play.run(0.02)
    assert [step.action for step in play.steps] == [1, 0]


def test_speed_two_takes_twice_as_many_steps(start):
    play = start(Counting(length=100))
    play.send(SetSpeed(2.0))
    play.run(1.0)
    assert 20 <= len(play.steps) <= 21


def test_a_paused_play_makes_a_step_only_when_asked(start):
    play = start(paused=True)
    play.run(1.0)
    assert play.steps == []
    play.send(SingleStep())
    play.run(1.0)
    assert len(play.steps) == 1
    play.send(Pause(False))
    play.run(0.2)
    assert len(play.steps) > 1


def test_an_episode_ends_stays_for_a_second_and_the_next_one_has_the_next_seed(start):
    play = start(Counting(length=3), seed=7)
    play.run(0.5)
    assert [step.terminated for step in play.steps] == [False, False, True]
    assert play.state.waiting == "reset"
    play.run(1.0)
    assert play.environment.seeds == [7, 8]
    assert play.state.episode == 2


def test_without_auto_reset_the_play_waits_for_a_reset(start):
    play = start(Counting(length=1), auto_reset=False)
    play.run(5.0)
    assert play.environment.seeds == [0]
    play.send(Reset(42))
    assert play.environment.seeds == [0, 42]
    assert play.state.seed == 42


def test_an_agent_acts_with_its_answer_to_the_current_observation(start):
    play = start(mode="agent")
    assert play.state.waiting == "policy"
    policy = Scripted(FITS)
    play.load(policy)
    assert (play.state.policy.state, play.state.loading) == ("ready", None)
    assert policy.asked == [0]
    play.run(1.0)
    assert play.steps == []  # it has not answered yet
    policy.answer(1, outputs={"value": 2.5})
    play.run(0.1)
    assert [(step.action, step.actor, step.outputs) for step in play.steps] == [(1, "agent", {"value": 2.5})]
    assert policy.asked == [0, 1]


def test_notes_of_the_service_and_of_the_policy_are_both_kept(start):
    play = start(mode="agent")
    policy = Scripted({**FITS, "notes": ["It is young."]})
    status = PolicyStatus(state="loading", name="new", checkpoint="new", notes=("It could do better.",), digest="d")
    play.loop.load(policy, status)
    play.loop.read_policy(policy)
    assert (play.state.policy.notes, play.state.policy.digest) == (("It could do better.", "It is young."), "d")


def test_a_chunk_is_performed_without_asking_in_between(start):
    play = start(mode="agent")
    policy = Scripted(FITS)
    play.load(policy)
    policy.answer([1, 0, 1], chunk=True)
    play.run(0.5)
    assert [step.action for step in play.steps] == [1, 0, 1]
    assert policy.asked == [0, 3]


def test_in_hybrid_mode_the_person_overrides_while_a_key_is_held_and_a_stale_answer_is_not_used(start):
    play = start(Counting(length=100), mode="hybrid")
    policy = Scripted(FITS)
    play.load(policy)
    play.send(Act(1))
    play.run(0.2)
    assert [step.actor for step in play.steps] == ["human", "human"]
    play.send(Act(None))
    policy.answer(0)  # about the observation before the person acted
    play.run(0.1)
    assert len(play.steps) == 2
    assert policy.asked == [0, 2]
    policy.answer(0)
    play.run(0.1)
    assert [step.actor for step in play.steps] == ["human", "human", "agent"]


def test_in_hybrid_mode_control_can_be_handed_over(start):
    play = start(Counting(length=100), mode="hybrid")
    policy = Scripted(FITS)
    play.load(policy)
    play.send(TakeControl("human"))
    assert play.state.control == "human"
    play.run(0.2)
    assert {step.actor for step in play.steps} == {"human"}
    play.send(TakeControl("agent"))
    assert play.state.control == "agent"


def test_control_cannot_be_handed_over_in_another_mode_and_an_action_is_refused_while_the_agent_acts(start):
    play = start(mode="agent")
    with pytest.raises(ConfigError, match="the mode is agent"):
        play.send(TakeControl("human"))
    with pytest.raises(ConfigError, match="the agent acts"):
        play.send(Act(1))


def test_the_previous_policy_acts_until_the_new_one_is_ready_and_stays_when_it_fails(start):
    play = start(mode="agent")
    first, second = Scripted(FITS), Scripted()
    play.load(first, "first")
    play.load(second, "second")
    assert (play.state.policy.name, play.state.loading.name) == ("first", "second")
    second.messages.append(Message({"type": "failed", "text": "damaged", "remedy": "import it again"}))
    play.run(0.0)
    assert play.state.policy.name == "first"
    assert (play.state.loading.state, play.state.loading.text) == ("failed", "damaged")
    assert (first.is_closed, second.is_closed) == (False, True)


def test_a_new_policy_replaces_the_old_one_when_it_is_ready(start):
    play = start(mode="agent")
    first, second = Scripted(FITS), Scripted(FITS)
    play.load(first, "first")
    play.load(second, "second")
    assert (play.state.policy.name, first.is_closed) == ("second", True)


def test_a_policy_for_other_spaces_is_refused_and_says_which(start):
    play = start(mode="agent")
    play.load(Scripted({"action_space": {"type": "Discrete", "n": 4, "start": 0}}))
    assert play.state.policy is None
    assert "its actions are" in play.state.loading.text
    assert play.state.waiting == "policy"


def test_a_policy_that_dies_is_reported_and_the_play_waits_for_another(start):
    play = start(mode="agent")
    policy = Scripted(FITS)
    play.load(policy)
    policy.messages.append(Message({"type": "eof"}))
    play.run(0.1)
    assert play.state.waiting == "policy"
    assert "ended with exit code 1" in play.notices[0]


def test_a_policy_whose_action_is_not_in_the_space_is_dropped(start):
    play = start(mode="agent")
    policy = Scripted(FITS)
    play.load(policy)
    policy.answer(9)
    play.run(0.2)
    assert play.state.policy is None
    assert "was refused" in play.notices[0]


def test_a_wrong_action_of_the_person_is_a_notice_and_no_step(start):
    play = start(Counting(turn_based=True))
    play.send(Act(9))
    play.run(0.2)
    assert play.steps == []
    assert "is not an action" in play.notices[0]


def test_removing_the_policy_closes_it(start):
    play = start(mode="agent")
    policy = Scripted(FITS)
    play.load(policy)
    play.send(RemovePolicy())
    assert policy.is_closed
    assert play.state.policy is None


def test_leaving_agent_mode_releases_the_controls(start):
    play = start(Counting(length=100))
    play.send(Act(1))
    play.send(SetMode("agent"))
    play.send(SetMode("human"))
    play.run(0.1)
    assert play.steps[-1].action == 0


def test_recording_can_be_switched_off_from_the_next_episode_on(start, tmp_path):
    play = start(Counting(length=2))
    play.send(SetRecording(False))
    play.run(0.3)
    play.send(Reset())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e0"]
    assert play.state.episode_id == ""


def test_an_episode_without_a_step_leaves_no_recording(start, tmp_path):
    play = start()
    play.send(Reset())
    play.loop.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_recording_and_not_the_play(start):
    play = start(Counting(length=100))
    play.loop._writer.add = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    play.run(0.3)
    assert len(play.steps) == 3
    assert play.notices == ["The episode is no longer recorded (No space left on device)."]
    assert not play.state.recording


def test_a_fast_play_reports_every_step_and_takes_a_picture_sixty_times_a_second(start):
    play = start(Counting(length=10_000, fps=1000.0))
    play.run(1.0)
    assert len(play.steps) == 1000
    assert 50 <= play.environment.pictures <= 70


def test_the_table_of_a_loaded_policy_is_given_to_the_cells_until_another_policy_acts(start):
    class Tabled(Counting):
        def grid(self, q_table):
            self.table = q_table

    play = start(Tabled(), mode="agent")
    assert play.environment.table is None
    tabular, other = Scripted({"q_table": [[1.0, 2.0]]}), Scripted({})
    for policy, expected in ((tabular, [[1.0, 2.0]]), (other, None)):
        play.loop.load(policy, PolicyStatus(state="loading", name="p", checkpoint="c"))
        play.loop.read_policy(policy)
        policy.answer(0)
        play.loop.read_policy(policy)
        play.run(0.2)
        table = play.environment.table
        assert (None if table is None else table.tolist()) == expected


def test_a_policy_with_several_tables_says_which_one_is_in_use_and_an_episode_begins_with_none(start):
    class Tabled(Counting):
        def grid(self, q_table):
            self.tables = [*getattr(self, "tables", []), None if q_table is None else q_table.tolist()]

    play = start(Tabled(length=3), mode="agent")
    policy = Scripted({})
    play.loop.load(policy, PolicyStatus(state="loading", name="p", checkpoint="c"))
    play.loop.read_policy(policy)
    play.environment.tables = []
    for header in ({}, {"q_table": [[1.0, 2.0]]}, {}):
        policy.answer(0, **header)
        play.loop.read_policy(policy)
        play.run(0.1)
    play.send(Reset())
    assert play.environment.tables == [None, [[1.0, 2.0]], [[1.0, 2.0]], None]
