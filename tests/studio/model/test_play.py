from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from palaestra.runs.play.protocol import Act, decode_control, encode_control
from palaestra.runs.play.state import (
    Axis,
    Choice,
    Controls,
    EnvironmentDescription,
    PlayEnded,
    PlayNotice,
    PlayState,
    StepReport,
)
from palaestra.sessions.action import decode
from palaestra.studio.model.play import FinishedEpisode, PersonInput, PlayModel

CHOICES = Controls(
    kind="choices",
    choices=(
        Choice(action=0, label="left", keys=("ArrowLeft", "a")),
        Choice(action=1, label="right", keys=("ArrowRight", "d")),
        Choice(action=2, label="wait"),
    ),
)
AXES = Controls(
    kind="axes",
    axes=(
        Axis(label="steer", low=-1.0, high=1.0, idle=0.0, negative_keys=("ArrowLeft",), positive_keys=("ArrowRight",)),
        Axis(label="gas", low=0.0, high=5.0, idle=0.0, positive_keys=("ArrowUp",)),
    ),
    idle=[0.0, 0.0],
)
KEYS = ("ArrowLeft", "a", "A", "ArrowRight", "d", "ArrowUp", "x")


def _state(controls=CHOICES, *, turn_based=False, mode="human"):
    environment = EnvironmentDescription(
        env_id="CartPole-v1", kind="gymnasium", controls=controls, turn_based=turn_based, fps=30.0
    )
    return PlayState(environment=environment, mode=mode, control="human")


def _person(controls=CHOICES, **options):
    state = _state(controls, **options)
    return PersonInput(lambda: state)


def _actions(*acts):
    return [None if act is None else act.action for act in acts]


# ---------------------------------------------------------------------- keys that choose an action


def test_the_last_key_that_is_held_acts_and_releasing_it_returns_to_the_one_before():
    person = _person()

    acts = [person.press("ArrowLeft"), person.press("d"), person.release("d"), person.release("ArrowLeft")]

    assert acts == [Act(0, 1), Act(1, 2), Act(0, 3), Act(None, 4)]


def test_a_key_that_repeats_or_means_nothing_is_not_sent():
    person = _person()
    person.press("a")

    assert (person.press("a"), person.press("x"), person.release("x")) == (None, None, None)
    assert person.pressed_keys == ("a",)


def test_a_letter_that_is_released_while_shift_is_held_is_released():
    person = _person()
    person.press("a")

    assert _actions(person.release("A")) == [None]
    assert person.pressed_keys == ()


def test_losing_the_focus_releases_everything_once():
    person = _person()
    person.press("a")
    person.press("d")

    assert (person.release_all(), person.release_all()) == (Act(None, 3), None)
    assert person.pressed_keys == ()
    assert person.release("a") is None


def test_nothing_is_sent_without_a_play_or_while_the_agent_acts():
    nobody = PersonInput(lambda: None)
    assert (nobody.press("a"), nobody.choose(0, held=True), nobody.set_axis(0, 1.0), nobody.click(1, 1)) == (None,) * 4
    agent = _person(mode="agent")

    assert (agent.press("a"), agent.choose(0, held=True), agent.release_all()) == (None, None, None)


def test_a_key_that_was_held_when_the_agent_took_over_is_released_without_an_action():
    state = _state()
    person = PersonInput(lambda: state)
    person.press("a")
    person.press("d")
    state = replace(state, mode="agent")

    assert person.release("d") is None
    assert person.release_all() is None
    assert person.pressed_keys == ()


def test_a_key_of_an_earlier_environment_releases_the_controls_of_the_next():
    state = _state()
    person = PersonInput(lambda: state)
    person.press("a")
    person.press("d")
    state = _state(Controls(kind="choices", choices=(Choice(action=7, label="x", keys=("x",)),)))

    assert _actions(person.release("d")) == [None]


def test_where_each_press_is_a_move_a_release_sends_nothing():
    person = _person(turn_based=True)

    assert _actions(person.press("a"), person.release("a"), person.press("a")) == [0, None, 0]
    assert person.release_all() is None
    assert _actions(person.choose(1, held=True), person.choose(1, held=False)) == [1, None]


def test_a_button_acts_while_it_is_held_and_then_the_keys_act_again():
    person = _person()
    person.press("a")

    assert _actions(person.choose(2, held=True), person.choose(2, held=False)) == [2, 0]
    person.release("a")
    assert person.choose(1, held=False).action is None
    assert (person.choose(3, held=True), person.choose(-1, held=True)) == (None, None)


# ---------------------------------------------------------------------- keys and sliders that move numbers


