"""Actors on a real Ray cluster of several nodes: the same numbers as on one machine, also after nodes were killed."""

import ast
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.actor import rooms
from tests.actor.ray_clusters import NODE, Reader, actors_on, kill_node, start_cluster, wait_until

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.actor.cluster.env_share import RemoteEnvs, divide
from palaestra.actor.cluster.episode_workers import ClusterEpisodes, check_sessions
from palaestra.env import EnvConfig, make_env
from palaestra.errors import CollectorFailed, ConfigError
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.files.run_directory import RunDirectory
from palaestra.learner import PPO
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.sessions.clients import provider
from palaestra.sessions.environment_config import EnvironmentConfig
from palaestra.telemetry import JournalReader
from palaestra.telemetry.event import LogLine
from palaestra.train import build_trainer, config_from, train
from palaestra.train.held_out import load_screen_policy
from palaestra.train.screen_config import screen_config_from
from palaestra.train.screens import train_screens
from palaestra.train.vector import VectorTraining
from palaestra.transport.conformance import check_publisher, check_source
from palaestra.transport.object_store import ObjectStorePublisher
from palaestra.transport.ray_cluster import ActorsConfig, RayCluster

pytest.importorskip("ray")
SOURCES = Path(__file__).parents[2] / "src" / "palaestra"
COLUMNS = (
    "observation action log_prob value next_value reward terminated truncated valid policy_version policy_fingerprint"
).split()


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes, to which this process is connected."""
    import ray

    with start_cluster() as cluster:
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield cluster
        finally:
            ray.shutdown()


@pytest.fixture
def connect(nodes):
    """Connects with settings; ends the actors of the test, and checks that their processes have ended."""
    opened = []

    def connect(**settings):
        opened.append(
            RayCluster.connect(ActorsConfig(backend="ray", **{"num_cpus": 0.5, "start_timeout": 280, **settings}))
        )
        return opened[-1]

    yield connect
    for cluster in opened:
        cluster.close()
    wait_until(lambda: not any(actors_on(nodes.worker_nodes)))


def build(config, cluster=None, asynchronous=None, compiled="auto"):
    env = make_env(config.model_copy(update={"num_envs": 1})) if cluster else make_env(config)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=(16, 16)), seed=1)
    return VectorTraining(
        policy, RemoteEnvs(env, config.num_envs) if cluster else env, PPO(batch_size=config.num_envs * 4), seed=3,
        env_config=config, cluster=cluster, asynchronous=asynchronous, normalize_reward=True, compiled=compiled,
    )  # fmt: skip


def collect(training, batches, length=32, between=lambda number: None):
    """Learn from some batches; returns copies of what they held, and the episodes."""
    seen, episodes = [], []
    training.start(batches * length * training.env.num_envs, length)
    training.publisher.publish(0, training.learner.weights())
    with training.limit_threads():
        for number in range(batches):
            between(number)
            batch = training.source.next_batch()
            buffer = batch.experience
            seen.append({name: np.array(getattr(buffer, name)) for name in COLUMNS} | {"scale": buffer.reward_scale})
            episodes += batch.episodes
            training.learner.update(batch.experience)
            training.publisher.publish(training.learner.version, training.learner.weights())
            training.source.release(batch, training.learner.version)
    training.source.close()
    return seen, episodes


def assert_same(first, second):
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        for name in one:
            assert np.array_equal(one[name], other[name]), f"{name} of batch {number} differs"


@pytest.mark.parametrize(
    ("env_id", "num_envs", "num_actors", "compiled"),
    [
        ("Pendulum-v1", 4, 2, "off"),
        pytest.param("CartPole-v1", 8, 3, "auto", marks=pytest.mark.slow),
        pytest.param("compiled/CartPole-v1", 6, 2, "auto", marks=pytest.mark.slow),
    ],
)
def test_several_actors_collect_the_rollouts_of_one_local_collector_bit_for_bit(
    env_id, num_envs, num_actors, compiled, connect
):
    # Pendulum truncates all four episodes in one step, so their values are computed in one batch.
    config = EnvConfig(id=env_id, num_envs=num_envs)
    local = collect(build(config, compiled=compiled), 8)
    remote = collect(build(config, connect(num_actors=num_actors), compiled=compiled), 8)
    assert_same(local[0], remote[0])
    assert local[1] == remote[1]
    assert len(local[1]) >= num_envs


@pytest.mark.slow
def test_reproducible_asynchronous_actors_act_with_the_weights_of_a_local_collector(connect):
    config, settings = EnvConfig(id="CartPole-v1", num_envs=4), AsyncConfig(reproducible=True, max_staleness=2)
    local = collect(build(config, asynchronous=settings), 6)
    remote = collect(build(config, connect(), settings), 6)
    assert_same(local[0], remote[0])
    assert [int(batch["policy_version"][0]) for batch in remote[0]] == [0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "settings", [None, pytest.param(AsyncConfig(max_staleness=3), marks=pytest.mark.slow)], ids=["synchronous", "async"]
)
def test_rollouts_from_a_cluster_keep_the_promises_of_a_source(settings, connect):
    cluster = connect(num_actors=1)

    def make():
        training = build(EnvConfig(id="CartPole-v1", num_envs=2), cluster, settings)
        training.start(100_000, 8)
        training.publisher.publish(0, training.learner.weights())
        return training.source

    check_source(make)


def test_the_object_store_publishes_copies_by_version(connect):
    cluster = connect()
    policy = build(EnvConfig(id="CartPole-v1", num_envs=2)).policy
    publisher = ObjectStorePublisher(cluster, lambda policy: [p.detach().numpy() for p in policy.parameters()])
    reader = cluster.start_actor(Reader)

    def change():
        for parameter in policy.parameters():
            parameter.data.add_(1.0)

    def read():
        return publisher.newest, cluster.get(reader.read.remote(publisher.ref(publisher.newest)))

    check_publisher(publisher, lambda: policy, change, read)


def test_a_killed_actor_is_replaced_and_its_segment_is_collected_again_with_the_same_numbers(connect, nodes):
    config = EnvConfig(id="CartPole-v1", num_envs=5)
    local = collect(build(config), 6)
    training = build(config, connect())

    def kill(number):
        if number == 3:
            os.kill(next(pid for pids in actors_on(nodes.worker_nodes) for pid in pids), signal.SIGKILL)

    remote = collect(training, 6, between=kill)
    assert_same(local[0], remote[0])
    assert local[1] == remote[1]
    counts = training.source._workers.counts
    assert counts == {"lost_actors": 1, "retried_segments": 1, "discarded_results": 0, "lost_episodes": 0}
    assert "was lost" in training.source.failures[0]


@pytest.mark.slow
def test_a_killed_node_loses_no_segment_and_every_episode_is_counted_once(connect, nodes):
    config = EnvConfig(id="CartPole-v1", num_envs=4)
    node = nodes.add_node(**NODE, resources={"here": 2})
    training = build(config, connect(resources={"here": 0.5}), AsyncConfig(max_staleness=1))

    def kill(number):
        if number == 3:
            nodes.add_node(**NODE, resources={"here": 2})
            kill_node(nodes, node)

    seen, episodes = collect(training, 8, between=kill)
    counts = training.source._workers.counts
    assert counts["lost_actors"] == 2
    assert counts["lost_episodes"] == 4  # that were running, two on each actor
    assert training.source.progress.steps == 8 * 32 * 4
    ended = sum(int((batch["terminated"] | batch["truncated"]).sum()) for batch in seen)
    assert ended == len(episodes) == training.source.progress.episodes
    assert all(number - batch["policy_version"].min() <= 1 for number, batch in enumerate(seen))


def run_config(env="CartPole-v1", kwargs=None, actors=None, backend="gymnasium", **trainer):
    rooms.Room.made = 0
    defaults = {"total_timesteps": 6 * 64, "rollout_length": 16, "seed": 3}
    return config_from(
        {
            "env": {"id": env, "num_envs": 4, "kwargs": kwargs or {}, "backend": backend},
            "algorithm": {"n_epochs": 1, "batch_size": 32},
            "trainer": defaults | trainer,
            "actors": {"backend": "ray", "num_cpus": 0.5, "start_timeout": 280} if actors is None else actors,
            "telemetry": {"progress": False},
        }
    )


def weights_of(outcome):
    return (outcome.checkpoint / "policy.safetensors").read_bytes()


def test_one_changed_line_trains_the_same_policy_and_a_resume_continues_exactly(nodes, tmp_path):
    local = train(run_config(actors={}), root=tmp_path, run_id="local")
    part = train(run_config(total_timesteps=3 * 64), root=tmp_path, run_id="part")
    resumed = train(run_config(), root=tmp_path, run_id="-", resume=part.run)
    assert weights_of(local) == weights_of(resumed)
    assert resumed.final["episode_return"] == local.final["episode_return"]
    again = train(run_config(actors={}, total_timesteps=8 * 64), root=tmp_path, run_id="-", resume=resumed.run)
    assert again.steps == 512  # on this machine, with new episodes
    wait_until(lambda: not any(actors_on(nodes.worker_nodes)))


def test_actors_on_a_cluster_step_environments_of_envpool(nodes, tmp_path):
    pytest.importorskip("envpool")
    # As many actors as there are environments (4), although the cluster has no room for 100.
    actors = {"backend": "ray", "num_actors": 100, "num_cpus": 0.5, "start_timeout": 280}
    outcome = train(run_config(actors=actors, backend="envpool"), root=tmp_path, run_id="ray")
    local = train(run_config(actors={}, backend="envpool"), root=tmp_path, run_id="local")
    assert weights_of(outcome) == weights_of(local)
    wait_until(lambda: not any(actors_on(nodes.worker_nodes)))


def test_an_unusable_environment_is_refused_before_a_cluster_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(RayCluster, "connect", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(ConfigError, match=r"env.id = 'NoSuch-v0'"):
        train(run_config("NoSuch-v0"), root=tmp_path, run_id="a")


@pytest.mark.slow
def test_an_error_of_an_environment_ends_the_run_with_its_traceback_and_leaves_a_checkpoint(nodes, tmp_path):
    actors = {"backend": "ray", "num_actors": 1}
    config = run_config("tests.actor.rooms:Raising", {"at": 40}, actors, total_timesteps=10_000)
    with pytest.raises(CollectorFailed, match=r"environments 0–3 failed: .*the floor gave way.*The last good") as it:
        train(config, root=tmp_path, run_id="a")
    assert any("rollout_worker.py" in note for note in it.value.__notes__)
    assert RunDirectory(tmp_path / "a").latest_checkpoint() is not None
    wait_until(lambda: not any(actors_on(nodes.worker_nodes)))


@pytest.mark.slow
def test_an_actor_whose_code_failed_is_replaced_as_often_as_the_configuration_allows(nodes, tmp_path):
    settings = {"collection": "asynchronous", "collector_restarts": 9, "total_timesteps": 6 * 64}
    outcome = train(run_config("tests.actor.rooms:Raising", {"at": 40}, **settings), root=tmp_path, run_id="a")
    assert outcome.steps == 384
    assert outcome.final["lost_actors"] >= 1
    events = [record.event for record in JournalReader(outcome.run.attempts()[0].journal).read()]
    assert any(isinstance(event, LogLine) and "A collector was replaced" in event.text for event in events)


def test_an_actor_that_finds_no_room_is_named_with_what_is_free(connect):
    cluster = connect(num_actors=2, resources={"simulator": 1.0}, start_timeout=1.0)
    training = build(EnvConfig(id="CartPole-v1", num_envs=2), cluster)
    with pytest.raises(CollectorFailed, match=r"2 of 2 actors .* within actors.start_timeout \(1 s\). Each needs"):
        training.start(64, 8)


def test_more_actors_than_the_cluster_has_cpus_for_are_refused(nodes):
    with pytest.raises(ConfigError, match=r"actors.num_actors = 100: the run needs 100 actors of 1 CPUs, .* room for"):
        RayCluster.connect(ActorsConfig(backend="ray", num_actors=100))


# ---------------------------------------------------------------------- screens


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """A gateway whose sessions need no browser."""
    real = provider.subprocess.Popen
    patch = pytest.MonkeyPatch()
    fake = json.dumps([sys.executable, "-m", "palaestra.sessions.server", "--fake", "--port", "0"])
    patch.setattr(
        provider.subprocess, "Popen", lambda command, **how: real([*command, f"server_command={fake}"], **how)
    )
    with provider.start_gateway(max_sessions=16, servers=1) as address:
        patch.undo()
        token = tmp_path_factory.mktemp("gateway") / "token"
        token.write_text(address.token)
        yield {"gateway": address.url, "token_file": str(token)}


def screen_config(gateway, updates=2, actors=None, **trainer):
    return screen_config_from(
        {
            "experiment_name": "t", "model": {"name": "tiny", "max_new_tokens": 12, "history": 1, "lora_rank": 4},
            "tasks": [{"task": "fake/button"}], "algorithm": {"name": "ppo"},
            "trainer": {"batch_size": 4, "num_training_steps": updates, "learning_rate": 1e-3, **trainer},
            "actor": {"max_steps_per_episode": 2}, "actor_pool": {"target_concurrent_actors": 3},
            "environment": gateway, "telemetry": {"progress": False},
            "actors": {"backend": "ray", "num_cpus": 0.5, "start_timeout": 280} if actors is None else actors,
        }
    )  # fmt: skip


@pytest.mark.slow
def test_actors_on_a_cluster_play_the_episodes_of_a_local_run_and_learn_the_same_weights(nodes, gateway, tmp_path):
    local = train_screens(screen_config(gateway, actors={}), root=tmp_path, run_id="local")
    remote = train_screens(screen_config(gateway), root=tmp_path, run_id="ray")
    first, second = (load_screen_policy(outcome.run.latest_checkpoint())[1] for outcome in (local, remote))
    assert (first.fingerprint, first.version) == (second.fingerprint, second.version)
    assert second.version == 2
    played = [list(TrajectoryArchive(outcome.run.attempts()[0].trajectories).load()) for outcome in (local, remote)]
    assert len(played[0]) == len(played[1]) == 8
    for one, other in zip(*played, strict=True):
        assert one.episode_id == other.episode_id
        assert [turn.text for turn in one.turns] == [turn.text for turn in other.turns]
    wait_until(lambda: not any(actors_on(nodes.worker_nodes, "EpisodeWorker")))
    wait_until(lambda: not any(actors_on(nodes.worker_nodes, "SamplerWorker")))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["EpisodeWorker", "SamplerWorker"])
def test_a_lost_player_or_sampler_is_replaced_and_its_episodes_are_played_again_once(
    victim, nodes, gateway, tmp_path, monkeypatch
):
    real, killed = ClusterEpisodes.play, []

    async def play(self, request):
        if request.episode_id == "e00000006" and not killed:
            killed.append(next(pid for pids in actors_on(nodes.worker_nodes, victim) for pid in pids))
            os.kill(killed[0], signal.SIGKILL)
        return await real(self, request)

    monkeypatch.setattr(ClusterEpisodes, "play", play)
    outcome = train_screens(screen_config(gateway), root=tmp_path, run_id="a")
    assert killed
    assert outcome.final["lost_actors"] == 1.0
    assert outcome.final["lost_samplers"] == float(victim == "SamplerWorker")
    played = list(TrajectoryArchive(outcome.run.attempts()[0].trajectories).load())
    assert sorted(trajectory.episode_id for trajectory in played) == [f"e{number:08d}" for number in range(8)]
    assert outcome.steps == 8
    wait_until(lambda: not any(actors_on(nodes.worker_nodes, "EpisodeWorker")))


def test_sessions_of_one_machine_are_refused_on_a_cluster_of_several(connect, monkeypatch):
    cluster = connect()
    check_sessions(cluster, EnvironmentConfig())
    monkeypatch.setattr(cluster, "node_addresses", lambda: ["10.0.0.7", "10.0.0.8"])
    with pytest.raises(ConfigError, match=r"environment.gateway = None: the gateway that training starts .* 10.0.0.7"):
        check_sessions(cluster, EnvironmentConfig())
    with pytest.raises(ConfigError, match=r"environment.gateway = 'http://127.0.0.1:8700': is an address of this mach"):
        check_sessions(cluster, EnvironmentConfig(gateway="http://127.0.0.1:8700"))
    check_sessions(cluster, EnvironmentConfig(gateway="http://10.0.0.9:8700"))


# ---------------------------------------------------------------------- without a cluster


def test_shares_are_contiguous_and_differ_by_at_most_one():
    assert [(share.first, share.count) for share in divide(8, 3)] == [(0, 2), (2, 3), (5, 3)]
    assert [share.count for share in divide(2, 5)] == [1, 1]


def test_a_machine_without_ray_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"actors.backend = 'ray': the package ray is not installed. .*\[ray"):
        RayCluster.connect(ActorsConfig(backend="ray"))


def test_settings_that_a_cluster_cannot_have_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"actors.backend = 'ray': dqn learns from transitions"):
        config_from({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}, "actors": {"backend": "ray"}})
    with pytest.raises(ConfigError, match=r"trainer.overflow = 'overwrite_oldest': the segments of a cluster"):
        run_config(collection="asynchronous", overflow="overwrite_oldest")
    with pytest.raises(ConfigError, match=r"actors.backend = 'ray': a Trainer collects on this machine"):
        build_trainer(run_config())


def test_one_module_of_the_training_tower_imports_ray():
    importers = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(name.name.partition(".")[0] == "ray" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ray")
    }
    towers = [name for name in importers if not name.startswith("runs/")]
    assert towers == ["transport/ray_cluster.py"]
    assert len(importers) <= 2  # and one of the run service, for jobs
