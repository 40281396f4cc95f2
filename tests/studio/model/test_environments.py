from dataclasses import replace

import pytest

from palaestra.runs.catalogue import DatasetInfo, EnvironmentInfo
from palaestra.studio.model.environments import DEFAULT, DatasetsModel, EnvironmentsModel

SCHEMA = {"properties": {"size": {"type": "integer", "default": 4}, "slippery": {"type": "boolean", "default": True}}}


def _info(env_id, group="Classic control", **fields):
    return EnvironmentInfo(env_id=env_id, group=group, **fields)


@pytest.fixture
def model():
    model = EnvironmentsModel()
    model.set_catalogue(
        [
            _info("Zoo-v0", "A group", installed=False),
            _info("miniwob/click-test", "Screen tasks", kind="screen"),
            _info("Acrobot-v1"),
            _info("Taxi-v4", "Toy text"),
            _info("CartPole-v1"),
            _info("LunarLander-v3", "Box2D", installed=False),
        ]
    )
    return model


def test_favourites_come_first_then_what_is_installed_by_group(model):
    assert [one.env_id for one in model.all] == [
        "CartPole-v1", "LunarLander-v3", "Taxi-v4", "Acrobot-v1", "miniwob/click-test", "Zoo-v0"
    ]  # fmt: skip


def test_the_choice_knows_whether_it_is_a_screen_task_and_may_be_unknown_to_the_catalogue(model):
    assert (model.chosen, model.info.env_id, model.is_screen) == (DEFAULT, "CartPole-v1", False)
    assert model.choose("miniwob/click-test")
    assert model.is_screen

    assert model.choose(" my.module:Env ")

    assert (model.chosen, model.info, model.is_screen) == ("my.module:Env", None, False)


def test_nothing_or_the_same_environment_is_no_choice(model):
    before = model.revision

    assert not model.choose("  ")
    assert not model.choose("CartPole-v1")
    assert model.revision == before


def test_another_environment_begins_with_an_empty_form(model):
    model.set_schema("CartPole-v1", SCHEMA)
    model.edit("size", "5")
    model.choose("Taxi-v4")
    assert model.form.fields == {}
    model.set_schema("CartPole-v1", SCHEMA)
    assert model.form.fields == {}

    model.set_schema("Taxi-v4", SCHEMA)

    assert model.form.changes() == {}


def test_parameters_of_a_recording_are_entered_when_the_form_arrives(model):
    assert model.choose("Taxi-v4", {"size": 8})
    model.set_schema("Taxi-v4", SCHEMA)

    assert model.form.changes() == {"size": 8}


def test_the_form_that_arrives_again_after_a_lost_connection_keeps_what_the_user_has_entered(model):
    model.choose("Taxi-v4", {"size": 8})
    model.set_schema("Taxi-v4", SCHEMA)
    model.edit("size", "9")

    model.set_schema("Taxi-v4", SCHEMA)

    assert model.form.changes() == {"size": 9}


def test_parameters_for_the_chosen_environment_are_entered_at_once(model):
    model.set_schema("CartPole-v1", SCHEMA)

    assert not model.choose("CartPole-v1", {"slippery": False})
    assert model.form.changes() == {"slippery": False}
    assert not model.choose("CartPole-v1", {})
    assert model.form.changes() == {}


def test_a_failure_is_shown_for_its_environment_until_the_form_arrives(model):
    model.fail("Taxi-v4", "late")
    assert model.problem == ""
    model.fail("CartPole-v1", "The service does not answer.")
    assert model.problem == "The service does not answer."

    model.set_schema("CartPole-v1", SCHEMA)

    assert model.problem == ""


@pytest.mark.parametrize(("seed", "kept"), [(-5, 0), (7, 7), (2**40, 2**31 - 1)])
def test_a_seed_is_one_that_a_play_accepts(model, seed, kept):
    model.set_seed(seed)

    assert model.seed == kept


def test_a_search_prefers_what_begins_with_the_text_then_what_is_installed(model):
    assert [one.env_id for one in model.search("")] == [one.env_id for one in model.all]
    assert [one.env_id for one in model.search("", limit=1)] == ["CartPole-v1"]
    assert model.search("lunar")[0].env_id == "LunarLander-v3"
    assert model.search("screen")[0].env_id == "miniwob/click-test"
    assert [one.env_id for one in model.search("zoo")] == ["Zoo-v0"]
    assert model.search("qqq") == []


def test_of_equal_matches_the_installed_one_comes_first():
    model = EnvironmentsModel()
    model.set_catalogue([_info("Maze-v0", "A", installed=False), _info("Maze-v1", "B")])

    assert [one.env_id for one in model.search("maze")] == ["Maze-v1", "Maze-v0"]


def test_datasets_are_divided_by_environment_and_those_of_unknown_origin_fit_everywhere():
    model = DatasetsModel()
    infos = [
        DatasetInfo(dataset_id=f"d/{index}-v0", path="", state=state, env_id=env_id)
        for index, (env_id, state) in enumerate(
            [("A-v0", "verified"), ("B-v0", "unchecked"), ("", "damaged"), ("A-v0", "unverified")]
        )
    ]
    model.set_all(infos)
    fitting, others = model.for_environment("compiled/A-v0")
    assert (fitting, others) == ([infos[0], infos[2], infos[3]], [infos[1]])
    assert [bool(model.problem(one)) for one in infos] == [False, False, True, True]
    revision = model.revision
    model.set_all(infos)
    assert model.revision == revision


def test_a_verified_dataset_replaces_its_entry():
    model = DatasetsModel()
    before = DatasetInfo(dataset_id="d/v0", path="", state="unchecked")
    model.set_all([before])
    model.set_verifying("d/v0")
    model.update(replace(before, state="verified"))
    assert (model.get("d/v0").state, model.verifying_id, model.get("gone")) == ("verified", "", None)
