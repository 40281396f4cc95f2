"""One episode, one session, one trajectory; every ending has its own name."""

import asyncio
import hashlib

import pytest

from palaestra.actor.agent import ScriptedAgent
from palaestra.actor.task_runner import ActorConfig, EpisodeRequest, TaskRunner
from palaestra.errors import SessionFailed, SessionRefused
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.sessions.action import Click, Point, Terminate, TypeText, Wait
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.task import TaskRequest

SQUARE = Point(10 * 37 % 120 + 5, 10 * 53 % 170 + 5)  # inside the square of fake/button at seed 10


class Opening:
    """Opens sessions and knows whether they were closed."""

    def __init__(self, *broken):
        self.broken = list(broken)
        self.opened = []

    async def __call__(self):
        session = FakeSession()
        self.opened.append(session)
        if self.broken:
            failure = self.broken.pop(0)

            async def fail(*args, **more):
                raise failure

            session.reset = fail
        return session

    @property
    def all_closed(self):
        return all(session._closed for session in self.opened)


def script(*said):
    async def play(spec, screen, count):
        return said[min(count, len(said) - 1)]

    return ScriptedAgent(play)


def played(agent, *, params=None, opening=None, task="fake/button", failed=None, **config):
    runner = TaskRunner(
        opening or Opening(), agent, ActorConfig(**config), on_failed_attempt=failed or (lambda made: None)
    )
    request = EpisodeRequest("e1", TaskRequest(task, 10, params or {}), seed=1, group="g1")
    return asyncio.run(runner.run_episode(request))


def test_a_click_on_the_square_succeeds_and_earns_1():
    made = played(script(Click(SQUARE)))
    assert (made.outcome, made.total_reward(), len(made), made.group) == (Outcome.SUCCESS, 1.0, 1, "g1")
    assert made.task["instruction"] == "Click the square."
    assert made.turns[0].action == {
        "kind": "click", "at": list(SQUARE), "button": "left", "times": 1, "held": [],
    }  # fmt: skip


def test_every_picture_is_kept_once_under_its_hash():
    made = played(script(Wait(0.1), Wait(0.1), Click(SQUARE)))
    assert len(made.pictures) == 2  # the same screen three times, and the one after the click
    assert all(hashlib.sha256(data).hexdigest() == sha for sha, data in made.pictures.items())
    assert made.turns[0].pictures == made.turns[1].pictures
    assert made.last_picture in made.pictures
    assert made.last_picture != made.turns[0].pictures[0]


def test_a_click_beside_the_square_fails_and_earns_nothing():
    made = played(script(Click(Point(0, 0))))
    assert (made.outcome, made.total_reward()) == (Outcome.FAILURE, 0.0)


def test_giving_up_is_a_failure():
    assert played(script(Terminate(success=False))).outcome is Outcome.FAILURE


def test_the_tasks_own_limit_and_ours_both_truncate():
    assert played(script(Wait(0.1)), params={"step_limit": 2}).reason == "the task's step limit"
    made = played(script(Wait(0.1)), max_steps_per_episode=3)
    assert (made.outcome, made.reason, len(made)) == (Outcome.TRUNCATED, "3 replies", 3)


def test_three_unreadable_replies_in_a_row_end_the_episode_and_are_recorded_as_paid_nothing():
    made = played(script("gibberish"))
    assert (made.outcome, len(made)) == (Outcome.UNREADABLE, 3)
    assert made.total_reward() == 0.0
    assert made.turns[0].action is None
    assert made.turns[0].unreadable == "unreadable by script"


def test_a_readable_reply_between_them_starts_the_count_afresh():
    made = played(script("a", "b", Wait(0.1), "c", "d", Click(SQUARE)))
    assert (made.outcome, len(made)) == (Outcome.SUCCESS, 6)
    assert made.total_reward() == 1.0


def test_a_point_outside_the_screen_is_the_models_mistake_and_not_the_environments():
    made = played(script(Click(Point(500, 5))), max_unreadable=1)
    assert made.outcome is Outcome.UNREADABLE
    assert "lies outside the screen of 160 x 210" in made.turns[0].unreadable
    assert made.turns[0].action is None


def test_a_broken_session_is_tried_again_with_the_same_task_and_is_no_reward():
    lost, opening = [], Opening(SessionFailed("page_crashed", "one"), SessionFailed("page_crashed", "two"))
    made = played(script(Click(SQUARE)), opening=opening, failed=lost.append)
    assert (made.outcome, made.attempt, made.task["seed"]) == (Outcome.SUCCESS, 2, 10)
    assert [failed.outcome for failed in lost] == [Outcome.ENVIRONMENT_FAILED] * 2
    assert not any(failed.learnable for failed in lost)
    assert len(opening.opened) == 3
    assert opening.all_closed


def test_an_episode_whose_sessions_all_break_is_an_environment_failure():
    lost = []
    made = played(script(TypeText("x")), params={"fail_at": 1}, failed=lost.append, retries=2)
    assert made.outcome is Outcome.ENVIRONMENT_FAILED
    assert "page_crashed" in made.reason or "asked to at step 1" in made.reason
    assert (made.attempt, len(lost)) == (2, 2)
    assert made.total_reward() == 0.0
    assert not made.learnable


def test_a_session_whose_lease_ran_out_is_an_environment_failure():
    gone = SessionRefused("no_session", "session 1 is gone", status=404)
    made = played(script(Click(SQUARE)), opening=Opening(gone))
    assert (made.outcome, made.attempt) == (Outcome.SUCCESS, 1)


def test_a_task_that_does_not_exist_is_refused_at_once():
    opening = Opening()
    with pytest.raises(SessionRefused, match="the only task is fake/button"):
        played(script(Click(SQUARE)), task="fake/no-such", opening=opening)
    assert opening.all_closed


def test_the_session_is_closed_when_the_agent_itself_breaks():
    async def play(spec, screen, count):
        raise ZeroDivisionError

    opening = Opening()
    with pytest.raises(ZeroDivisionError):
        played(ScriptedAgent(play), opening=opening)
    assert opening.all_closed


def test_a_prompt_of_ones_own_comes_before_the_instruction():
    told = []

    async def play(spec, screen, count):
        told.append(spec.instruction)
        return Click(SQUARE)

    made = played(ScriptedAgent(play), task_prompt="Be quick.")
    assert told == ["Be quick.\nClick the square."]
    assert made.task["instruction"] == "Click the square."


def test_what_was_played_can_be_stored(tmp_path):
    made = played(script("a", Click(SQUARE)))
    made.save(tmp_path / "one")
    assert Trajectory.load(tmp_path / "one").turns[1].action == made.turns[1].action
