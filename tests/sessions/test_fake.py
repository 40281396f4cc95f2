"""The fake keeps every rule of the kit, and the kit notices when one is broken."""

import asyncio
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import Click, Point, Terminate, TypeText, Wait
from palaestra.sessions.conformance import check_session
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.session import EpisodeTracker
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec

PICTURE = Screenshot(b"", Size(10, 10))
SPEC = TaskSpec("fake", "button", 0, {}, "Click.", 3, Size(10, 10))


async def _fake():
    return FakeSession()


def test_the_fake_passes_the_kit():
    asyncio.run(check_session(_fake, "fake/button"))


def _broken(**methods):
    cls = type("Broken", (FakeSession,), methods)

    async def make():
        return cls()

    return make


async def _act_twice(self, action, *, step):
    if step <= 1 and self._episode is not None and self._episode.num_steps == 1:
        self._episode.num_steps = 0
    return await FakeSession.act(self, action, step=step)


async def _deaf_close(self):
    return None


async def _forgetful_reset(self, request):
    typed, clicked = self._typed, self._clicked
    spec = await FakeSession.reset(self, request)
    self._typed, self._clicked = typed, clicked
    return spec


async def _one_screen(self, request):
    return await FakeSession.reset(self, TaskRequest(request.task, 3, request.params))


async def _only_the_verifier(self):
    return self._judge()


@pytest.mark.parametrize(
    ("methods", "rule"),
    [
        ({"act": _act_twice}, "return the stored result|expected a refusal"),
        ({"close": _deaf_close}, "expected a refusal no_session"),
        ({"reset": _forgetful_reset}, "restore the screen|new episode|refusal"),
        ({"reset": _one_screen}, "the spec says seed"),
        ({"progress": _only_the_verifier}, "an episode that ended must stay over"),
    ],
)
def test_the_kit_notices_a_broken_rule(methods, rule):
    with pytest.raises((AssertionError, SessionRefused), match=rule):
        asyncio.run(check_session(_broken(**methods), "fake/button"))


def test_clicking_the_square_solves_it_and_missing_it_ends_it():
    async def play(at):
        session = FakeSession()
        await session.reset(TaskRequest("fake/button", 1))  # the square's corner is at (37, 53)
        return await session.act(Click(at), step=1)

    hit, miss = asyncio.run(play(Point(37, 53))), asyncio.run(play(Point(36, 53)))
    assert (hit.progress.reward, hit.progress.done, hit.progress.success) == (1.0, True, True)
    assert (miss.progress.reward, miss.progress.done, miss.progress.success) == (0.0, True, False)
    assert hit.screenshot.sha256 != miss.screenshot.sha256


def test_at_the_step_limit_its_progress_equals_that_of_the_last_act():
    async def play():
        session = FakeSession()
        await session.reset(TaskRequest("fake/button", 3, {"step_limit": 1}))
        last = await session.act(Wait(0.01), step=1)
        return last.progress, await session.progress()

    last, later = asyncio.run(play())
    assert later == last == TaskProgress(0.0, True, False, truncated=True, detail={"typed": ""})


def test_a_failure_is_a_failure_from_then_on_and_never_a_reward():
    async def play():
        session = FakeSession()
        await session.reset(TaskRequest("fake/button", 1, {"fail_at": 1}))
        for attempt in (session.act(Wait(1), step=1), session.progress(), session.screenshot()):
            with pytest.raises(SessionFailed, match="page_crashed"):
                await attempt
        await session.reset(TaskRequest("fake/button", 1))
        return await session.progress()

    assert asyncio.run(play()).reward == 0.0


def test_its_picture_is_a_png_that_says_its_size():
    async def look():
        session = FakeSession()
        await session.reset(TaskRequest("fake/button"))
        return await session.screenshot()

    picture = asyncio.run(look())
    assert Screenshot.of(picture.data) == picture
    body = picture.data[picture.data.index(b"IDAT") + 4 :]
    assert len(zlib.decompressobj().decompress(body)) == 210 * (1 + 160 * 3)


