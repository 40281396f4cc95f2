"""What `palaestra runs gc` says it would do, and that it does just that."""

import asyncio
import shutil

import pytest
from tests.runs.checkpoints.own import own_checkpoint
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.errors import ConfigError, UnknownRun
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue
from palaestra.runs.checkpoints.deploy import Deployment, _replace_deployment, find_deployed_paths
from palaestra.runs.checkpoints.files import digest_path

DAY = 86_400.0


async def _ended(supervisor, **config):
    run_id = (await supervisor.submit(echo(steps=1, **config))).run_id
    await wait_for_end(supervisor, run_id)
    return run_id


def test_the_dry_run_lists_everything_that_the_real_one_does(home):
    now = [0.0]
    policy = {"keep_clips": 1, "log_mb": 11, "undo_days": 7}

    async def body():
        async with run_supervisor(home, retention=policy, clock=lambda: now[0]) as supervisor:
            kept, gone = await _ended(supervisor), await _ended(supervisor)
            attempt = home.run(kept).attempt(1)
            attempt.videos.mkdir()
            for number in range(3):
                (attempt.videos / f"{number}.webm").write_bytes(b"clip")
            attempt.stdout.write_bytes(b"x" * (12 << 20))
            await supervisor.delete(gone)
            assert [action.action for action in await supervisor.gc()] == ["clips", "shorten"]
            now[0] += 8 * DAY
            planned = await supervisor.gc()
            assert len(list(attempt.videos.iterdir())) == 3
            assert attempt.stdout.stat().st_size == 12 << 20
            assert len(list((home.path / "trash").iterdir())) == 1
            done = await supervisor.gc(dry_run=False)
            left = len(list(attempt.videos.iterdir())), attempt.stdout.stat().st_size
            return kept, gone, planned, done, left, await supervisor.gc()

    kept, gone, planned, done, left, after = asyncio.run(body())

    assert done == planned
    assert after == []
    assert [(action.run_id, action.action) for action in planned] == [
        (kept, "clips"),
        (kept, "shorten"),
        (gone, "purge"),
    ]
    assert [action.bytes for action in planned[:2]] == [8, 2 << 20]
    assert planned[2].bytes > 100
    assert planned[2].why == "deleted 8 days ago; deleted runs are kept 7"
    assert left[0] == 1
    assert left[1] < 11 << 20
    assert list((home.path / "trash").iterdir()) == []


def test_a_favorite_keeps_everything_and_is_archived_only_by_hand(home):
    policy = {"archive_after_days": 0, "delete_archived_after_days": 0, "keep_clips": 0, "log_mb": 11}

    async def body():
        async with run_supervisor(home, retention=policy) as supervisor:
            favorite, other = await _ended(supervisor), await _ended(supervisor)
            await supervisor.edit(favorite, {"favorite": True})
            attempt = home.run(favorite).attempt(1)
            attempt.videos.mkdir()
            (attempt.videos / "0.webm").write_bytes(b"clip")
            attempt.stdout.write_bytes(b"x" * (12 << 20))
            first = await supervisor.gc(dry_run=False)
            assert attempt.stdout.stat().st_size == 12 << 20
            assert (await supervisor.archive(favorite)).favorite
            return other, first, await supervisor.gc(dry_run=False)

    other, first, second = asyncio.run(body())
    assert [(action.run_id, action.action) for action in first] == [(other, "archive")]
    assert [(action.run_id, action.action) for action in second] == [(other, "delete")]  # and not the favorite


def test_a_run_that_becomes_a_favorite_while_the_policy_is_applied_is_kept(home):
    async def body():
        async with run_supervisor(home, retention={"archive_after_days": 0}) as supervisor:
            run_id = await _ended(supervisor)
            (action,) = await supervisor.gc()
            await supervisor.edit(run_id, {"favorite": True})
            return await supervisor._apply_retention(action), supervisor.get_run(run_id)

    action, record = asyncio.run(body())
    assert action.failed == f"{record.run_id} has been marked as a favorite"
    assert not record.archived


def test_a_run_that_cannot_be_packed_keeps_no_other_from_it(home):
    async def body():
        async with run_supervisor(home, retention={"archive_after_days": 0}) as supervisor:
            first, second = await _ended(supervisor), await _ended(supervisor)
            shutil.rmtree(home.run(first).path)
            return first, second, await supervisor.gc(dry_run=False)

    first, second, done = asyncio.run(body())

    assert [(action.run_id, bool(action.failed)) for action in done] == [(first, True), (second, False)]
    assert "holds no run" in done[0].failed
    assert (home.path / "archive" / f"{second}.tar.gz").exists()


def _deployed_where_it_lies(home, path):
    """As deployments were once written: the checkpoint stays in its run."""
    record = digest_path(path)
    facts = {
        "checkpoint_id": record.sha256[:16],
        "path": str(path),
        "sha256": record.sha256,
        "agent_id": "palaestra/ppo",
    }
    return _replace_deployment(home, Deployment(env_id="CartPole-v1", deployed=1.0, command=(), **facts))


def test_what_is_deployed_inside_of_a_run_keeps_it_from_being_put_away(home):
    policy = {"archive_after_days": 0, "keep_checkpoints": 1}

    async def body():
        async with run_supervisor(home, catalogue=CheckpointCatalogue, retention=policy) as supervisor:
            run_id = await _ended(supervisor)
            checkpoints = home.run(run_id).attempt(1).path / "checkpoints"
            for number in (1, 2):
                own_checkpoint(checkpoints / f"update_{number}", env_step=number, seed=number)
            (home.path / "deployed").mkdir()
            _deployed_where_it_lies(home, checkpoints / "update_1")
            supervisor._catalogue.refresh_run(home, supervisor.get_run(run_id))
            for put_away in (supervisor.archive, supervisor.delete):
                with pytest.raises(
                    ConfigError, match=r"update_1 is or was deployed in CartPole-v1.*checkpoints deploy [0-9a-f]+"
                ):
                    await put_away(run_id)
            assert await supervisor.gc() == []
            assert await supervisor.gc(dry_run=False) == []
            assert (checkpoints / "update_1").is_dir()
            return run_id

    run_id = asyncio.run(body())
    assert [path.parents[2].name for path in find_deployed_paths(home)] == [run_id]


def test_a_run_that_was_put_away_is_restored_by_the_beginning_of_its_id(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            packed, thrown = await _ended(supervisor, name="packed"), await _ended(supervisor, name="thrown")
            both = await _ended(supervisor, name="packed")
            await supervisor.archive(packed)
            await supervisor.delete(thrown)
            assert (await supervisor.restore("pack")).run_id == packed
            assert (await supervisor.restore("thr")).run_id == thrown
            for run_id in (packed, both):
                await supervisor.archive(run_id)
            await supervisor.delete(both)
            with pytest.raises(UnknownRun, match=r"is a prefix of several runs\. Which of packed-"):
                await supervisor.restore("packed-")
            with pytest.raises(UnknownRun, match="neither archived nor in the trash"):
                await supervisor.restore("unknown")
            assert not (await supervisor.restore(both)).archived
            assert not home.run(packed).path.exists()

    asyncio.run(body())
