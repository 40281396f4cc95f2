"""`palaestra demos`: record oracles, import plays, list and show demonstrations."""

import asyncio
import json

import pytest
from tests.experience.demonstrated import OracleSession
from tests.runs.play.test_episode import record

from palaestra.experience.demonstrations import Demonstrations
from palaestra.runs.play.episode import EpisodeWriter, new_episode_directory
from palaestra.runs.play.state import StepReport
from palaestra.sessions.action import encode
from palaestra.sessions.task import TaskRequest
from palaestra.train.demonstrations import record as recording

CONFIG = """
model: {name: tiny, max_new_tokens: 24, history: 1}
tasks: [{task: fake/button}]
algorithm: {name: supervised}
trainer: {batch_size: 2, num_training_steps: 1}
telemetry: {progress: false}
"""


@pytest.fixture
def demos(palaestra, tmp_path, monkeypatch):
    async def open_session():
        return OracleSession()

    monkeypatch.setattr(recording, "_browser_opener", lambda stack, tasks: open_session)
    (tmp_path / "ui.yaml").write_text(CONFIG)
    return lambda *words: palaestra("demos", *words)


def test_demonstrations_are_recorded_listed_shown_and_trained_on(demos, palaestra):
    made = demos("record", "ui.yaml", "--episodes", "3", "--output", "d")
    assert made.out.splitlines() == ["fake/button: 3 written", "3 demonstrations written to d"]
    shown = json.loads(demos("show", "d", "--json").out)
    assert shown["tasks"] == {"fake/button": {"demonstrations": 3, "steps": 3}}
    assert (shown["prompt_format"]["codec"], shown["about"]["source"]) == ("qwen3-vl", "oracle")
    assert demos("show", "d").out.splitlines()[1].split() == ["fake/button", "3", "1.0"]
    listed = json.loads(demos("list", "d", "--json").out)
    assert [one["outcome"] for one in listed] == ["success"] * 3
    assert len(demos("list", "d").out.splitlines()) == 4
    trained = palaestra("train", "ui.yaml", "demonstrations.path=d", "--json")
    assert trained.code == 0, trained.err
    assert json.loads(trained.out)["final"]["demonstration_turns"] == 2


