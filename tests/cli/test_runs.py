"""`palaestra runs` with a service in the same process."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import start_echo
from tests.runs.serving import service_thread

from palaestra.runs import TrainerService
from palaestra.runs.phase import Phase
from palaestra.runs.store.registry import Registry


def test_a_run_is_started_listed_shown_and_its_output_printed(runs, home):
    result = runs("start", "--runner", "echo", "--name", "hello", "--tag", "first", "--seed", 3, "steps=20")
    assert result.code == 0
    run_id = result.out.split()[0]
    assert result.out == f"{run_id} queued\n"
    assert run_id.startswith("hello-")
    TrainerService(home).wait(run_id, timeout_s=30)
    title, row = runs("list").out.splitlines()
    assert title.split() == ["RUN", "RUNNER", "ENV", "PHASE", "STEPS", "RETURN", "ELAPSED", "NOTE"]
    assert row.split()[:5] == [run_id, "echo", "Echo-v0", "succeeded", "200/200"]
    shown = runs("show", "hello").out
    for text in (run_id, "succeeded", "seed       3", "tags       first", "Events:", "first sign", "m1"):
        assert text in shown
    document = json.loads(runs("show", run_id, "--json").out)
    assert document["run"]["phase"] == "succeeded"
    assert document["metrics"]["m0"] == 20.0
    assert [one["kind"] for one in document["events"]] == ["note", "launched", "first_sign", "succeeded"]
    assert runs("logs", run_id).out == "echo: 20 updates to go\n"
    assert json.loads(runs("logs", run_id, "--json").out) == {"run_id": run_id, "text": "echo: 20 updates to go\n"}


def test_list_finds_by_phase_runner_environment_and_tag(runs, started):
    good = started("steps=2", "--tag", "a")
    bad = started("steps=2", "then=exit:3")

    def found(*words):
        return [row["run_id"] for row in json.loads(runs("list", "--json", *words).out)]

    assert found() == [bad, good]
    assert found("--phase", "failed") == [bad]
    assert found("--phase", "failed", "--phase", "succeeded") == [bad, good]
    assert found("--tag", "a") == [good]
    assert found("--runner", "palaestra") == []
    assert found("--env", "Echo-v0") == [bad, good]
    assert runs("list", "--runner", "sb3").out == "No matching run.\n"
    assert "exit code 3" in runs("list").out
    shown = runs("show", bad).out
    assert "Last output:" in shown
    assert "phase      failed: exit code 3" in shown


def test_following_shows_how_it_goes_and_the_exit_code_says_how_it_ended(runs, home):
    result = runs("start", "--runner", "echo", "--follow", "steps=5")
    assert result.code == 0
    assert " succeeded after 0:00:0" in result.out
    assert "  launched\n" in result.err
    result = runs("start", "--runner", "echo", "--follow", "steps=5", "then=exit:4")
    assert result.code == 1
    assert " failed (exit code 4" in result.out
    result = runs("watch", result.out.split()[0])
    assert (result.code, "  failed: exit code 4" in result.err) == (1, True)


def test_stop_takes_several_and_says_what_became_of_them(runs, started):
    ids = [started("steps=1", "then=hang", wait=False) for _ in range(2)]
    result = runs("stop", *ids, "--grace", "0.2")
    assert result.code == 0, result
    assert [line.split()[:2] for line in result.out.splitlines()] == [[run_id, "stopped"] for run_id in ids]
    result = runs("stop", ids[0])
    assert (result.code, result.err) == (1, f"error: {ids[0]} is stopped and cannot be stopped\n")
    # All names are looked up before anything is done to one.
    other = started("steps=1", "then=hang", wait=False)
    assert runs("stop", other, "missing").code == 2
    assert json.loads(runs("show", other, "--json").out)["run"]["phase"] in ("queued", "starting", "running")


def test_resume_goes_on_from_the_last_checkpoint(runs, home, started):
    gate = home.base / "go"
    run_id = started("steps=20", "checkpoint_every=5", f"until={gate}", wait=False)
    trainer = TrainerService(home)
    for item in trainer.stream_events(run_id):
        if type(getattr(item, "event", None)).__name__ == "CheckpointSaved":
            break
    runs("stop", run_id)
    gate.touch()
    result = runs("resume", run_id)
    assert result.code == 0, result
    # Twenty updates of ten steps each; stopping saved the last.
    assert re.fullmatch(
        rf"{run_id} queued, attempt 2: resumes from checkpoint [0-9a-f]{{16}} \(step 200\)\n", result.out
    )
    assert trainer.wait(run_id, timeout_s=30).attempt == 2
    steps = [point.step for point in trainer.metrics(run_id, "m0")]
    assert steps == [10 * update for update in range(1, 21)]
    assert "attempt    2\nearlier    attempt 1 stopped" in runs("show", run_id).out
    fresh = started("steps=2")
    result = runs("resume", fresh)
    assert (result.code, "no checkpoint to resume from" in result.err) == (2, True), result


def test_compare_shows_what_differs_and_the_last_numbers(runs, started):
    first = started("steps=10", "--seed", 1)
    second = started("steps=20", "--seed", 2)
    result = runs("compare", first, second)
    assert result.code == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line.strip()}
    assert rows["seed"] == ["1", "2"]
    assert rows["steps"] == ["10", "20"]
    assert rows["m0"] == ["5.5", "15.5"]
    document = json.loads(runs("compare", first, second, "--metric", "m1", "--json").out)
    assert document["metrics"] == {"m1": [6.5, 16.5]}
    assert document["configuration"]["steps"] == [10, 20]
    assert "rate" not in document["configuration"]
    assert runs("compare", first).code == 2


def test_archive_restore_delete_and_back(runs, home, started):
    run_id = started("steps=3")
    assert runs("archive", run_id).out == f"{run_id} archived\n"
    assert not home.run(run_id).path.exists()
    assert [row["run_id"] for row in json.loads(runs("list", "--archived", "--json").out)] == [run_id]
    assert json.loads(runs("list", "--json").out) == []
    result = runs("logs", run_id)
    assert (result.code, f"palaestra runs restore {run_id}" in result.err) == (2, True)
    assert f"palaestra runs restore {run_id}" in runs("show", run_id).out
    assert runs("restore", run_id).out == f"{run_id} restored\n"
    assert runs("logs", run_id).out == "echo: 3 updates to go\n"
    result = runs("delete", run_id)
    assert (result.code, "Add --yes" in result.err) == (2, True), result
    assert runs("delete", run_id, "--yes").out == f"{run_id} deleted\n"
    assert runs("show", run_id).code == 2
    assert runs("restore", run_id).out == f"{run_id} restored\n"
    assert json.loads(runs("show", run_id, "--json").out)["metrics"]["m0"] == 3.0


def test_gc_lists_what_it_would_do_and_does_it_with_yes(palaestra, home):
    with service_thread(home, retention={"keep_last": 1}):

        def runs(*words):
            return palaestra("runs", *words)

        old, new = start_echo(runs, home, "steps=1"), start_echo(runs, home, "steps=1")
        result = runs("gc")
        assert "Nothing was changed; use --yes to apply." in result.out
        assert result.out.startswith(f"archive  {old}")
        assert home.run(old).path.exists()
        assert runs("gc", "--yes").code == 0
        assert [home.run(run_id).path.exists() for run_id in (old, new)] == [False, True]
        assert runs("gc").out == "Nothing to do.\n"


def test_export_writes_event_files(runs, home, tmp_path, started):
    pytest.importorskip("tensorboard")
    run_id = started("steps=10")
    document = json.loads(runs("export-tensorboard", run_id, "--into", "curves", "--json").out)
    assert document["directory"] == str(tmp_path / "curves")
    assert document["points"] >= 20
    assert list((tmp_path / "curves").glob("events.out.tfevents.*"))
    assert runs("export-tensorboard", run_id).code == 0
    assert list(home.run(run_id).path.glob("tensorboard/events.out.tfevents.*"))


def test_a_drained_service_starts_nothing_until_draining_ends(runs, home, started):
    assert runs("drain").out == "draining: no new runs are started\n"
    run_id = started("steps=1", wait=False)
    assert json.loads(runs("show", run_id, "--json").out)["run"]["phase"] == "queued"
    assert runs("drain", "--off").code == 0
    assert TrainerService(home).wait(run_id, timeout_s=30).phase == "succeeded"


def test_a_dry_run_shows_the_command_and_writes_nothing(runs, home):
    result = runs("start", "--runner", "echo", "--dry-run", "steps=7")
    assert result.code == 0
    assert "command  " in result.out
    assert "echo_program.py" in result.out
    document = json.loads(runs("start", "--runner", "echo", "--dry-run", "--json", "steps=7").out)
    assert document["command"]["digest"] == document["digest"]
    assert not os.listdir(home.runs)


def test_a_run_of_train_alone_is_listed_without_any_service(palaestra, config, home):
    trained = json.loads(palaestra("train", config, "--json", "-q").out)
    (row,) = json.loads(palaestra("runs", "list", "--json").out)
    assert (row["run_id"], row["supervised"], row["phase"]) == (trained["run_id"], False, "succeeded")
    assert row["env_id"] == "CartPole-v1"
    assert (row["env_step"], row["total_steps"]) == (256, 256)
    assert row["episodes"] > 0
    shown = palaestra("runs", "show", trained["run_id"])
    assert shown.code == 0
    for text in (
        "256/256",
        "Metrics (mean of",
        "policy_loss",
        "Configuration:\n",
        "env.id ",
        "command ",
        "Checkpoints:",
    ):
        assert text in shown.out
    document = json.loads(palaestra("runs", "compare", trained["run_id"], trained["run_id"], "--json").out)
    assert document["metrics"]["episode/return"][0] == pytest.approx(row["episode_return"])
    assert not home.service.exists()


def test_a_run_of_train_alone_has_numbers_for_the_clients_of_a_service(palaestra, config, home):
    trained = json.loads(palaestra("train", config, "--json", "-q").out)
    with service_thread(home):
        trainer = TrainerService(home)
        assert trainer.run(trained["run_id"]).env_step == 256
        assert trainer.recent_metrics(trained["run_id"], 1, ["policy_loss"])["policy_loss"][-1].step == 256


def test_a_run_of_train_alone_that_went_on_is_shown_as_it_is_now_and_not_as_a_service_saw_it(palaestra, config, home):
    trained = json.loads(palaestra("train", config, "--json", "-q").out)
    run_id = trained["run_id"]
    with service_thread(home):
        trainer = TrainerService(home)
        assert trainer.run(run_id).env_step == 256
        before = {row["path"] for row in trainer.request("GET", "/checkpoints", run=run_id)}
        assert palaestra("train", "--resume", run_id, "trainer.total_timesteps=320", "-q").code == 0
        after = {row["path"] for row in trainer.request("GET", "/checkpoints", run=run_id)}
        assert after > before
        registry = Registry.open(home.registry)
        registry.put(replace(registry.get(run_id), phase=Phase.RUNNING))
        registry.close()
        assert trainer.run(run_id).env_step == 320
        assert palaestra("runs", "delete", run_id, "--yes").out == f"{run_id} deleted\n"


def test_a_damaged_registry_is_rebuilt_before_it_is_read(palaestra, home):
    with service_thread(home):
        run_id = start_echo(lambda *words: palaestra("runs", *words), home, "steps=2")
    home.registry.write_bytes(b"no database at all" * 100)
    for tail in ("-wal", "-shm"):
        Path(f"{home.registry}{tail}").unlink(missing_ok=True)
    from tests.runs.serving import end_service

    try:
        result = palaestra("runs", "list", "--json")
        assert [row["run_id"] for row in json.loads(result.out)] == [run_id]
        assert "it is being rebuilt" in result.err
    finally:
        end_service(home)


def test_resume_takes_a_checkpoint_and_more_steps(runs, home, started):
    run_id = started("steps=30", "checkpoint_every=10")
    refused = runs("resume", run_id)
    assert refused.code == 2
    assert f"Give it more: palaestra runs resume {run_id} steps=60" in refused.err

    result = runs("resume", run_id, "steps=40", "--checkpoint", "step_100.json", "--json")
    assert result.code == 0, result
    assert json.loads(result.out)["env_step"] == 100
    record = TrainerService(home).wait(run_id, timeout_s=30)
    assert (record.phase, record.env_step, record.total_steps) == (Phase.SUCCEEDED, 400, 400)
    assert "earlier    attempt 1 succeeded" in runs("show", run_id).out
    assert runs("resume", run_id, "steps").err.startswith("error: override = 'steps': is not key=value")
    assert "unknown key" in runs("resume", run_id, "stebs=80").err


def test_a_run_is_given_a_title_tags_and_notes_and_shown_with_them(runs, started, monkeypatch):
    run_id = started("steps=1")
    result = runs("edit", run_id[:-1], "--name", "Baseline", "--tag", "a", "--tag", "b", "--notes", "one\ntwo")
    assert (result.code, result.out) == (0, f"{run_id} changed\n")
    shown = runs("show", run_id).out
    assert "Baseline" in shown
    assert "Notes:\n  one\n  two" in shown
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    row = json.loads(runs("edit", run_id, "--notes", "-", "--no-tags", "--json").out)
    assert (row["name"], row["tags"], row["notes"]) == ("Baseline", [], "from a pipe")
    assert run_id in runs("list", "--search", "pipe").out
    assert json.loads(runs("edit", run_id, "--name", "", "--json").out)["name"] == ""
    assert "FAV" not in runs("list").out
    assert json.loads(runs("edit", run_id, "--favorite", "--json").out)["favorite"] is True
    titles, line = runs("list", "--where", "favorite=true").out.splitlines()
    assert (titles.split()[:3], line.split()[:3]) == (["RUN", "FAV", "RUNNER"], [run_id, "*", "echo"])
    assert "favorite  " in runs("show", run_id).out
    assert json.loads(runs("edit", run_id, "--no-favorite", "--json").out)["favorite"] is False


def test_a_title_cannot_command_the_terminal(runs, started):
    run_id = started("steps=1")
    assert runs("edit", run_id, "--notes", "\x1b]0;pwned\x07red \x1b[31m").code == 0
    assert "\x1b" not in runs("show", run_id).out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "nothing to change is given"),
        (["--tag", "a", "--no-tags"], "contradicts --tag"),
        (["--name", "two\nlines"], "line break"),
        (["--name", "x" * 201], "name"),
        (["--notes", "sk-abcdefghijklmnop"], "token"),
    ],
)
def test_bad_edits_are_refused_in_one_line(runs, started, words, reason):
    run_id = started("steps=1")
    result = runs("edit", run_id, *words)
    assert (result.code, reason in result.err) == (2, True), result
    assert len(result.err.strip().splitlines()) == 1
    assert runs("edit", "nobody", "--name", "x").code == 2
