import pytest

from palaestra.runs.checkpoints.deploy import Deployment
from palaestra.runs.phase import Phase
from palaestra.runs.play.state import PolicyStatus
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.runner import RunnerCapabilities
from palaestra.studio.model.checkpoints import CheckpointsModel, find_mismatch

RUNNERS = {
    "palaestra": RunnerCapabilities(title="Ours", offline_inference=True),
    "cleanrl": RunnerCapabilities(title="CleanRL"),
}


def _checkpoint(checkpoint_id, created=0.0, **fields):
    known = {
        "run_id": "r1",
        "agent_id": "palaestra/ppo",
        "env_id": "CartPole-v1",
        "attempt": 1,
        "env_step": 1000,
        "path": f"/runs/{checkpoint_id}",
        "sha256": checkpoint_id * 4,
        "size_bytes": 10,
        "format": "palaestra",
    }
    return CheckpointRecord(checkpoint_id=checkpoint_id, created=created, **{**known, **fields})


def _run(run_id, phase):
    return RunRecord(run_id=run_id, runner="palaestra", agent_id="palaestra/ppo", env_id="CartPole-v1", phase=phase)


def _model(*records, deployments=()):
    model = CheckpointsModel()
    model.set_all(records, deployments)
    return model


def _groups(model, env_id="CartPole-v1", runs=()):
    return model.groups(env_id, RUNNERS, {run.run_id: run for run in runs})


def _ids(groups):
    return [[card.record.checkpoint_id for card in group.cards] for group in groups]


def test_cards_are_grouped_by_environment_and_agent_with_the_chosen_environment_first_and_the_newest_on_top():
    model = _model(
        _checkpoint("a", 1.0, env_id="Acrobot-v1"),
        _checkpoint("b", 2.0),
        _checkpoint("c", 3.0),
        _checkpoint("d", 9.0, agent_id="palaestra/dqn"),
        _checkpoint("e", 4.0, env_id="Taxi-v4"),
    )

    groups = _groups(model)

    assert _ids(groups) == [["d"], ["c", "b"], ["a"], ["e"]]
    assert [(group.env_id, group.agent_id) for group in groups[:2]] == [
        ("CartPole-v1", "palaestra/dqn"),
        ("CartPole-v1", "palaestra/ppo"),
    ]
    assert _ids(_groups(model, "Taxi-v4"))[0] == ["e"]


def test_a_card_knows_its_integrity_its_deployment_and_whether_it_can_act():
    deployment = Deployment(
        env_id="CartPole-v1",
        checkpoint_id="b",
        path="/x",
        sha256="bbbb",
        agent_id="palaestra/ppo",
        deployed=1.0,
        command=(),
    )
    model = _model(
        _checkpoint("a", 3.0, verified=5.0),
        _checkpoint("b", 2.0, verified=-5.0),
        _checkpoint("c", 1.0),
        _checkpoint("d", agent_id="cleanrl/dqn"),
        _checkpoint("e", agent_id="unknown/dqn", env_id=""),
        deployments=[deployment],
    )

    cards = {card.record.checkpoint_id: card for group in _groups(model) for card in group.cards}

    assert {key: card.integrity for key, card in cards.items() if key in "abc"} == {
        "a": "verified",
        "b": "damaged",
        "c": "unchecked",
    }
    assert {key for key, card in cards.items() if card.is_deployed} == {"b"}
    assert {key for key, card in cards.items() if not card.can_play} == {"d"}
    assert [card.mismatch for card in cards.values()] == [""] * 5