def test_tasks_are_named_instead_of_a_configuration(demos):
    made = demos("record", "fake/button", "model.max_new_tokens=24", "--episodes", "2", "--output", "d", "--json")
    assert json.loads(made.out)["written"] == {"fake/button": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nothing"], "DIR = 'nothing': holds no demonstrations.json"),
        (["record", "ui.yaml", "--output", "."], "exists and holds no demonstrations"),
        (["record", "no.yaml", "--output", "d"], "no.yaml"),
        (["record", "button", "--output", "d"], "tasks"),
        (["record", "", "--output", "d"], "there is no task to record"),
        (["import", "nobody", "--output", "d"], "nobody"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(demos, words, message):
    refused = demos(*words)
    assert refused.code == 2
    assert message in refused.err
    assert len(refused.err.strip().splitlines()) == 1


def write_play(home, name, *, readable=True, **changes):
    """A person clicks the square of `fake/button`."""
    session, seed = OracleSession(), changes.get("seed") or 5

    async def play():
        spec = await session.reset(TaskRequest("fake/button", seed, {}))
        first, action = await session.screenshot(), await session.oracle_action()
        return spec, first, action, await session.act(action, step=1)

    spec, first, action, step = asyncio.run(play())
    facts = {"env_id": "fake/button", "kind": "screen", "seed": seed, "instruction": spec.instruction, "mode": "human"}
    writer = EpisodeWriter(new_episode_directory(home, name), record(name, **(facts | changes)))
    actor = "agent" if changes.get("mode") == "agent" else "human"
    writer.add(StepReport(episode=1, step=0, width=160, height=210), first.data, {})
    done = {"reward": 1.0, "episode_return": 1.0, "terminated": True, "success": True}
    performed = encode(action) if readable else {"kind": "dance"}
    writer.add(StepReport(episode=1, step=1, action=performed, actor=actor, **done), step.screenshot.data, {})
    writer.finish("terminated", 1_000.0)


def test_a_play_that_a_person_solved_becomes_the_same_tokens_as_the_oracle(demos, home, tmp_path):
    write_play(home, "play-1")
    assert json.loads(demos("import", "play-1", "--config", "ui.yaml", "--output", "d", "--json").out)["written"] == {
        "fake/button": 1
    }
    made = Demonstrations(tmp_path / "d")
    one = made.load(made.entries[0])
    assert (one.task["seed"], one.success, one.turns[0].action["kind"]) == (5, True, "click")
    assert one.turns[0].is_demonstration
    # A directory is accepted as well, and the same directory holds recorded and imported ones.
    assert demos("record", "ui.yaml", "--episodes", "1", "--output", "d").code == 0
    assert len(Demonstrations(tmp_path / "d")) == 2


def test_a_play_is_imported_once(demos, home, tmp_path):
    write_play(home, "play-1")
    words = ("import", "play-1", "play-1", "--config", "ui.yaml", "--output", "d")
    assert demos(*words).out.splitlines()[0] == "fake/button: 1 written"
    again = demos(*words)
    assert again.code == 1
    assert "fake/button: 2 not kept (present: the directory holds it already)" in again.out
    assert len(Demonstrations(tmp_path / "d")) == 1


def test_an_interrupted_recording_says_how_many_are_kept(demos, monkeypatch, tmp_path):
    keep = recording.keep_success

    def interrupt_after_two(trajectory, key, summary, writer):
        keep(trajectory, key, summary, writer)
        if summary.written.total() == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(recording, "keep_success", interrupt_after_two)
    stopped = demos("record", "ui.yaml", "--episodes", "9", "--workers", "1", "--output", "d")
    assert stopped.code == 130
    assert stopped.err.splitlines() == ["d holds 2 demonstrations; repeat the command to add more.", "interrupted"]


def test_damaged_files_are_named_and_a_damaged_manifest_is_refused(demos, tmp_path):
    demos("record", "ui.yaml", "--episodes", "2", "--output", "d")
    file = sorted((tmp_path / "d").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:50])
    for command in ("show", "list"):
        shown = demos(command, "d", "--json")
        assert (shown.code, shown.err.startswith(f"warning: d/{file.name} is skipped: ")) == (0, True)
    (tmp_path / "d" / "demonstrations.json").write_text("{")
    for words, place in ((("show", "d"), "DIR"), (("record", "ui.yaml", "--output", "d"), "--output")):
        refused = demos(*words)
        assert refused.code == 2
        assert f"error: {place} = 'd': its demonstrations.json cannot be read. Restore the file" in refused.err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "agent"}, "actions of a policy"),
        ({"seed": 1_000_000_001}, "reserved for evaluation"),
        ({"seed": None}, "has no seed"),
        ({"kind": "gymnasium"}, "is not a screen task"),
        ({"readable": False}, "EPISODE = 'play-1': has an action that cannot be performed (action.kind = 'dance'"),
    ],
)
def test_a_play_that_is_no_demonstration_is_refused(demos, home, changes, reason):
    write_play(home, "play-1", **changes)
    refused = demos("import", "play-1", "--config", "ui.yaml", "--output", "d")
    assert refused.code == 2
    assert reason in refused.err


def test_a_word_that_names_nothing_is_refused_with_how_to_write_a_task(palaestra, tmp_path):
    result = palaestra("demos", "record", "nope", "--episodes", 1, "--output", tmp_path / "demos")
    assert result.code == 2
    assert "CONFIG_OR_TASKS = 'nope': is neither a file, a packaged configuration nor a task" in result.err
    assert "miniwob/click-test" in result.err
