import asyncio
import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.attempts import wait_until
from tests.runs.checkpoints import evil
from tests.runs.checkpoints.own import own_checkpoint
from tests.runs.supervisors import echo, read_journal, run_supervisor, wait_for_end, wait_for_phase

from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue, find_checkpoints
from palaestra.runs.checkpoints.files import CheckpointStep, verify
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.store.registry import Registry
from palaestra.telemetry.event import CheckpointSaved, Record, TrainingStep, encode

RUN = RunRecord(run_id="run", runner="echo", agent_id="echo/x", env_id="CartPole-v1", phase=Phase.RUNNING, env_step=70)


def place(home):
    attempt = home.run("run").attempt(1)
    attempt.work.mkdir(parents=True)
    return attempt, Registry.open(home.registry)


def said(path, *, env_step=40, sha256="", best=False, metric=None, seq=1):
    return Record(seq, 100.0 + seq, CheckpointSaved(1, env_step, str(path), sha256, best, metric))


def test_a_run_of_the_supervisor_has_its_checkpoints_catalogued(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run = await supervisor.submit(echo(steps=40, rate=0, episodes_every=1, checkpoint_every=10))
            await wait_for_end(supervisor, run.run_id)
            return supervisor.registry.checkpoints(run_id=run.run_id)

    rows = asyncio.run(body())

    assert sorted(row.env_step for row in rows) == [100, 200, 300, 400]
    assert all(verify(row).fits and row.attempt == 1 and row.profile == "local" for row in rows)
    # Episode e returns e: at step 200 twenty have ended.
    digest = next(row.metrics_digest for row in rows if row.env_step == 200)
    assert digest["best"] == digest["last"]
    assert digest["mean_100"] < digest["last"]


def test_saying_it_twice_changes_nothing_and_the_best_is_one(home):
    attempt, registry = place(home)
    catalogue = CheckpointCatalogue(registry, clock=lambda: 500.0)
    first, second = (evil.torch_zip(attempt.work / f"step_{n}.pt") for n in (10, 20))
    records = [said(first, env_step=10, best=True, metric=1.0), said(second, env_step=20, best=True, metric=2.0, seq=2)]

    catalogue.add_announced(RUN, attempt, records)
    once = registry.checkpoints()
    catalogue.add_announced(RUN, attempt, records)

    assert registry.checkpoints() == once
    assert [(row.env_step, row.best, row.metric, row.format) for row in once] == [
        (20, True, 2.0, "torch_zip"),
        (10, False, 1.0, "torch_zip"),
    ]
    registry.close()


def test_what_lies_outside_of_the_run_is_not_listed(home, tmp_path):
    attempt, registry = place(home)
    outside = evil.torch_zip(tmp_path / "outside.pt")
    (attempt.work / "link.pt").symlink_to(outside)
    catalogue = CheckpointCatalogue(registry)

    catalogue.add_announced(
        RUN, attempt, [said(outside), said("../../../../../../etc/passwd"), said("link.pt"), said("")]
    )
    catalogue.scan_attempt(RUN, attempt, ["*.pt"])

    assert registry.checkpoints() == []
    registry.close()


def test_bytes_that_are_not_what_the_trainer_said_are_marked_as_damaged(home):
    attempt, registry = place(home)
    path = evil.torch_zip(attempt.work / "a.pt")

    CheckpointCatalogue(registry, clock=lambda: 500.0).add_announced(RUN, attempt, [said("a.pt", sha256="ab" * 32)])

    (row,) = registry.checkpoints()
    assert (row.path, row.checkpoint_id, row.verified) == (str(path), "abababababababab", -500.0)
    registry.close()


def test_unannounced_files_are_found_when_the_attempt_has_ended(home):
    attempt, registry = place(home)
    signature = {"env_id": "CartPole-v1", "action_space": {"type": "Discrete", "n": 2, "start": 0}}
    AttemptPlan(checkpoints=("runs/**/*.cleanrl_model",), env_signature=signature).write(attempt)
    model = attempt.work / "runs" / "x" / "dqn.cleanrl_model"
    model.parent.mkdir(parents=True)
    evil.torch_zip(model)
    evil.sb3_zip(attempt.work / "ignored.zip", "x")

    CheckpointCatalogue(registry).scan_attempt(RUN, attempt, ["runs/**/*.cleanrl_model"])

    (row,) = registry.checkpoints()
    # The run had come to step 70 when it was last looked at; the file says nothing of the sort.
    assert (row.path, row.format, row.env_step, row.step_source) == (str(model), "torch_zip", None, "unknown")
    assert row.metrics_digest == {}
    assert row.env_signature["action_space"]["n"] == 2
    assert row.sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    registry.close()


def test_a_pipe_in_the_place_of_a_checkpoint_does_not_hold_up_the_service(home):
    attempt, registry = place(home)
    os.mkfifo(attempt.work / "step_1.pt")

    CheckpointCatalogue(registry).add_announced(RUN, attempt, [said("step_1.pt")])
    CheckpointCatalogue(registry).scan_attempt(RUN, attempt, ["*.pt"])

    assert registry.checkpoints() == []
    registry.close()


def test_rows_of_removed_checkpoints_go(home):
    attempt, registry = place(home)
    catalogue = CheckpointCatalogue(registry)
    path = evil.torch_zip(attempt.work / "a.pt")
    catalogue.add_announced(RUN, attempt, [said(path)])
    path.unlink()

    catalogue.add_announced(RUN, attempt, [said(evil.torch_zip(attempt.work / "b.pt"), seq=2)])

    assert [row.path for row in registry.checkpoints()] == [str(attempt.work / "b.pt")]
    registry.close()


def test_a_lost_registry_gets_the_checkpoints_of_its_runs_back(home):
    async def body():
        async with run_supervisor(home, runners={"echo": EchoRunner()}, catalogue=CheckpointCatalogue) as supervisor:
            run = await supervisor.submit(echo(steps=20, rate=0, checkpoint_every=10))
            await wait_for_end(supervisor, run.run_id)
            return run.run_id, supervisor.registry.checkpoints()

    run_id, before = asyncio.run(body())
    for path in home.path.glob("registry.sqlite*"):
        path.unlink()
    registry = open_registry(home)

    added = CheckpointCatalogue(registry).add_missing(home)

    plain = [replace(row, created=0.0) for row in before]
    assert added == 2
    assert [replace(row, created=0.0) for row in registry.checkpoints(run_id=run_id)] == plain
    assert CheckpointCatalogue(registry).add_missing(home) == 0
    registry.close()


def test_announcements_are_read_from_the_journal_when_the_registry_is_lost(home):
    attempt, registry = place(home)
    for number, name in enumerate(("z.pt", "a.pt", "b.pt"), start=1):
        evil.torch_zip(attempt.work / name)
        record = said(name, env_step=11_992 + number, best=name != "b.pt", metric=float(number), seq=number)
        with open(attempt.journal, "a") as file:
            file.write(encode(record.event, record.seq, record.time) + "\n")
            file.write('{"kind": "CheckpointSaved", "half": \n')

    CheckpointCatalogue(registry).scan_attempt(RUN, attempt, ["*.pt"])

    assert [(Path(row.path).name, row.env_step, row.best, row.step_source) for row in registry.checkpoints()] == [
        ("b.pt", 11_995, False, "announced"),
        ("a.pt", 11_994, True, "announced"),
        ("z.pt", 11_993, False, "announced"),
    ]
    registry.close()


@pytest.mark.parametrize(("speak", "step", "shown"), [("tensorboard", 400, "400+"), ("stdout", None, "unknown")])
def test_a_file_without_a_step_has_the_last_one_logged_before_it_if_the_log_has_times(home, speak, step, shown):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run = await supervisor.submit(echo(speak=speak, steps=40, episodes_every=1, until="over"))
            attempt = home.run(run.run_id).attempt(1)
            await wait_for_phase(supervisor, run.run_id, Phase.RUNNING)
            await wait_until(lambda: 400 in _steps(home, run.run_id), "its last step")
            (attempt.path / "checkpoints").mkdir()
            evil.torch_zip(attempt.path / "checkpoints" / "model.pt")
            (attempt.work / "over").touch()
            await wait_for_end(supervisor, run.run_id)
            return supervisor.registry.checkpoints()

    (row,) = asyncio.run(body())

    assert (row.env_step, row.step_text) == (step, shown)
    # Episode e returned e, and one ended with each of forty updates.
    assert row.metrics_digest == ({} if step is None else {"last": 40.0, "best": 40.0, "mean_100": 20.5})


def test_a_row_of_an_earlier_version_gets_its_true_step_when_a_service_starts(home):
    attempt, registry = place(home)
    registry.put(RUN)
    sb3 = attempt.path / "checkpoints" / "model.zip"
    sb3.parent.mkdir()
    with zipfile.ZipFile(sb3, "w") as archive:
        archive.writestr("data", '{"num_timesteps": 11992}')
        archive.writestr("policy.pth", b"")
    CheckpointCatalogue(registry).scan_attempt(RUN, attempt, [])
    (row,) = registry.checkpoints()
    registry.put_checkpoint(replace(row, env_step=10_623, step_source=""))

    assert CheckpointCatalogue(registry).add_missing(home) == 0

    assert registry.checkpoints() == [row]
    assert (row.env_step, row.step_source) == (11_992, "file")
    registry.close()


@pytest.mark.parametrize(
    ("name", "step"),
    [("step_10.pt", 10), ("checkpoint-500", 500), ("rl_model_4000_steps.zip", 4000), ("update_00000120", None)],
)
def test_a_name_says_the_step_only_where_it_counts_steps(tmp_path, name, step):
    assert CheckpointStep.from_file(tmp_path / name).env_step == step


def test_our_own_checkpoints_need_no_journal_to_be_listed(home):
    attempt, registry = place(home)
    sha256 = own_checkpoint(attempt.path / "checkpoints" / "update_00000003", env_step=4096)
    (attempt.path / "checkpoints" / "best.json").write_text('{"checkpoint": "update_00000003", "score": 30.0}')

    (row,) = find_checkpoints(RUN, attempt)

    assert (row.sha256, row.format, row.env_step, row.best, row.metric) == (sha256, "palaestra", 4096, True, 30.0)
    assert row.metrics_digest == {"last": 20.0, "best": 30.0, "mean_100": 20.0}
    registry.close()


def test_a_row_of_an_earlier_version_gets_the_dataset_of_its_checkpoint(home):
    attempt, registry = place(home)
    dataset = {"dataset_id": "cartpole/random-v0", "sha256": "0" * 64, "env_id": "CartPole-v1"}
    own_checkpoint(attempt.path / "checkpoints" / "update_00000003", dataset={**dataset, "random_score": 20.0})
    (row,) = find_checkpoints(RUN, attempt)
    registry.put_checkpoint(replace(row, offline_dataset={}))

    CheckpointCatalogue(registry).scan_attempt(RUN, attempt, ())

    assert [row.offline_dataset for row in registry.checkpoints()] == [dataset]
    registry.close()


def test_a_changed_byte_a_missing_file_and_a_cut_one_are_told_apart(home):
    attempt, registry = place(home)
    path = attempt.path / "checkpoints" / "update_00000003"
    own_checkpoint(path)
    (row,) = find_checkpoints(RUN, attempt)
    policy = path / "policy.safetensors"
    whole = policy.read_bytes()

    assert verify(row).fits
    policy.write_bytes(whole[:-1] + b"\xff")
    assert verify(row, clock=lambda: 9.0).problem == "policy.safetensors was changed or damaged: its SHA-256 differs"
    assert verify(row, clock=lambda: 9.0).verified_time == -9.0
    policy.write_bytes(whole[:-1])
    assert "truncated" in verify(row).problem
    policy.unlink()
    assert "is missing" in verify(row).problem
    registry.close()


def _steps(home, run_id):
    return {record.event.env_step for record in read_journal(home, run_id) if isinstance(record.event, TrainingStep)}


def _ids(supervisor):
    return {row.checkpoint_id for row in supervisor.registry.checkpoints()}


def test_rows_follow_a_run_that_is_packed_thrown_away_and_brought_back(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue) as supervisor:
            run = await supervisor.submit(echo(steps=20, rate=0, checkpoint_every=10))
            await wait_for_end(supervisor, run.run_id)
            seen = [_ids(supervisor)]
            for change in (supervisor.archive, supervisor.restore, supervisor.delete, supervisor.restore):
                await change(run.run_id)
                seen.append(_ids(supervisor))
            return seen

    ended, packed, unpacked, deleted, back = asyncio.run(body())

    assert len(ended) == 2
    assert packed == deleted == set()
    assert unpacked == back == ended


def test_surplus_checkpoints_go_when_the_policy_says_so(home):
    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue, retention={"keep_checkpoints": 1}) as supervisor:
            run = await supervisor.submit(echo(steps=30, rate=0, checkpoint_every=10))
            await wait_for_end(supervisor, run.run_id)
            before = sorted((row.env_step, row.path) for row in supervisor.registry.checkpoints())
            told = await supervisor.gc()
            kept = [row.path for row in supervisor.registry.checkpoints()]
            await supervisor.gc(dry_run=False)
            return before, told, kept, [row.path for row in supervisor.registry.checkpoints()]

    before, (action,), kept, left = asyncio.run(body())

    assert len(before) == len(kept) == 3
    assert (action.action, action.why) == ("prune", "2 checkpoints beyond the newest 1 and the best")
    assert sorted(action.paths) == sorted(path for _, path in before[:2])
    assert left == [before[2][1]]
    assert [Path(path).exists() for _, path in before] == [False, False, True]