def test_keys_move_an_axis_to_its_end_and_opposite_keys_cancel():
    person = _person(AXES)

    acts = [
        person.press("ArrowLeft"),
        person.press("ArrowUp"),
        person.press("ArrowRight"),
        person.release("ArrowLeft"),
        person.release("ArrowRight"),
        person.release("ArrowUp"),
    ]

    assert _actions(*acts) == [[-1, 0], [-1, 5], [0, 5], [1, 5], [0, 5], None]


def test_a_slider_holds_its_value_until_it_is_released():
    person = _person(AXES)
    assert _actions(person.set_axis(0, 0.25), person.press("ArrowUp")) == [[0.25, 0], [0.25, 5]]
    assert _actions(person.set_axis(0, None), person.release("ArrowUp")) == [[0, 5], None]
    person.set_axis(1, 3.0)

    assert (person.release_all().action, person.set_axis(2, 1.0)) == (None, None)


def test_where_each_action_is_a_move_a_slider_moves_once_when_it_is_released():
    person = _person(AXES, turn_based=True)

    acts = [person.set_axis(0, 0.1), person.set_axis(0, 0.2), person.set_axis(0, None), person.set_axis(0, None)]

    assert _actions(*acts) == [None, None, [0.2, 0], None]


def test_the_action_has_the_shape_of_the_space():
    axis = Axis(label="x", low=-1.0, high=1.0, idle=0.0, positive_keys=("d",))
    square = Controls(kind="axes", axes=(axis,) * 4, idle=[[0.0, 0.0], [0.0, 0.0]])
    assert _person(square).press("d").action == [[1, 1], [1, 1]]
    flat = replace(square, idle=None)

    assert _person(flat).press("d").action == [1, 1, 1, 1]


# ---------------------------------------------------------------------- screens


def test_clicks_keys_and_wheels_on_a_screen_are_actions_of_a_session():
    person = _person(Controls(kind="screen"), turn_based=True)
    acts = [
        person.click(3, 4, button="right", times=2),
        person.drag((1, 2), (5, 6)),
        person.scroll(3, 4, 0, -120),
        person.type_key("ä"),
        person.type_key(" "),
        person.type_key("Enter"),
        person.type_key("c", ("Control",)),
        person.type_key("Delete", ("Control", "Alt")),
    ]

    decoded = [decode(decode_control(encode_control(act)).action) for act in acts]

    assert [type(action).__name__ for action in decoded] == [
        "Click", "Drag", "Scroll", "TypeText", "TypeText", "PressKeys", "PressKeys", "PressKeys"
    ]  # fmt: skip
    assert (decoded[0].button, decoded[0].times, decoded[0].at) == ("right", 2, (3, 4))
    assert [decoded[6].keys, decoded[7].keys] == [("Control", "c"), ("Control", "Alt", "Delete")]
    assert [act.input for act in acts] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_does_nothing_on_a_screen_is_not_sent():
    person = _person(Controls(kind="screen"))

    assert (person.scroll(1, 1, 0, 0), person.type_key("Shift", ("Control",)), person.type_key("F13")) == (None,) * 3
    assert (_person().click(1, 1), _person().type_key("a"), _person(Controls(kind="none")).press("a")) == (None,) * 3


# ---------------------------------------------------------------------- any sequence


class Keyboard(RuleBasedStateMachine):
    """Presses and releases in any order, with the focus and the mode changing between them."""

    @initialize(controls=st.sampled_from([CHOICES, AXES]), turn_based=st.booleans())
    def start(self, controls, turn_based):
        self.state = _state(controls, turn_based=turn_based)
        self.person = PersonInput(lambda: self.state)
        self.held = {}
        self.last_input = 0

    def _accept(self, act):
        if act is not None:
            assert act.input == self.last_input + 1
            assert self.state.mode != "agent"
            self.last_input = act.input

    @rule(key=st.sampled_from(KEYS))
    def press(self, key):
        act = self.person.press(key)
        if act is not None:
            self.held[key.lower()] = True
            if self.state.environment.controls is CHOICES:
                assert act.action == next(one.action for one in CHOICES.choices if key.lower() in _lower(one.keys))
        self._accept(act)

    @rule(key=st.sampled_from(KEYS))
    def release(self, key):
        was_held = key.lower() in self.held
        self.held.pop(key.lower(), None)
        act = self.person.release(key)
        assert was_held or act is None
        if act is not None and self.state.environment.controls is CHOICES:
            newest = list(self.held)[-1] if self.held else None
            expected = None if newest is None else next(o.action for o in CHOICES.choices if newest in _lower(o.keys))
            assert act.action == expected
        self._accept(act)

    @rule()
    def lose_focus(self):
        self.held.clear()
        self._accept(self.person.release_all())

    @rule(mode=st.sampled_from(["human", "hybrid", "agent"]))
    def change_mode(self, mode):
        self.state = replace(self.state, mode=mode)

    @rule(index=st.integers(0, 2), value=st.none() | st.floats(-1, 1))
    def slide(self, index, value):
        self._accept(self.person.set_axis(index, value))

    @invariant()
    def exactly_the_held_keys_are_pressed(self):
        assert [key.lower() for key in self.person.pressed_keys] == list(self.held)