def test_a_jpeg_says_its_size_too():
    frame = (
        b"\xff\xd8\xff\xe0" + struct.pack(">H", 4) + b"ab\xff\xc0" + struct.pack(">HBHHB", 11, 8, 48, 64, 1) + b"\0" * 8
    )
    assert Screenshot.of(frame).size == Size(64, 48)


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\xff\xd8", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_a_failed_environment(data):
    with pytest.raises(SessionFailed, match="bad_screenshot"):
        Screenshot.of(data)


@given(st.lists(st.tuples(st.integers(-1, 4), st.sampled_from("ab")), max_size=20))
def test_no_step_is_ever_performed_twice(asked):
    episode = EpisodeTracker(SPEC)
    performed: list[tuple[int, str]] = []
    results = []
    for step, text in asked:
        action = TypeText(text)
        try:
            repeated = episode.find_repeated(action, step)
        except SessionRefused:
            continue
        if repeated is not None:
            assert performed[-1] == (step, text)
            assert repeated is results[-1]
            continue
        episode.begin(action)
        performed.append((step, text))
        results.append(episode.finish(PICTURE, TaskProgress(0.0, step >= 3, False)))
    assert [step for step, _ in performed] == list(range(1, len(performed) + 1))
    assert len(performed) <= 3


def test_a_step_that_was_not_completed_is_not_performed_again():
    episode = EpisodeTracker(SPEC)
    episode.begin(TypeText("a"))
    with pytest.raises(SessionFailed, match="interrupted"):
        episode.find_repeated(TypeText("a"), 1)


def _judged(progress, action, steps):
    episode = EpisodeTracker(SPEC)
    for _ in range(steps):
        episode.begin(action)
    return episode.finish(PICTURE, progress).progress


def test_an_episode_ends_with_the_agent_s_word_or_at_the_limit():
    running = TaskProgress(0.25, False, False)
    assert _judged(running, Wait(1), 2) == running
    assert _judged(running, Wait(1), 3) == TaskProgress(0.25, True, False, truncated=True)
    assert _judged(running, Terminate(True), 1) == TaskProgress(0.25, True, False)  # its word is not a success
    solved = TaskProgress(1.0, True, True)
    assert _judged(solved, Wait(1), 3) == solved


def test_documents_of_another_schema_are_refused():
    facts = TaskProgress(1.0, True, True, detail={"rows": [3]}).facts()
    assert TaskProgress.from_facts(facts) == TaskProgress(1.0, True, True, detail={"rows": [3]})
    with pytest.raises(SessionRefused, match="schema = 2: this version understands 1"):
        TaskProgress.from_facts(facts | {"schema": 2})
    assert TaskSpec.from_facts(SPEC.facts()) == SPEC


@pytest.mark.parametrize("seed", [-1, 1.5, "3", True, 2**53])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(SessionRefused, match="must be a whole number from 0"):
        TaskRequest("fake/button", seed)


@pytest.mark.parametrize("task", ["button", "/x", "x/", "", 7])
def test_a_task_without_suite_or_name_is_refused(task):
    with pytest.raises(SessionRefused, match="suite/name"):
        TaskRequest(task)


def test_a_declared_reward_range_survives_the_wire_and_an_undeclared_one_stays_so():
    spec = TaskSpec("fake", "button", 0, {}, "Click.", 3, Size(10, 10), (-1.0, 2.5))
    assert TaskSpec.from_facts(spec.facts()) == spec
    assert TaskSpec.from_facts(SPEC.facts()).reward_range is None


@pytest.mark.parametrize("declared", [[1, 0], [0, 0], [0], "high", [0, float("nan")], 3])
def test_a_reward_range_that_is_none_is_not_understood(declared):
    with pytest.raises((ValueError, TypeError)):
        TaskSpec.from_facts({**SPEC.facts(), "reward_range": declared})
