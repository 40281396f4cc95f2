"""The runner `script`: any program, as the user's shell would start it."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.runs.attempts import wait_until
from tests.runs.supervisors import (
    event_kinds,
    read_journal,
    run_and_close_supervisor,
    run_supervisor,
    wait_for_end,
    wait_for_phase,
)

from palaestra.errors import ConfigError, ConsentRequired, LaunchRefused
from palaestra.runs.phase import Phase
from palaestra.runs.runner import Machine
from palaestra.runs.runners.conformance import check_runner
from palaestra.runs.runners.script import ScriptRunner
from palaestra.runs.runners.script.command_line import parse_command
from palaestra.runs.spec import RunSpec, collect_shell_variables
from palaestra.runs.supervisor.resume import ResumeRequest
from palaestra.runs.supervisor.run_files import attempt_paths, digest_plan

RUNNERS = {"script": ScriptRunner()}
COUNT = """
import sys, time
for step in range(int(sys.argv[1])):
    print(f"step {step}: loss {step / 4}", flush=True)
"""
WAIT = COUNT + "sys.stdin.close()\nwhile True: time.sleep(0.05)\n"


def spec(*words, directory=None, **options):
    config = {"command": [str(word) for word in words], **options.pop("config", {})}
    return RunSpec(runner="script", config=config, invoked_from=directory or Path.cwd(), **options)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text(COUNT)
    return path


def machine(**variables):
    return Machine({"PATH": os.environ["PATH"], **variables}, free_disk_bytes=1 << 40)


def plan(spec, home, **variables):
    return ScriptRunner().plan(spec, attempt_paths(home.run("run"), 1), machine(**variables))


async def submit(supervisor, spec):
    preview = await supervisor.preview(spec)
    assert preview.plan is not None, preview.findings
    record = await supervisor.submit(spec, preview.plan.digest())
    return record.run_id


def test_the_runner_conforms(script, tmp_path, monkeypatch):
    monkeypatch.chdir(script.parent)
    (tmp_path / "kit").mkdir()
    check_runner(ScriptRunner, spec(sys.executable, script, 30), tmp_path / "kit")


@pytest.mark.parametrize(
    ("words", "name", "config"),
    [
        (
            "python train.py --lr 3e-4 --seed 3 --cuda",
            "train",
            {"program": ["python", "train.py"], "lr": 3e-4, "seed": 3, "cuda": True},
        ),
        (
            "python -u -X dev -m pkg.train a --x=b",
            "pkg.train",
            {"program": ["python", "pkg.train"], "arguments": ["a"], "x": "b"},
        ),
        (
            "python3.11 train.py model.lr=0.1 +a=1",
            "train",
            {"program": ["python3.11", "train.py"], "model.lr": 0.1, "a": 1},
        ),
        ("./run.sh --momentum -0.5 -v", "run", {"program": ["./run.sh"], "momentum": -0.5, "v": True}),
        ("python -c pass --layer 1 --layer 2", "program", {"program": ["python", "-c"], "layer": [1, 2]}),
        (
            "torchrun --nproc 2 train.py -- --lr 1",
            "torchrun",
            {"program": ["torchrun"], "nproc": 2, "arguments": ["train.py", "--lr", "1"]},
        ),
    ],
)
def test_the_options_of_a_command_are_its_configuration(words, name, config):
    command = parse_command(words.split())
    assert command.name == name
    assert command.to_config() == config


def test_a_key_replaces_the_value_of_its_option_in_any_style():
    command = parse_command("python t.py --learning-rate 1e-3 --n=5 model.size=big --fast --track false".split())
    changes = {"learning_rate": 0.5, "n": 6, "model.size": "small", "fast": False, "track": True}
    changed = command.replace_options(changes)

    assert " ".join(changed) == "python t.py --learning-rate 0.5 --n=6 model.size=small --track true"
    with pytest.raises(
        ConfigError, match=r"lerning_rate is not an option of the command\. Did you mean 'learning_rate'"
    ):
        command.replace_options({"lerning_rate": 1})
    with pytest.raises(ConfigError, match="not one value"):
        command.replace_options({"n": [1, 2]})


def test_the_plan_is_the_command_in_the_directory_and_with_the_variables_of_the_shell(script, home):
    shell = {
        "PATH": os.environ["PATH"],
        "VIRTUAL_ENV": "/v",
        "MY_SETTING": "1",
        "MY_TOKEN": "abc",
        "PS1": "$",
        "PWD": "/",
    }
    request = spec(
        "python", "train.py", "--lr", "1", "--seed", "0", "--env-id", "CartPole-v1",
        directory=script.parent, config={"lr": 2}, seed=7, shell_variables=collect_shell_variables(shell),
    )  # fmt: skip
    made = plan(request, home, MY_TOKEN="of-the-service", OTHER_SECRET="x")

    assert request.shell_variables == {"PATH": shell["PATH"], "VIRTUAL_ENV": "/v", "MY_SETTING": "1", "MY_TOKEN": None}
    assert made.argv[1:] == ("train.py", "--lr", "2", "--seed", "7", "--env-id", "CartPole-v1")
    assert os.path.isabs(made.argv[0])
    assert made.cwd == script.parent
    assert made.environment["MY_SETTING"] == "1"
    assert made.environment["MY_TOKEN"] == "of-the-service"
    assert "OTHER_SECRET" not in made.environment
    assert made.environment["PALAESTRA_LOG"] == str(home.run("run").attempt(1).log)
    assert "of-the-service" not in str(made.to_redacted_dict())
    assert (made.algorithm, made.env_id) == ("train", "CartPole-v1")
    assert made.resolved["lr"] == 2


def test_an_activated_virtual_environment_counts(script, tmp_path, home):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    shell = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    request = spec("python", "train.py", directory=script.parent, shell_variables=shell)

    assert plan(request, home).argv[0] == str(python)


@pytest.mark.parametrize(
    ("words", "options", "text", "remedy"),
    [
        (["no-such-program"], {}, "no-such-program: no such program", "Check its name"),
        (["./nowhere"], {}, "nowhere: no such program", "Check the path"),
        (["./project"], {}, "is a directory, not a program", "Name a program"),
        (["./plain.py"], {}, "is not executable", "python ./plain.py"),
        (["plain.py"], {}, "in the working directory", "Write python plain.py"),
        (["python", "nowhere.py"], {}, "nowhere.py: no such file", "path of the script"),
        (["python", "project"], {}, "without __main__.py", "Name a script"),
        ([], {}, "no program given", "palaestra runs start -- python train.py"),
        ([""], {}, "is not a command", "For example"),
        (["python", "plain.py"], {"config": {"lr": 1}}, "lr is not an option of the command", "--lr VALUE"),
        (["python", "plain.py"], {"seed": 1}, "seed is not an option of the command", "--seed VALUE"),
        (["python", "plain.py", "--api-key", "abcdefgh"], {}, "password or token", "Export it"),
        (["python", "plain.py"], {"on": "gpu-box"}, "machine of the service only", "Leave --on out"),
        (["bash", "x.sh"], {"python": "/usr/bin/python3"}, "is not a Python interpreter", "Leave --python out"),
        (["python", "plain.py"], {"python": "/no/python"}, "is not a program", "interpreter"),
    ],
)
def test_what_cannot_run_is_refused_with_a_remedy(tmp_path, words, options, text, remedy):
    (tmp_path / "project").mkdir()
    (tmp_path / "plain.py").write_text("")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    request = spec(*words, directory=tmp_path, shell_variables={"PATH": path}, **options)
    (finding,) = ScriptRunner().preflight(request, machine())

    assert finding.level == "refused"
    assert text in finding.text
    assert remedy in finding.remedy


def test_a_secret_that_the_service_does_not_have_is_named():
    request = spec(sys.executable, "-c", "pass", shell_variables={"A_TOKEN": None, "B_TOKEN": None})
    ok, warning = ScriptRunner().preflight(request, machine(A_TOKEN="x"))

    assert ok.level == "ok"
    assert warning.level == "warning"
    assert warning.text.startswith("B_TOKEN of your shell is not passed on")


def test_a_program_runs_is_stopped_and_executed_again(home, script):
    script.write_text(WAIT)

    async def body():
        async with run_supervisor(home, runners=RUNNERS) as supervisor:
            run_id = await submit(supervisor, spec(sys.executable, "train.py", 5, directory=script.parent))
            await wait_until(lambda: supervisor.get_run(run_id).env_step == 4, "five steps")
            stopped = await supervisor.stop(run_id, grace_s=5)
            script.write_text(COUNT)
            with pytest.raises(LaunchRefused, match="the checkpoints of a program are its own"):
                await supervisor.resume(run_id, None, ResumeRequest("07d5"))
            again = await _resume(supervisor, run_id)
            ended = await wait_for_end(supervisor, run_id)
            with pytest.raises(LaunchRefused, match=f"runs start --like {run_id}"):
                await supervisor.resume(run_id)
            return run_id, stopped, again, ended

    run_id, stopped, again, ended = asyncio.run(body())
    assert stopped.phase is Phase.STOPPED
    assert again.reason == "executes the command again"
    assert (ended.phase, ended.attempt, ended.env_step) == (Phase.SUCCEEDED, 2, 4)
    for attempt in (1, 2):
        records = read_journal(home, run_id, attempt)
        assert [(r.event.env_step, r.event.metrics) for r in records] == [(s, {"loss": s / 4}) for s in range(5)]


async def _resume(supervisor, run_id):
    try:
        return await supervisor.resume(run_id)
    except ConsentRequired as error:
        return await supervisor.resume(run_id, error.digest)


def test_a_program_is_adopted_and_every_number_stored_once(home, script, tmp_path):
    flag = tmp_path / "go"
    script.write_text(
        "import os, sys, time\n"
        "for step in range(10):\n"
        "    print(f'step {step}: loss {step / 4}', flush=True)\n"
        f"    while step == 4 and not os.path.exists({str(flag)!r}): time.sleep(0.02)\n"
    )

    async def first():
        async with run_and_close_supervisor(home, runners=RUNNERS) as supervisor:
            run_id = await submit(supervisor, spec(sys.executable, "train.py", directory=script.parent))
            await wait_until(lambda: supervisor.get_run(run_id).env_step == 4, "five steps")
            return run_id

    async def second(run_id):
        async with run_supervisor(home, runners=RUNNERS) as supervisor:
            assert supervisor.report.adopted == [run_id]
            await wait_for_phase(supervisor, run_id, Phase.RUNNING)
            flag.touch()
            return await wait_for_end(supervisor, run_id)

    run_id = asyncio.run(first())
    assert asyncio.run(second(run_id)).phase is Phase.SUCCEEDED
    assert [r.event.env_step for r in read_journal(home, run_id)] == list(range(10))
    assert "adopted" in event_kinds(home, run_id)


def test_a_program_that_crashes_has_failed_and_says_why(home, script):
    script.write_text("print('step 1: loss 0.5')\nraise ValueError('bad rate')\n")

    async def body():
        async with run_supervisor(home, runners=RUNNERS) as supervisor:
            run_id = await submit(supervisor, spec(sys.executable, "train.py", directory=script.parent))
            return await wait_for_end(supervisor, run_id)

    record = asyncio.run(body())
    assert record.phase is Phase.FAILED
    assert "ValueError: bad rate" in record.reason
    assert record.env_step == 1


def test_runs_of_several_seeds_have_one_configuration_digest(home, script):
    digests = set()
    for seed in (1, 2):
        request = spec("python", "train.py", "--lr", "0.5", "--seed", seed, directory=script.parent, seed=seed)
        digests.add(digest_plan(request, plan(request, home)))
    assert len(digests) == 1
