"""Commands that read runs: search, queued runs, W&B, videos, missing directories."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from tests.cli.conftest import start_echo
from tests.runs.serving import service

from palaestra.runs import TrainerService
from palaestra.runs.phase import Phase


def test_list_finds_by_agent_and_by_words(runs, started):
    good = started("steps=2", "--tag", "Baseline", "--name", "alpha")
    bad = started("steps=2", "then=exit:3", "--name", "beta")

    def found(*words):
        return [row["run_id"] for row in json.loads(runs("list", "--json", *words).out)]

    assert found("--search", "baseline ALPHA") == [good]
    assert found("--search", "exit code 3") == [bad]
    assert found("--search", "echo-v0") == [bad, good]
    (agent,) = {row["agent_id"] for row in json.loads(runs("list", "--json").out)}
    assert found("--agent", agent) == [bad, good]
    assert runs("list", "--search", "alpha beta").out == "No matching run.\n"
    assert runs("list", "--agent", "echo/dqn").out == "No matching run.\n"


def test_list_takes_a_query_an_order_and_a_limit(runs, started):
    long, short = started("steps=40", "--env", "A-v0"), started("steps=20", "--env", "B-v0")

    def found(*words):
        result = runs("list", "--json", *words)
        assert result.code == 0, result
        return [row["run_id"] for row in json.loads(result.out)]

    # Episode e returns e: the mean of 1 to 4 is 2.5, that of 1 and 2 is 1.5.
    assert found("--sort", "return") == [long, short]
    assert found("--sort", "return:asc", "--limit", "1") == [short]
    assert found("--where", "env=A-v0 and return>2") == [long]
    assert found("--where", "config.steps<30 or m0>100") == [short]
    assert found("--sort", "m0", "--limit", "1") == [long]
    result = runs("list", "--where", "env=A-v0 and return>")
    assert (result.code, "expected a value after > at the end" in result.err) == (2, True), result
    assert runs("list", "--where", "return>9").out == "No matching run.\n"


def test_what_a_spec_can_say_the_command_line_can_say(home, started):
    words = ["--nice", "3", "--grace", "2.5", "--thin-every", "7", "--set", "MY_FLAVOUR=sweet=sour", "steps=1"]
    run_id = started(*words)
    spec = json.loads(home.run(run_id).spec.read_text())
    values = [spec[name] for name in ("nice", "stop_grace_s", "thin_every", "environment")]
    assert values == [3, 2.5, 7, {"MY_FLAVOUR": "sweet=sour"}]
    command = json.loads(home.run(run_id).attempt(1).command.read_text())
    assert command["environment"]["MY_FLAVOUR"] == "sweet=sour"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "novalue"], "--set = 'novalue': is not NAME=VALUE"),
        (["--set", "MY_TOKEN=x"], "--set = {'MY_TOKEN': '***'}: MY_TOKEN looks like a secret"),
        (["--set", "WANDB_API_KEY=planted123"], "--set = {'WANDB_API_KEY': '***'}: WANDB_API_KEY looks like a secret"),
        (
            ["--set", "PROXY=http://me:planted123@host"],
            "--set = {'PROXY': 'http://me:***@host'}: PROXY holds a password",
        ),
        (["--nice", "20"], "--nice = 20"),
        (["--grace", "-1"], "--grace = -1"),
        (["--thin-every", "0"], "--thin-every = 0"),
        (["steps=1e999"], "1e999 is too large for a number"),
    ],
)
def test_options_that_cannot_be_are_named_as_they_were_typed(palaestra, words, reason):
    result = palaestra("runs", "start", "--runner", "echo", *words)
    assert (result.code, result.err.count("\n")) == (2, 1), result
    assert reason in result.err
    assert "planted" not in result.err + result.out


def test_a_secret_among_the_keys_is_refused_unseen_and_nothing_is_stored(runs, home):
    for words in (["wandb.api_key=planted123"], ["password=planted123"], ["note=http://me:planted123@host"]):
        result = runs("start", "--runner", "echo", *words)
        assert (result.code, "looks like a token and would be stored" in result.err) == (2, True), result
        assert "planted" not in result.err + result.out
        result = runs("start", "--runner", "echo", "--dry-run", "--json", *words)
        assert "planted" not in result.err + result.out
    assert os.listdir(home.runs) == []


def test_watching_a_queued_run_prints_that_it_waits(runs, home, started):
    runs("drain")
    run_id = started("steps=1", wait=False)
    assert f"{run_id} queued: " in runs("logs", run_id).err
    threading.Timer(0.5, lambda: TrainerService(home).request("POST", "/drain", {"on": False})).start()
    result = runs("watch", run_id)
    assert result.code == 0
    assert result.err.startswith("  queued: ")


def test_a_run_that_was_kept_on_disk_for_wandb_shows_the_command_that_uploads_it(runs, home, started):
    run_id = started("steps=1")
    kept = home.run(run_id).attempt(1).work / "wandb" / "offline-run-20261116_100312-abcd"
    kept.mkdir(parents=True)
    (kept / "run-abcd.wandb").touch()
    assert f"upload it with: wandb sync {kept}" in runs("show", run_id).out
    assert f"Upload it to W&B with: wandb sync {kept}" in runs("watch", run_id).err


def test_the_slowdown_by_recording_is_printed(runs, home, started):
    run_id = started("steps=400", "rate=400", "episodes_every=1")
    attempt = home.run(run_id).attempt(1)
    points = TrainerService(home).metrics(run_id, "episode/return")
    attempt.videos.mkdir()
    clip = attempt.videos / "episode.mp4"
    clip.touch()
    middle = points[len(points) // 2].time
    os.utime(clip, (middle, middle))
    for command in ("videos", "show"):
        assert "times slower while recording" in runs(command, run_id).out


def test_a_removed_run_directory_is_reported_and_not_created_again(runs, home, started):
    run_id = started("steps=2")
    shutil.rmtree(home.run(run_id).path)
    result = runs("show", run_id)
    assert (result.code, "The run directory is missing" in result.out) == (0, True), result
    for command in ("logs", "export-tensorboard", "archive"):
        result = runs(command, run_id)
        assert (result.code, "is gone" in result.err) == (2, True), result
    assert not home.run(run_id).path.exists()


def test_a_request_with_damaged_content_is_shown_without_it(runs, home, started):
    run_id = started("steps=1")
    home.run(run_id).spec.write_text('{"config": ["steps"]}')
    shown = runs("show", run_id)
    assert (shown.code, shown.out.splitlines()[0].split()) == (0, ["run", run_id])


def test_archiving_or_deleting_a_running_run_is_refused_with_the_command_that_stops_it(runs, started):
    run_id = started("steps=1", "then=hang", wait=False)
    for words in (["archive", run_id], ["delete", run_id, "--yes"]):
        result = runs(*words)
        assert (result.code, f"Stop it with: palaestra runs stop {run_id}" in result.err) == (1, True), result


def test_show_and_list_agree_on_how_long_a_run_took(runs, started):
    run_id = started("steps=2")
    took = runs("list").out.splitlines()[1].split()[-1]
    assert f"elapsed    {took}\n" in runs("show", run_id).out


def test_a_closed_output_is_no_reason_for_a_traceback(runs, home, started):
    run_id = started("steps=2")
    command = [sys.executable, "-m", "palaestra", "runs", "logs", run_id]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_serve_stop_ends_the_service_and_says_so(palaestra, home):
    assert palaestra("serve", "--stop").out == f"No service runs for {home.path}.\n"
    with service(home) as result:
        assert json.loads(palaestra("serve", "--stop", "--json").out) == {"ended": result["pid"]}
        assert palaestra("serve", "--stop").out == f"No service runs for {home.path}.\n"


def test_serve_stop_says_how_many_runs_continue(palaestra, home):
    with service(home):
        run_id = start_echo(lambda *words: palaestra("runs", *words), home, "steps=1", "then=hang", wait=False)
        TrainerService(home).wait(run_id, phases={Phase.RUNNING}, timeout_s=60)
        assert palaestra("serve", "--stop").out == "The service has exited; 1 run continues.\n"
    with service(home):
        palaestra("runs", "stop", run_id, "--grace", "0")


def test_serve_stop_says_nothing_of_runs_if_none_is_active(palaestra, home):
    with service(home):
        assert palaestra("serve", "--stop").out == "The service has exited.\n"


def test_settings_that_the_service_has_not_read_are_reported_where_they_matter(palaestra, home):
    with service(home):
        settings = home.path / "service.yaml"
        settings.write_text("retention: {keep_last: 1}\n")
        os.utime(settings, (2**31, 2**31))
        result = palaestra("runs", "gc")
    assert result.out == "Nothing to do.\n"
    assert "was changed after the service started" in result.err
    assert "palaestra serve --stop" in result.err


def test_interrupted_watching_prints_that_the_run_continues(runs, home, started):
    run_id = started("steps=1", "then=hang", wait=False)
    command = [sys.executable, "-m", "palaestra", "runs", "watch", run_id]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as watching:
        while "launched" not in watching.stderr.readline():
            assert watching.poll() is None
        watching.send_signal(signal.SIGINT)
        errors = watching.stderr.read()
    assert watching.returncode == 130
    assert re.search(rf"{run_id} continues; stop it with: \S+ -m palaestra runs stop {run_id}", errors)


def test_an_interrupted_start_prints_which_run_may_still_be_queued(runs, home, tmp_path):
    """A slow interpreter delays the preflight for as long as the test needs."""
    slow, gate = tmp_path / "slow-python", tmp_path / "gate"
    os.mkfifo(gate)
    slow.write_text(f"#!/bin/sh\necho here > {gate}\ncat {gate} > /dev/null\nexit 1\n")
    slow.chmod(0o755)
    command = [sys.executable, "-m", "palaestra", "runs", "start", "env.id=CartPole-v1", "--name", "late"]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    with subprocess.Popen([*command, "--python", slow], env=environment, stderr=subprocess.PIPE, text=True) as starting:
        assert gate.read_text() == "here\n"
        starting.send_signal(signal.SIGINT)
        errors = starting.stderr.read()
        gate.write_text("go on")
    assert starting.returncode == 130
    assert errors.endswith("interrupted\n")
    run_id = errors.split()[-2]
    assert run_id.startswith("late-")
    assert re.search(rf"may still queue {run_id}; stop it with: \S+ -m palaestra runs stop {run_id}", errors)


def test_an_ended_run_shows_the_most_it_took_and_not_what_it_took_last(started, runs, home):
    run_id = started("steps=2")
    attempt = home.run(run_id).attempt(1)
    lines = [
        f'{{"time":1,"cpu_percent":{cpu},"rss_mb":{rss},"processes":2,"gpus":[]}}\n'
        for cpu, rss in ((150, 800), (5, 30))
    ]
    (attempt.path / "system.jsonl").write_text("".join(lines))

    assert "resources  peak 150 % of a core, 800 MB, 2 processes\n" in runs("show", run_id).out
    (attempt.path / "system.jsonl").unlink()
    assert re.search(r"resources  peak \d+ MB in one process\n", runs("show", run_id).out)


def test_what_gives_clips_depends_on_who_trains(started, runs, home):
    run_id = started("steps=2")
    assert runs("videos", run_id).out == (
        "No videos. Clips are recorded of checkpoints of palaestra only. "
        "Start a new run with palaestra runs start --video: the trainer then records while it trains.\n"
    )
    record = runs("videos", run_id, "--record")
    assert (record.code, "trainers that save none record with palaestra runs start --video" in record.err) == (2, True)


def test_a_run_of_ours_without_clips_says_how_to_film_it(palaestra, home):
    (home.run("solo").attempt(1).path).mkdir(parents=True)
    (home.run("solo").path / "resolved.json").write_text("{}")
    assert palaestra("runs", "videos", "solo").out == (
        "No videos. Record its newest checkpoint with: palaestra runs videos solo --record\n"
    )
