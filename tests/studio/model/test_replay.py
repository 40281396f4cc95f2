import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.runs.play.state import EpisodeRecord, EpisodeStep, StepReport
from palaestra.studio.model.replay import SPEEDS, EpisodesModel, ReplayModel


def _record(episode_id="e1", **fields):
    return EpisodeRecord(
        **{"episode_id": episode_id, "play_id": "p", "env_id": "CartPole-v1", "kind": "gymnasium", **fields}
    )


def _steps(count, without_picture=()):
    return [EpisodeStep(StepReport(episode=1, step=i), has_picture=i not in without_picture) for i in range(count)]


def _replay(count=10, *, without_picture=(), fps=10.0):
    replay = ReplayModel()
    replay.open(_record(fps=fps))
    replay.set_steps("e1", _steps(count, without_picture))
    return replay


# ---------------------------------------------------------------------- the list


def test_episodes_are_searched_by_any_of_their_words():
    episodes = EpisodesModel()
    assert (episodes.is_loaded, len(episodes)) == (False, 0)
    episodes.set_all([_record("b", policy="ppo, 12,000 steps"), _record("a", env_id="Taxi-v4", outcome="terminated")])
    assert [one.episode_id for one in episodes.visible()] == ["b", "a"]

    episodes.set_search("TAXI terminated")

    assert [one.episode_id for one in episodes.visible()] == ["a"]
    assert (len(episodes), episodes.is_loaded) == (2, True)


def test_a_deleted_episode_leaves_the_list_and_the_same_search_is_no_change():
    episodes = EpisodesModel()
    episodes.set_all([_record("a"), _record("b")])
    episodes.set_search("x")
    before = episodes.revision
    episodes.set_search("x")
    assert episodes.revision == before
    episodes.remove("a")
    episodes.set_search("")

    assert [one.episode_id for one in episodes.visible()] == ["b"]


# ---------------------------------------------------------------------- one episode


_EVENTS = st.one_of(
    st.tuples(st.just("seek"), st.integers(-20, 40)),
    st.tuples(st.just("advance"), st.floats(0, 1e6)),
    st.tuples(st.just("toggle"), st.none()),
    st.tuples(st.just("set_speed"), st.sampled_from(SPEEDS)),
    st.tuples(st.just("set_steps"), st.integers(0, 12)),
    st.tuples(st.just("fail"), st.just("broken")),
    st.tuples(st.just("open"), st.none()),
    st.tuples(st.just("close"), st.none()),
    st.tuples(st.just("set_picture"), st.integers(0, 40)),
)


@given(events=st.lists(_EVENTS))
def test_the_position_stays_on_the_episode_in_any_sequence(events):
    replay = _replay()
    for name, value in events:
        if name in ("toggle", "close"):
            getattr(replay, name)()
        elif name == "open":
            replay.open(_record())
        elif name == "set_steps":
            replay.set_steps("e1", _steps(value, without_picture=range(0, value, 2)))
        elif name == "set_picture":
            replay.set_picture("e1", value, value)
        else:
            getattr(replay, name)(value)
        count = len(replay.steps)

        assert 0 <= replay.position < max(1, count)
        assert (replay.step is None) == (count == 0)
        assert not replay.is_playing or count > 1
        assert all(0 <= position < count for position in replay.pictures_to_load())
        replay.picture()


def test_time_moves_the_replay_at_its_frame_rate_and_speed_until_the_end():
    replay = _replay(10, fps=10.0)
    replay.toggle()
    replay.advance(0.25)
    assert (replay.position, replay.step.report.step) == (2, 2)
    replay.advance(0.025)
    assert replay.position == 2
    replay.advance(0.025)
    assert replay.position == 3  # the parts of a step that were left over count
    replay.set_speed(4.0)
    replay.advance(0.1)
    assert replay.position == 7
    assert replay.is_playing

    replay.advance(10.0)

    assert (replay.position, replay.is_playing) == (9, False)


