from hypothesis import given
from hypothesis import strategies as st

from palaestra.runs.trajectories import TrajectoryDocument, TrajectoryPicture, TrajectorySummary, TrajectoryTurn
from palaestra.studio.model.trajectories import TrajectoriesModel, screen_of


def _summary(file, *, task="miniwob/click-test", group="", outcome="success", seed=0):
    return TrajectorySummary(
        file=file,
        kind="training",
        evaluation="",
        attempt=1,
        episode_id=file,
        task=task,
        seed=seed,
        params={},
        instruction=f"Click on {file}",
        outcome=outcome,
        reason="",
        reward=1.0,
        steps=2,
        unreadable_turns=0,
        versions=(0, 0),
        group=group,
        session_attempt=0,
        started_at=0.0,
        seconds=1.0,
        size_bytes=10,
    )


def _turn(*hashes):
    return TrajectoryTurn(
        pictures=tuple(TrajectoryPicture(sha256, 1280, 800, 640, 400) for sha256 in hashes),
        prompt_ids=(),
        token_ids=(),
        log_probs=(),
        versions=(),
        text="click",
        action=None,
        point=None,
        unreadable="",
        reward=0.0,
        weights="",
    )


def _document(file, turns):
    return TrajectoryDocument(
        summary=_summary(file),
        turns=tuple(turns),
        screen=(1280, 800),
        step_limit=10,
        temperature=1.0,
        codec="json",
        session_id="s",
        last_picture="",
    )


def _model(*entries):
    model = TrajectoriesModel()
    model.open_run("r1")
    model.set_entries("r1", entries)
    return model


def _opened(num_turns=10, **options):
    model = _model(_summary("a"))
    model.open("a")
    model.set_document("a", _document("a", [_turn(f"s{number}") for number in range(num_turns)]), **options)
    return model


def test_another_run_begins_empty_and_late_lists_are_ignored():
    model = _model(_summary("a"))
    model.open("a")
    assert (model.is_loaded, len(model), model.open_run("r1")) == (True, 1, False)

    assert model.open_run("r2")
    model.set_entries("r1", [_summary("late")])

    assert (model.is_loaded, len(model), model.file, model.document, model.entry) == (False, 0, "", None, None)


def test_episodes_are_searched_by_task_outcome_instruction_and_seed():
    model = _model(_summary("a"), _summary("b", task="data_entry/form", outcome="failure", seed=77))
    model.set_search("FORM failure 77")
    before = model.revision
    model.set_search("FORM failure 77")

    assert [entry.file for entry in model.visible()] == ["b"]
    assert model.revision == before
    model.set_search("on click-test")
    assert [entry.file for entry in model.visible()] == ["a"]


def test_the_group_is_the_episodes_that_share_a_start_in_their_order():
    model = _model(_summary("c", group="g"), _summary("a", group="g"), _summary("b", group="h"), _summary("d"))
    assert model.group() == []
    model.open("c")
    assert [entry.file for entry in model.group()] == ["a", "c"]
    assert model.entry == _summary("c", group="g")

    model.open("d")

    assert model.group() == []


@given(events=st.lists(st.tuples(st.sampled_from(["seek", "document", "open"]), st.integers(-3, 12))))
def test_the_turn_stays_on_the_episode_in_any_sequence(events):
    model = _model(_summary("a"), _summary("b"))
    for kind, number in events:
        if kind == "seek":
            model.seek(number)
        elif kind == "document":
            model.set_document("a", _document("a", [_turn("x")] * max(0, number)))
        else:
            model.open("ab"[number % 2])

        assert 0 <= model.turn < max(1, len(model.turns))


def test_an_episode_that_is_opened_again_stays_where_it_is():
    model = _opened()
    model.seek(3)
    before = model.revision
    model.open("a")
    model.seek(3)

    assert (model.turn, model.revision) == (3, before)


def test_only_the_last_few_episodes_are_kept_in_memory():
    model = _opened()
    for number in range(20):
        model.set_document(f"x{number}", _document("x", []))
        model.set_document("a", model._documents["a"])

    assert (len(model._documents), len(model.turns)) == (8, 10)


# ---------------------------------------------------------------------- pictures


def _load_all(model):
    """Let every picture that is asked for arrive; how many were."""
    count = 0
    while pictures := model.pictures_to_load():
        for _, sha256 in pictures:
            model.set_picture(sha256, f"picture of {sha256}")
            count += 1
        assert count < 1000, "pictures are loaded for ever"
    return count


def test_the_screen_of_a_turn_is_the_last_one_of_its_prompt():
    assert (screen_of(_turn("old", "current")), screen_of(_turn())) == ("current", "")


def test_the_picture_of_the_turn_is_loaded_first_and_then_its_neighbours_each_once():
    model = _opened()
    model.seek(5)

    assert model.pictures_to_load() == [("a", "s5"), ("a", "s4"), ("a", "s6"), ("a", "s3")]
    assert model.pictures_to_load(limit=2) == [("a", "s7"), ("a", "s2")]
    assert model.picture("s5") is None
    model.set_picture("s5", "picture")
    assert model.picture("s5") == "picture"


def test_a_screen_that_several_turns_share_is_loaded_once_and_a_turn_without_one_not_at_all():
    model = _model(_summary("a"))
    assert model.pictures_to_load() == []
    model.open("a")
    model.set_document("a", _document("a", [_turn("same"), _turn(), _turn("same")]))

    assert model.pictures_to_load() == [("a", "same")]
    assert model.pictures_to_load() == []


def test_a_long_episode_loads_what_fits_and_then_rests_wherever_the_user_goes():
    model = _opened(500)
    assert _load_all(model) == 40
    for turn in (400, 380, 0, 499):
        model.seek(turn)
        assert _load_all(model) <= 80
        assert model.picture(f"s{turn}") == f"picture of s{turn}"
        assert len(model._pictures) == 40
