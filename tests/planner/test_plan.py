"""Plans from measured runs: what limits a run, what it costs, and what is refused."""

import pytest

from palaestra.errors import ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.planner.measurement import fit_times, read_run
from palaestra.planner.plan import build_plan, plan_config, scale_plan
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import Journal

TIMES = {"session_step": 0.6, "inference_batch": 1.5, "update_episode": 2.0, "turns": 12, "session_variation": 0}
SETUP = {"sessions": 64, "batch_size": 64, "collection": "asynchronous"}


def written_run(root, *, sessions=4, batch=8, collection="synchronous", collect=1.2, busy=0.4, learn=0.4, updates=5):
    """A run on screens whose updates took collecting and learning, and nothing else, in two turns an episode."""
    config = {
        "model": {"name": "tiny", "lora_rank": 8}, "trainer": {"batch_size": batch, "collection": collection},
        "actor_pool": {"target_concurrent_actors": sessions},
    }  # fmt: skip
    run = RunDirectory.create(root, f"run-{sessions}-{batch}-{collection[0]}", "", config)
    attempt = run.new_attempt(["palaestra"], config)
    clock = [0.0]
    with Journal(attempt.journal, clock=lambda: clock[0]) as journal:
        for update in range(1, updates + 1):
            clock[0] += collect + learn
            metrics = {"collect_seconds": collect, "inference_utilisation": busy / collect, "learn_seconds": learn}
            journal.emit_many(EpisodeSummary(0, number, 0, 1.0, 2) for number in range(batch))
            journal.emit(TrainingStep(update, update * batch, metrics))
    return run


def test_a_measured_run_gives_the_times_of_its_parts(tmp_path):
    # 8 episodes of 2 turns on 4 sessions are 4 rounds: 0.1 s of sampling and 0.2 s of a session step each.
    times = fit_times([read_run(written_run(tmp_path))])
    assert times.inference_batch == pytest.approx(0.1, rel=1e-3)
    assert times.session_step == pytest.approx(0.2, rel=1e-3)
    assert times.update_episode == pytest.approx(0.05)
    assert (times.inference_reply, times.overhead, times.failure_rate) == (0, pytest.approx(0, abs=1e-9), 0)


def test_two_runs_show_how_times_grow_with_the_batch(tmp_path):
    # 0.06 s and 0.02 s per reply: 0.08 s alone, 0.14 s for four; learning 0.1 s and 0.04 s per episode.
    one = written_run(tmp_path, sessions=1, batch=4, collect=8 * 0.28, busy=8 * 0.08, learn=0.26)
    four = written_run(tmp_path, sessions=4, batch=8, collect=4 * 0.34, busy=4 * 0.14, learn=0.42)
    times = fit_times([read_run(one), read_run(four)])
    assert times.inference_batch == pytest.approx(0.06, rel=1e-2)
    assert times.inference_reply == pytest.approx(0.02, rel=1e-2)
    assert times.update == pytest.approx(0.1, rel=1e-2)
    assert times.update_episode == pytest.approx(0.04, rel=1e-2)
    assert times.session_step == pytest.approx(0.2, rel=1e-2)


def test_runs_without_the_numbers_of_a_plan_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has 2 updates"):
        read_run(written_run(tmp_path / "short", updates=2))
    with pytest.raises(ConfigError, match=r"trainer.collection=synchronous"):
        read_run(written_run(tmp_path, collection="asynchronous"))
    offline = RunDirectory.create(tmp_path, "offline", "", {"env": {"id": "x"}})
    attempt = offline.new_attempt([], {"env": {"id": "x"}})
    with Journal(attempt.journal) as journal:
        for update in range(1, 5):
            journal.emit(TrainingStep(update, 0, {"loss": 1.0}))
    with pytest.raises(ConfigError, match="no collect_seconds"):
        read_run(offline)


def test_a_plan_from_a_run_predicts_that_run_and_another_number_of_sessions(tmp_path):
    run = read_run(written_run(tmp_path))
    same = build_plan(plan_config({"hardware": {"gpus": 1}}, [run]))
    assert same.throughput.update_seconds == pytest.approx(1.6, rel=0.01)
    more = build_plan(plan_config({"hardware": {"gpus": 1}, "setup": {"sessions": 8}}, [run]))
    assert more.throughput.update_seconds == pytest.approx(2 * 0.3 + 0.4, rel=0.01)
    assert same.config.model.name == "tiny"


def test_the_slowest_part_is_named_and_more_of_it_advised():
    def limit(**more):
        plan = build_plan(plan_config({"times": TIMES | more, "setup": SETUP, "hardware": {"gpus": 2}, "model": None}))
        return plan.bottleneck, " ".join(plan.advice)

    bottleneck, advice = limit()  # 64 sessions / 2.1 s = 30, 64 / 1.5 s = 43, 12 / 2 s = 6 turns a second
    assert bottleneck == "learner"
    assert "5.1 times as much" in advice
    assert limit(update_episode=0.01)[0] == "sessions"
    assert limit(update_episode=0.01, inference_reply=0.1)[0] == "samplers"
    alone = build_plan(plan_config({"times": TIMES, "setup": SETUP, "hardware": {"gpus": 1}, "model": None}))
    assert alone.bottleneck == "GPU"  # 1 / (1/43 + 1/6)
    assert alone.rates["GPU"] == pytest.approx(1 / (1.5 / 64 + 2 / 12))