def test_a_paused_replay_stands_still_and_play_at_the_end_begins_again():
    replay = _replay(10)
    replay.advance(1.0)
    assert replay.position == 0
    replay.seek(9)
    replay.toggle()
    assert (replay.position, replay.is_playing) == (0, True)
    replay.toggle()
    replay.advance(1.0)

    assert (replay.position, replay.is_playing) == (0, False)


def test_an_episode_of_one_step_cannot_be_played():
    replay = _replay(1)
    replay.toggle()

    assert not replay.is_playing


def test_fewer_steps_than_before_move_the_position_to_the_last_of_them():
    replay = _replay(10)
    replay.seek(9)
    replay.set_steps("e1", _steps(4))

    assert (replay.position, replay.pictures_to_load()) == (3, [3])


def test_what_arrives_for_another_episode_is_ignored():
    replay = _replay(3)
    before = replay.revision
    replay.set_steps("e2", _steps(1))
    replay.set_picture("e2", 0, "picture")
    assert (len(replay.steps), replay.picture(), replay.revision) == (3, None, before)
    replay.close()
    replay.set_steps("e1", _steps(1))
    replay.set_picture("e1", 0, "picture")

    assert (replay.record, replay.steps, replay.picture()) == (None, (), None)


def test_an_episode_that_cannot_be_replayed_says_why():
    replay = ReplayModel()
    replay.open(_record(problem="The file is cut off."))
    assert replay.problem == "The file is cut off."
    replay = _replay(3)
    replay.toggle()
    replay.fail("A picture is missing.")

    assert (replay.problem, replay.is_playing) == ("A picture is missing.", False)


# ---------------------------------------------------------------------- pictures


def test_the_picture_of_the_step_is_loaded_first_then_those_ahead_each_once():
    replay = _replay(100)
    replay.seek(50)

    assert replay.pictures_to_load() == [50, 51, 52, 53]
    assert replay.pictures_to_load(limit=2) == [54, 55]
    replay.seek(98)
    assert replay.pictures_to_load() == [98, 99]
    assert replay.pictures_to_load() == []


def test_only_the_next_second_or_so_is_loaded_ahead():
    replay = _replay(100)
    loaded = [position for _ in range(20) for position in replay.pictures_to_load()]

    assert loaded == list(range(24))


def test_a_step_without_a_picture_shows_the_last_one_before_it():
    replay = _replay(10, without_picture=(3, 4, 5))
    replay.seek(5)
    assert replay.pictures_to_load() == [2, 6, 7, 8]
    assert replay.picture() is None
    replay.set_picture("e1", 2, "two")
    assert replay.picture() == "two"
    replay.seek(6)

    assert replay.picture() is None  # its own has not arrived


def test_an_episode_without_pictures_has_nothing_to_load():
    replay = _replay(5, without_picture=range(5))
    replay.seek(4)

    assert (replay.pictures_to_load(), replay.picture()) == ([], None)


def test_a_picture_ahead_is_no_reason_to_draw_and_one_that_may_be_shown_is():
    replay = _replay(10)
    replay.seek(3)
    before = replay.revision
    replay.set_picture("e1", 4, "ahead")
    assert replay.revision == before
    replay.set_picture("e1", 3, "shown")

    assert replay.revision == before + 1


def test_pictures_that_were_not_shown_for_long_are_dropped_and_loaded_again():
    replay = _replay(1000)
    replay.set_picture("e1", 0, "first")
    for position in range(1, 100):
        replay.set_picture("e1", position, position)
    assert replay.picture() == "first"  # shown now, so no longer the oldest
    replay.pictures_to_load()

    replay.set_picture("e1", 100, 100)

    assert replay.picture() == "first"
    replay.seek(1)
    assert replay.picture() is None
    assert 1 in replay.pictures_to_load()


@pytest.mark.parametrize("speed", SPEEDS)
def test_every_speed_is_a_change_that_is_drawn(speed):
    replay = _replay(3)
    before = replay.revision
    replay.set_speed(speed)

    assert (replay.speed, replay.revision) == (speed, before + 1)
