"""Demonstrations, supervised fine-tuning and what follows, with the built-in model and sessions without a browser."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.experience.demonstrated import OracleSession, record
from tests.policy.codecs.actions import FAMILIES, moved, places, scenes
from tests.train.test_screen_loop import gateway as gateway
from tests.train.test_screen_loop import learned, steps_of

from palaestra.actor.task_runner import EpisodeRequest
from palaestra.errors import CheckpointError, ConfigError, ExperienceError, SessionRefused
from palaestra.experience.demonstrations import Demonstrations
from palaestra.experience.trajectory import NOT_SAMPLED, Source
from palaestra.policy.codecs.decoding import DecodedAction
from palaestra.policy.codecs.grammar import CODECS, ReplyReader, build_grammar
from palaestra.sessions.action import Click, Drag, Point, TypeText
from palaestra.sessions.screen import Size
from palaestra.sessions.task import TaskRequest
from palaestra.sessions.task_sampler import HELD_OUT
from palaestra.train.demonstrations.record import draw_requests, record_oracles
from palaestra.train.demonstrations.transcription import transcribe_episode, write_action
from palaestra.train.held_out import build_policy, load_screen_policy
from palaestra.train.model_run import ModelRun
from palaestra.train.screen_config import screen_config_from
from palaestra.train.screens import train_screens
from palaestra.train.supervised import ImitationRun

MODEL = {"name": "tiny", "max_new_tokens": 24, "history": 1, "lora_rank": 4}


def config(path, updates=2, **more):
    trainer = {"batch_size": 4, "num_training_steps": updates, "learning_rate": 1e-3, **more.pop("trainer", {})}
    return screen_config_from(
        {
            "experiment_name": "t", "model": MODEL, "tasks": [{"task": "fake/button"}],
            "algorithm": {"name": "supervised"}, "demonstrations": {"path": str(path)}, "trainer": trainer,
            "actor_pool": {"target_concurrent_actors": 2}, "telemetry": {"progress": False}, **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return build_policy(config(tmp_path_factory.mktemp("none")))


@pytest.fixture(scope="module")
def demonstrations(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "d"
    summary = record(config(path), policy, path, 6)
    assert summary.to_json() == {"written": {"fake/button": 6}, "dropped": {}, "details": {}}
    return path


def test_a_recorded_turn_is_what_the_model_would_have_seen_and_sampled(policy, demonstrations):
    made = Demonstrations(demonstrations)
    assert {entry.success for entry in made.entries} == {True}
    assert all(entry.seed < HELD_OUT.start for entry in made.entries)
    assert len({entry.seed for entry in made.entries}) == 6
    one = made.load(made.entries[0])
    assert one.source is Source.DEMONSTRATION
    (turn,) = one.turns
    assert turn.versions.tolist() == [NOT_SAMPLED] * len(turn.token_ids)
    assert not turn.log_probs.any()
    assert turn.token_ids[-1] == policy.prompts.end_of_turn
    assert policy.text_of(turn.token_ids.tolist()) == turn.text
    (read,) = policy.read_replies(one)
    assert read.action == turn.action
    assert read.image_size == turn.image_sizes[-1]
    # The model scores it, and recording again continues with other seeds.
    again = record(config(demonstrations), policy, demonstrations, 2)
    assert again.written == {"fake/button": 2}
    assert len({entry.seed for entry in Demonstrations(demonstrations).entries}) == 8


def play(policy, path, session, steps=5):
    request = EpisodeRequest("e", TaskRequest("fake/button", 3, {}), 3)

    async def open_session():
        return session

    async def next_action(opened):
        return await opened.oracle_action()

    actor = config(path, actor={"max_steps_per_episode": steps}).actor
    return asyncio.run(transcribe_episode(policy, request, open_session, next_action, actor))


class Typist(OracleSession):
    """Types three words before it clicks."""

    async def oracle_action(self):
        words = len(self._typed)
        return TypeText("ab"[words % 2]) if words < 3 else await super().oracle_action()


def test_prompts_follow_the_history_rules_of_play(policy, tmp_path):
    one = play(policy, tmp_path, Typist())
    assert one.success
    assert [len(turn.pictures) for turn in one.turns] == [1, 2, 2, 2]  # model.history is 1
    first, second = one.turns[:2]
    joined = np.concatenate([first.prompt_ids, first.token_ids])
    assert np.array_equal(second.prompt_ids[: len(joined)], joined)


class Stuck(OracleSession):
    async def oracle_action(self):
        return None


class Wrong(OracleSession):
    async def oracle_action(self):
        return Click(Point(0, 209))


class Inexpressible(OracleSession):
    async def oracle_action(self):
        return Drag((Point(1, 1), Point(5, 5), Point(9, 1)))


class TooLong(OracleSession):
    async def oracle_action(self):
        return TypeText("word " * 200)


@pytest.mark.parametrize(
    ("session", "reason", "detail"),
    [
        (Stuck, "no_action", "no further action"),
        (Wrong, "failure", ""),
        (Inexpressible, "unsupported", "can only drag"),
        (TooLong, "unwritable", "model.max_new_tokens is 24"),
    ],
)
def test_an_episode_that_the_oracle_does_not_solve_is_counted_and_not_kept(policy, tmp_path, session, reason, detail):
    summary = record(config(tmp_path / "d"), policy, tmp_path / "d", 2, session=session)
    assert summary.to_json()["dropped"] == {"fake/button": {reason: 2}}
    assert detail in summary.details.get(reason, "")
    assert len(Demonstrations(tmp_path / "d")) == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES))
def test_every_action_a_family_can_say_is_written_and_decodes_to_itself_within_a_cell(data, family):
    frame, action = data.draw(scenes(family))
    text = write_action(CODECS[family], action, frame)
    read = CODECS[family].decode(text, frame)
    assert isinstance(read, DecodedAction)
    assert moved(read.action, places(action)) == action
    assert CODECS[family].encode(read.action, frame) == text


class Forgetful:
    """A codec that decodes every action as a click."""

    def encode(self, action, frame):
        return action.kind

    def decode(self, text, frame):
        return DecodedAction(Click(Point(0, 0)))


def test_a_text_that_decodes_to_another_action_is_refused():
    frame = ReplyReader(CODECS["qwen3-vl"], build_grammar("qwen3-vl", factor=16).rule).frame(Size(100, 100))
    with pytest.raises(ExperienceError, match="decodes to"):
        write_action(Forgetful(), TypeText("a"), frame)


def test_a_reply_that_no_sampler_returns_is_refused(policy):
    end = policy.loaded.tokenizer.decode([policy.prompts.end_of_turn])
    for text in ("", f"left {end} right"):
        with pytest.raises(ExperienceError, match="empty or contains a token that ends a reply"):
            policy.write_reply(text)


def test_seeds_are_drawn_evenly_over_the_tasks_until_none_is_left():
    choices = screen_config_from({"model": MODEL, "tasks": [{"task": "a/b"}, {"task": "a/c"}]}).tasks
    requests = draw_requests(choices, 6, seed=1, seeds=3, present=set())
    assert [request.key for request in requests] == ["a/b", "a/c"] * 3
    assert {request.task.seed for request in requests} == {0, 1, 2}
    with pytest.raises(ConfigError, match="hardly any of the 3 training seeds"):
        draw_requests(choices, 8, seed=1, seeds=3, present=set())


def test_a_supervised_run_learns_without_sessions_and_resumes_exactly(demonstrations, tmp_path, monkeypatch):
    monkeypatch.setattr("palaestra.train.supervised.find_sessions", None)  # never opened
    whole = train_screens(config(demonstrations, 3), root=tmp_path, run_id="whole")
    part = train_screens(config(demonstrations, 1), root=tmp_path, run_id="part")
    resumed = train_screens(config(demonstrations, 3), root=tmp_path, run_id="-", resume=part.run)
    assert resumed.steps == whole.steps == 12
    assert learned(resumed.run) == learned(whole.run)
    first, *_, last = steps_of(whole.run)
    assert last.metrics["nll"] < first.metrics["nll"]
    assert 0 < last.metrics["token_accuracy"] <= 1
    assert last.metrics["demonstration_epochs"] == pytest.approx(12 / len(Demonstrations(demonstrations)))
    assert last.metrics["demonstration_turns"] == last.metrics["trajectories_learned"] == 4
    other = train_screens(config(demonstrations, 3, trainer={"seed": 1}), root=tmp_path, run_id="other")
    assert learned(other.run) != learned(whole.run)


def test_sessions_are_opened_for_evaluations_only(gateway, demonstrations, tmp_path):
    evaluated = config(demonstrations, 2, trainer={"eval_every": 2}, evaluation={"episodes": 2}, environment=gateway[0])
    outcome = train_screens(evaluated, root=tmp_path, run_id="evaluated")
    assert 0 <= outcome.final["eval_success_rate"] <= 1


@pytest.mark.parametrize(
    ("algorithm", "batch"), [({"name": "rejection_sampling"}, 4), ({"name": "grpo", "group_size": 2}, 4)]
)
def test_reinforcement_continues_from_the_adapter_of_a_supervised_run(
    gateway,
    demonstrations,
    tmp_path,
    monkeypatch,
    algorithm,
    batch,
):
    warm = train_screens(config(demonstrations, 2), root=tmp_path, run_id="warm")
    model = {key: value for key, value in MODEL.items() if key != "lora_rank"}
    settings = config(
        demonstrations, 2, model={**model, "adapter": str(warm.checkpoint)}, algorithm=algorithm,
        environment=gateway[0], trainer={"batch_size": batch}, actor={"max_steps_per_episode": 2},
        demonstrations={"path": str(demonstrations), "share": 0.5},
    )  # fmt: skip
    assert settings.model.adapter == warm.checkpoint / "policy"
    assert settings.model.lora_rank == 4
    assert build_policy(settings).fingerprint == learned(warm.run)[0]
    outcome = train_screens(settings, root=tmp_path, run_id="rl")
    assert outcome.final["demonstration_turns"] == 4.0
    assert outcome.final["demonstration_nll"] > 0
    assert outcome.final["policy_version"] == 2
    assert outcome.final["disagreement_max"] < 1e-3 if "disagreement_max" in outcome.final else True
    # A checkpoint holds the settings of the adapter that it began with.
    assert load_screen_policy(outcome.checkpoint)[1].version == 2


def test_the_adapter_may_be_named_by_its_run(demonstrations, tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    from palaestra.files.home import Home

    warm = train_screens(config(demonstrations, 1), root=Home.default().runs, run_id="warm")
    model = {"name": "tiny", "adapter": "warm"}
    assert screen_config_from({"model": model}).model.adapter == warm.checkpoint.resolve() / "policy"
    with pytest.raises(CheckpointError, match=r"model\.adapter"):
        screen_config_from({"model": {"name": "tiny", "adapter": "cold"}})


def test_demonstrations_of_another_prompt_format_are_refused(demonstrations, tmp_path):
    for change, key in (({"history": 2}, "history"), ({"request": "Do {instruction}"}, "request")):
        with pytest.raises(ConfigError, match=f"was made for another {key}"):
            train_screens(config(demonstrations, model={**MODEL, **change}), root=tmp_path, run_id="x")
    with pytest.raises(ConfigError, match="was made for another task prompt"):
        train_screens(config(demonstrations, actor={"task_prompt": "Be quick."}), root=tmp_path, run_id="x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "weight", "count"), [("rejection_sampling", 0.0, 2), ("grpo", 0.0, None), ("grpo", 0.1, 2)]
)
def test_a_weight_of_zero_leaves_out_demonstrations_only_where_it_weighs_them(
    policy, demonstrations, name, weight, count
):
    given = {"path": str(demonstrations), "share": 0.2, "weight": weight}
    settings = config(demonstrations, algorithm={"name": name}, demonstrations=given, trainer={"batch_size": 8})
    mix = ModelRun(settings, policy).learner.demonstrations
    assert (None if mix is None else mix.count) == count


def test_a_damaged_demonstration_is_a_warning_at_the_start_of_a_run(demonstrations, policy, tmp_path):
    copy = shutil.copytree(demonstrations, tmp_path / "d")
    file = sorted(copy.glob("*.safetensors"))[0]
    file.write_bytes(b"")
    levels = dict(ImitationRun(config(copy), policy).notices())
    assert str(file) in levels["warning"]


def test_a_task_that_cannot_be_evaluated_is_refused_before_the_run_begins(gateway, demonstrations, tmp_path):
    settings = config(demonstrations, 2, trainer={"eval_every": 2}, environment=gateway[0], tasks=[{"task": "no/such"}])
    with pytest.raises(ConfigError, match="no/such"):
        train_screens(settings, root=tmp_path, run_id="x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("rank", ["four", [4], 4.5, None])
def test_an_adapter_without_a_whole_rank_is_refused_in_one_message(tmp_path, rank):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
    with pytest.raises(ConfigError, match="adapter"):
        build_policy(screen_config_from({"model": {"name": "tiny", "adapter": str(tmp_path)}}))


def test_a_request_that_is_refused_leaves_no_directory(policy, tmp_path):
    path = tmp_path / "d"
    for more, episodes, reason in (
        ({"tasks": []}, 1, "there is no task to record"),
        ({"sampler": {"seeds": 2}}, 5, "hardly any of the 2 training seeds"),
    ):
        with pytest.raises(ConfigError, match=reason):
            record(config(path, **more), policy, path, episodes)
    for task, reason in (("no/such", "no suite has this name"), ("click_target/none", "no such task")):
        with pytest.raises(SessionRefused, match=reason):
            asyncio.run(record_oracles(config(path, tasks=[{"task": task}]), policy, path, episodes=1))
    assert not path.exists()


def test_a_task_without_an_oracle_is_refused_before_a_browser_starts(policy, tmp_path, monkeypatch):
    task = SimpleNamespace(oracle=None)
    monkeypatch.setattr("palaestra.sessions.suites.make_task", lambda *_: task)
    path = tmp_path / "d"
    with pytest.raises(ConfigError, match=r"task = 'fake/button': the task has no oracle\. Leave it out"):
        asyncio.run(record_oracles(config(path), policy, path, episodes=1))
    assert not path.exists()


def test_supervised_learning_needs_demonstrations():
    with pytest.raises(ConfigError, match="supervised learns from demonstrations, and none are given"):
        screen_config_from({"model": MODEL, "algorithm": {"name": "supervised"}})


class Dragger(OracleSession):
    """Drags from a point where the pointer is not yet, then clicks."""

    async def oracle_action(self):
        self.asked = getattr(self, "asked", 0) + 1
        path = (Point(20, 30), Point(60, 90))
        return Drag(path) if self._require_episode().num_steps < 2 else await super().oracle_action()


def test_the_pointer_is_moved_first_for_a_drag_of_a_family_that_drags_from_the_pointer(policy, tmp_path):
    one = play(policy, tmp_path, Dragger())
    assert one.success
    assert [turn.action["kind"] for turn in one.turns] == ["move", "drag", "click"]
    assert one.turns[1].action["path"] == [[20, 30], [60, 90]]