def test_a_bound_that_is_too_tight_is_named_when_no_part_is_busy():
    # Episodes of very different lengths: the short ones of a batch wait for the long ones, and nothing else may start.
    times = TIMES | {"update_episode": 0.01, "turns_variation": 1.0}
    data = {"times": times, "setup": SETUP | {"max_staleness": 0}, "hardware": {"gpus": 8}, "model": None}
    plan = build_plan(plan_config(data))
    assert plan.bottleneck == "staleness"
    assert "raise trainer.max_staleness" in plan.advice[0]
    looser = build_plan(plan_config(data | {"setup": SETUP | {"max_staleness": 4}}))
    assert looser.bottleneck != "staleness"
    assert looser.episodes_per_hour > 1.5 * plan.episodes_per_hour


def test_sessions_beyond_the_staleness_bound_do_not_count():
    plan = build_plan(plan_config({"times": TIMES, "setup": SETUP | {"sessions": 500}, "model": None}))
    assert plan.running_sessions == 128
    assert "372 of 500 sessions never run" in plan.advice[0]
    assert "trainer.batch_size=250" in plan.advice[0]


def test_an_hour_costs_gpus_and_cores_and_failures_cost_time():
    data = {"times": TIMES, "setup": SETUP, "model": None}
    hardware = {"gpus": 100, "gpu_hour_price": 3.0, "core_hour_price": 0.5, "sessions_per_core": 4}
    hardware |= {"gpu_hours_between_failures": 1000, "restart_seconds": 300, "checkpoint_seconds": 120}
    plan = build_plan(plan_config(data | {"hardware": hardware}))
    assert plan.cost.session_cores == 16
    assert plan.cost.per_hour == 100 * 3.0 + 16 * 0.5
    assert plan.config.hardware.lost_share == pytest.approx(
        0.1 * 360 / 3600
    )  # one failure in ten hours, 6 minutes each
    assert plan.cost.per_1000_updates == pytest.approx(1000 * 308 / plan.updates_per_hour)
    assert plan.cost.per_1000_episodes == pytest.approx(plan.cost.per_1000_updates / 64)


def test_a_model_that_does_not_fit_one_gpu_is_split_and_one_that_never_fits_is_refused():
    big = {"name": "qwen2.5-vl-72b", "gradient_checkpointing": True, "history": 0}
    data = {"times": TIMES, "setup": SETUP, "model": big}
    plan = build_plan(plan_config(data | {"hardware": {"gpus": 16}}))
    assert plan.placement.learner_shards == plan.placement.learner_gpus > 1
    assert plan.placement.sampler_shards == 2  # 147 GB of weights on two GPUs of 80 GB leave room for 5 replies
    assert plan.placement.learner_memory.total < 80e9
    with pytest.raises(ConfigError, match=r"hardware.gpu_memory_gb = 24.0: .*needs \d+ GB on each"):
        build_plan(plan_config(data | {"hardware": {"gpus": 2, "gpu_memory_gb": 24.0}}))


def test_the_split_of_the_gpus_can_be_given_and_must_leave_a_learner():
    data = {"times": TIMES, "setup": SETUP, "model": None}
    plan = build_plan(plan_config(data | {"hardware": {"gpus": 8, "samplers": 3}}))
    assert (plan.placement.sampler_gpus, plan.placement.learner_gpus) == (3, 5)
    with pytest.raises(ConfigError, match="leaves no GPU of 8"):
        build_plan(plan_config(data | {"hardware": {"gpus": 8, "samplers": 8}}))


def test_the_table_has_8_64_and_512_gpus_and_10000_sessions_that_all_run():
    config = plan_config({"times": TIMES, "setup": SETUP, "hardware": {"gpus": 8}, "model": None})
    rows = scale_plan(build_plan(config))
    assert [(row.config.hardware.gpus, row.config.setup.sessions) for row in rows] == [
        (8, 64), (64, 512), (512, 4096), (8, 10_000), (64, 10_000), (512, 10_000),
    ]  # fmt: skip
    assert all(row.running_sessions == row.config.setup.sessions for row in rows)
    assert all(row.config.setup.batch_size % 64 == 0 for row in rows)
    # With 10,000 sessions learning is the limit on 8 GPUs: 7 of them, 12 turns in 2 s each.
    assert rows[3].episodes_per_hour == pytest.approx(7 * 3600 / 2, rel=0.02)
    assert rows[5].episodes_per_hour > 20 * rows[3].episodes_per_hour


def test_a_training_configuration_sets_model_batch_and_sessions():
    config = plan_config(
        {
            "model": {"name": "Qwen/Qwen2.5-VL-7B-Instruct", "lora_rank": 8, "dtype": "auto", "device": "cuda"},
            "trainer": {"batch_size": 128, "collection": "asynchronous", "max_staleness": 2, "microbatch_turns": 4},
            "actor_pool": {"target_concurrent_actors": 32},
            "setup": {"sessions": 48},
        }
    )
    assert (config.model.lora_rank, config.model.dtype, config.model.microbatch_turns) == (8, "bfloat16", 4)
    assert config.setup.model_dump(include={"sessions", "batch_size", "max_staleness"}) == {
        "sessions": 48, "batch_size": 128, "max_staleness": 2,
    }  # fmt: skip
    vector = plan_config({"env": {"id": "CartPole-v1", "num_envs": 16}, "trainer": {}})
    assert vector.model is None
    assert (vector.setup.rows, vector.setup.sessions, vector.setup.batch_size) == (16, 1, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"times": {"session_step": -1}}, r"times.session_step = -1: .*greater than or equal to 0"),
        ({"hardware": {"gpus": 0}}, r"hardware.gpus = 0"),
        ({"hardware": {"gpu": 8}}, r"Did you mean 'gpus'"),
        ({"timings": {}}, r"Did you mean 'times'"),
        ({"times": {"failure_rate": 1.0}}, r"times.failure_rate = 1.0"),
        ({"times": 3}, r"times = 3: is not a mapping"),
    ],
)
def test_wrong_numbers_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        plan_config(data)