def test_the_newest_checkpoint_of_a_run_that_succeeded_is_marked_in_its_group():
    model = _model(
        _checkpoint("new", 3.0, run_id="failed"),
        _checkpoint("mid", 2.0, run_id="good"),
        _checkpoint("old", 1.0, run_id="good"),
        _checkpoint("imported", 9.0, run_id="", agent_id="x"),
    )
    runs = (_run("failed", Phase.FAILED), _run("good", Phase.SUCCEEDED))

    marked = {
        card.record.checkpoint_id
        for group in _groups(model, runs=runs)
        for card in group.cards
        if card.is_newest_success
    }

    assert marked == {"mid"}


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({}, "ppo · 1,000 steps"),
        ({"env_step": None}, "ppo"),
        ({"env_step": 11_992, "step_source": "log"}, "ppo · 11,992+ steps"),
        ({"agent_id": "custom"}, "custom · 1,000 steps"),
        ({"agent_id": "", "env_step": None}, "palaestra"),
    ],
)
def test_a_card_is_named_by_its_algorithm_and_its_steps(fields, title):
    assert _groups(_model(_checkpoint("a", **fields)))[0].cards[0].title == title


@pytest.mark.parametrize(
    ("trained", "chosen", "fits"),
    [
        ("CartPole-v1", "CartPole-v1", True),
        ("compiled/CartPole-v1", "CartPole-v1", True),
        ("", "CartPole-v1", True),
        ("CartPole-v1", "CartPole-v0", False),
        ("miniwob/click-test", "data_entry/form", True),
        ("miniwob/click-test", "CartPole-v1", False),
        ("ALE/Pong-v5", "ALE/Pong-v5", True),
        ("ALE/Pong-v5", "ALE/Breakout-v5", False),
        ("ALE/Pong-v5", "miniwob/click-test", False),
        ("palaestra/Bandit-v0", "palaestra/Maze-v0", False),
        ("my.module:Env", "my/other:Env", False),
    ],
)
def test_a_policy_acts_where_it_was_trained_and_a_model_of_screens_on_any_screen(trained, chosen, fits):
    mismatch = find_mismatch(trained, chosen)

    assert mismatch == ("" if fits else f"It was trained in {trained}, and {chosen} is chosen.")


def test_a_search_keeps_the_cards_that_hold_every_word():
    model = _model(_checkpoint("aaa"), _checkpoint("bbb", env_id="Taxi-v4", run_id="night"))
    model.set_search("TAXI night")

    assert _ids(_groups(model)) == [["bbb"]]
    assert (len(model), model.is_loaded) == (2, True)


def test_a_verified_or_imported_checkpoint_replaces_the_one_of_its_path():
    model = _model(_checkpoint("a"), _checkpoint("b"))
    model.update(_checkpoint("a", verified=1.0))
    model.update(_checkpoint("c"))

    assert len(model) == 3
    assert model.get("a").verified == 1.0
    assert model.get("zzz") is None


def test_a_warm_start_offers_the_checkpoints_of_the_same_runner_and_environment_newest_first():
    model = _model(
        _checkpoint("old", 1.0),
        _checkpoint("new", 2.0),
        _checkpoint("elsewhere", env_id="Taxi-v4"),
        _checkpoint("foreign", agent_id="cleanrl/dqn"),
    )

    assert [one.checkpoint_id for one in model.for_warm_start("palaestra", "CartPole-v1")] == ["new", "old"]


def test_only_a_change_counts_as_one():
    model = _model(_checkpoint("a"))
    status = PolicyStatus(state="loading", name="ppo", checkpoint="a")
    model.choose("a")
    model.set_search("x")
    model.set_policies(status, None)
    before = model.revision

    model.choose("a")
    model.set_search("x")
    model.set_policies(status, None)
    assert model.revision == before
    model.set_policies(None, None)
    model.set_curve("r1", (1.0, 2.0))

    assert (model.chosen, model.activating, model.curves, model.revision) == ("a", None, {"r1": [1.0, 2.0]}, before + 2)


def test_a_policy_that_acted_and_failed_has_stopped_and_one_that_failed_beside_another_has_not():
    model = _model(_checkpoint("a"))
    acting = PolicyStatus(state="ready", name="ppo", checkpoint="a")
    model.set_policies(None, acting)
    model.set_policies(PolicyStatus(state="failed", name="dqn", checkpoint="b"), acting)
    assert not model.has_stopped
    model.set_policies(PolicyStatus(state="failed", name="ppo", checkpoint="a"), None)
    assert model.has_stopped
    model.set_policies(PolicyStatus(state="failed", name="dqn", checkpoint="b"), None)
    assert not model.has_stopped