def _lower(keys):
    return [key.lower() for key in keys]


test_a_keyboard_leaves_no_key_pressed_and_the_last_held_key_acts = Keyboard.TestCase


@given(keys=st.lists(st.sampled_from(KEYS)))
def test_after_all_keys_are_released_none_is_pressed_and_the_controls_are_free(keys):
    person = _person()
    acts = [person.press(key) for key in keys]
    acts += [person.release(key) for key in keys]
    sent = [act for act in acts if act is not None]

    assert person.pressed_keys == ()
    assert not sent or sent[-1].action is None


# ---------------------------------------------------------------------- the play


@pytest.fixture
def play():
    play = PlayModel()
    play.begin_start()
    play.begin("play-1")
    return play


def _step(number, episode=1, **fields):
    return StepReport(episode=episode, step=number, **fields)


def test_a_play_is_open_from_its_start_to_its_end():
    play = PlayModel()
    assert (play.is_open, play.is_starting, play.last_step) == (False, False, None)
    play.begin_start()
    assert (play.is_open, play.is_starting) == (False, True)
    play.begin("play-1")
    assert (play.is_open, play.is_starting) == (True, False)

    play.receive("play-1", PlayEnded(reason="stopped"))

    assert (play.is_open, play.ended) == (False, PlayEnded(reason="stopped"))


def test_a_play_that_cannot_be_started_says_why_until_the_next_attempt():
    play = PlayModel()
    play.begin_start()
    play.fail("Box2D is missing.", "Install it.")
    assert (play.is_starting, play.problem, play.remedy) == (False, "Box2D is missing.", "Install it.")

    play.begin_start()

    assert (play.problem, play.remedy) == ("", "")


def test_steps_and_episodes_are_collected(play):
    for report in (_step(0), _step(1, reward=1.0), _step(2, episode_return=2.0, terminated=True, success=True)):
        play.receive("play-1", report)
    play.receive("play-1", _step(0, episode=2))
    play.receive("play-1", _step(1, episode=2, truncated=True))

    assert [(step.episode, step.step) for step in play.steps] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert list(play.episodes) == [FinishedEpisode(1, 2, 2.0, True, True), FinishedEpisode(2, 1, 0.0, False, None)]
    assert play.last_step == _step(1, episode=2, truncated=True)


def test_a_new_connection_that_repeats_the_newest_step_does_not_double_it(play):
    for _ in range(2):
        play.receive("play-1", _state())
        play.receive("play-1", _step(5, terminated=True))

    assert (len(play.steps), len(play.episodes)) == (1, 1)


def test_memory_is_bounded(play):
    for episode in range(300):
        for step in range(10):
            play.receive("play-1", _step(step, episode, terminated=step == 9))

    assert (len(play.steps), len(play.episodes), play.last_step.episode) == (2000, 200, 299)


def test_messages_of_another_play_are_ignored(play):
    before = play.revision
    play.receive("play-0", _step(1))

    assert (len(play.steps), play.revision) == (0, before)


def test_the_person_acts_in_the_state_that_the_play_reported_and_its_end_releases_the_keys(play):
    assert play.input.press("a") is None
    play.receive("play-1", _state())
    assert play.input.press("a").action == 0

    play.receive("play-1", PlayEnded(reason="the worker was killed", failed=True))

    assert play.input.pressed_keys == ()


def test_each_notice_is_taken_once(play):
    notice = PlayNotice(level="warning", text="slow")
    play.receive("play-1", notice)

    assert (play.take_notices(), play.take_notices()) == ([notice], [])


def test_a_new_play_begins_without_the_old_steps(play):
    play.receive("play-1", _state())
    play.receive("play-1", _step(1, terminated=True))
    play.input.press("a")

    play.begin_start()

    assert (len(play.steps), len(play.episodes), play.state, play.play_id) == (0, 0, None, "")
    assert play.input.pressed_keys == ()
