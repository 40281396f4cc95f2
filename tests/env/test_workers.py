"""Environments in worker processes: the same data, and no way to lose a worker quietly."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from tests.env.faulty import Faulty

from palaestra.env.factory import EnvFactory
from palaestra.env.in_process import InProcessEnv
from palaestra.env.inspection import EnvProperties
from palaestra.env.spaces import allocate_row, random_actions, same_observation
from palaestra.env.toy import Countdown, Gate, MixedSenses, TargetReach
from palaestra.env.workers import WorkerEnv
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.processes.procfs import ProcessIdentity


def _reset_env(env, seed=0):
    row = allocate_row(env.observation_space, env.num_envs, env.mask_size)
    env.reset(seed, row)
    return row


def _same_play(one, left, other, right, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        action = random_actions(one.action_space, one.num_envs, rng)
        ended, also = one.step(action, left), other.step(action, right)
        assert same_observation(left.observation, right.observation)
        for name in ("reward", "terminated", "truncated", "valid"):
            assert np.array_equal(getattr(left, name), getattr(right, name))
        assert [(e.index, e.episode_return, e.length) for e in ended] == [
            (e.index, e.episode_return, e.length) for e in also
        ]


@pytest.mark.parametrize("make", [EnvFactory("CartPole-v1"), partial(MixedSenses, length=3)])
def test_workers_give_the_same_data_as_one_process(make):
    near, far = InProcessEnv(make, 5), WorkerEnv(make, 5, 2)
    try:
        _same_play(near, _reset_env(near, 4), far, _reset_env(far, 4), 60, seed=0)
    finally:
        far.close()


def test_a_snapshot_moves_between_workers_and_one_process():
    make = partial(TargetReach, length=7)
    near, far = InProcessEnv(make, 3), WorkerEnv(make, 3, 2)
    try:
        row = _reset_env(far, 1)
        rng = np.random.default_rng(0)
        for _ in range(12):
            far.step(random_actions(far.action_space, 3, rng), row)
        mirror = allocate_row(near.observation_space, 3)
        assert near.restore(far.snapshot(), mirror)
        _same_play(near, mirror, far, row, 20, seed=1)
        back = near.snapshot()
        assert far.restore(back, row)
        _same_play(near, mirror, far, row, 20, seed=2)
        back.arrays["observation"] = back.arrays["observation"] + 1
        assert not far.restore(back, row)
        assert row.observation[:, 0].tolist() == [0.0, 0.0, 0.0]
    finally:
        far.close()


def test_calls_and_their_answers_travel():
    env = WorkerEnv(Gate, 3, 2)
    try:
        assert env.call("set_difficulty", 2) == [2, 2, 2]
        assert _reset_env(env).observation.tolist() == [[2.0, 0.0]] * 3
    finally:
        env.close()


def test_a_killed_worker_is_named_within_a_second_and_nobody_is_left():
    env = WorkerEnv(Countdown, 4, 2)
    row = _reset_env(env)
    os.kill(env._workers[0].process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        EnvironmentContractError, match=r"worker 1 \(environments 2 to 3\) died \(killed by signal 9, SIGKILL"
    ):
        env.step(np.zeros(4, np.int64), row)
    assert time.monotonic() - began < 1.0
    assert multiprocessing.active_children() == []
    with pytest.raises(EnvironmentContractError, match="closed"):
        env.step(np.zeros(4, np.int64), row)


class DiesElsewhere(Countdown):
    """Kills its process in the first step, in every process but one."""

    def __init__(self, well_in):
        super().__init__()
        self._well = os.getpid() == well_in

    def step(self, action):
        if not self._well:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_a_worker_that_dies_in_a_step_ends_the_wait_of_its_parent_at_once(monkeypatch):
    # Longer than the limit of a test: only the news of the death can end the wait.
    monkeypatch.setattr("palaestra.env.workers._TIMEOUT_CHECK_S", 10_000.0)
    well = Countdown()
    properties = EnvProperties(0.0, well.observation_space, well.action_space, 0)
    env = WorkerEnv(partial(DiesElsewhere, os.getpid()), 3, 3, properties=properties)
    row = _reset_env(env)
    with pytest.raises(EnvironmentContractError, match=r"worker \d .* died \(killed by signal 9"):
        env.step(np.zeros(3, np.int64), row)
    assert multiprocessing.active_children() == []
    assert not [thread for thread in threading.enumerate() if thread.name == "palaestra-env-watch"]


def _faulty_in_workers(fault):
    # This process steps the first share: its environments stay well.
    here = os.getpid()
    return partial(FaultyElsewhere, here, fault)


class FaultyElsewhere(Faulty):
    """Fails at its sixth step, in every process but one."""

    def __init__(self, well_in, fault):
        super().__init__(fault=fault, at=10**9 if os.getpid() == well_in else 6)


@pytest.mark.parametrize(("fault", "told"), [("raise", "the simulator fell over"), ("exit", "SystemExit: 3")])
def test_a_failing_worker_tells_its_traceback_and_its_environment(fault, told):
    env = WorkerEnv(_faulty_in_workers(fault), 4, 2)
    row = _reset_env(env)
    for _ in range(5):
        env.step(np.zeros(4, np.int64), row)
    with pytest.raises(
        EnvironmentContractError, match=r"(?s)worker 1 \(environments 2 to 3\).*Traceback.*faulty.py.*" + told
    ) as error:
        env.step(np.zeros(4, np.int64), row)
    assert fault == "exit" or re.search(r"fell over \(.*faulty\.py:\d+, in step\)", str(error.value).splitlines()[0])
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("fault", "told"), [("raise", "the simulator fell over"), ("exit", "SystemExit: 3")])
def test_an_environment_that_fails_in_this_process_ends_the_workers_too(fault, told):
    env = WorkerEnv(partial(Faulty, fault=fault, at=6), 4, 2)
    row = _reset_env(env)
    for _ in range(5):
        env.step(np.zeros(4, np.int64), row)
    with pytest.raises(EnvironmentContractError, match="environment.* 0 .*" + told):
        env.step(np.zeros(4, np.int64), row)
    assert multiprocessing.active_children() == []


class Interrupted(Countdown):
    """Raises KeyboardInterrupt once, at its third step, in one process."""

    def __init__(self, where):
        super().__init__()
        self._until = 3 if os.getpid() == where else 0

    def step(self, action):
        self._until -= 1
        if self._until == 0:
            raise KeyboardInterrupt
        return super().step(action)


def test_after_an_interrupt_the_next_question_gets_its_own_answer():
    calm = Countdown()
    properties = EnvProperties(0.0, calm.observation_space, calm.action_space, 0)
    env = WorkerEnv(partial(Interrupted, os.getpid()), 2, 2, properties=properties)
    try:
        row = _reset_env(env)
        for _ in range(2):
            env.step(np.zeros(2, np.int64), row)
        with pytest.raises(KeyboardInterrupt):
            env.step(np.zeros(2, np.int64), row)
        assert len(env.call("get_wrapper_attr", "observation_space")) == 2
    finally:
        env.close()


class EndsEveryStep(Interrupted):
    """Every step ends an episode, so that every answer of a worker goes through its pipe."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, True, False, info


def test_episodes_that_ended_in_an_interrupted_step_are_not_taken_for_the_next_answer():
    calm = Countdown()
    properties = EnvProperties(0.0, calm.observation_space, calm.action_space, 0)
    env = WorkerEnv(partial(EndsEveryStep, os.getpid()), 2, 2, properties=properties)
    try:
        row = _reset_env(env)
        for _ in range(2):
            env.step(np.zeros(2, np.int64), row)
        with pytest.raises(KeyboardInterrupt):
            env.step(np.zeros(2, np.int64), row)
        while env._workers[0].signals.last_done != env._request:  # the test's time limit is the bound
            time.sleep(0.01)
        assert env.call("get_wrapper_attr", "action_space") == [calm.action_space] * 2
        assert [ended.index for ended in env.step(np.zeros(2, np.int64), row)] == [0, 1]
    finally:
        env.close()


def test_a_worker_whose_parent_is_killed_ends_by_itself():
    script = (
        "import sys, time\n"
        "from palaestra.env.toy import Countdown\n"
        "from palaestra.env.workers import WorkerEnv\n"
        "if __name__ == '__main__':\n"
        "    env = WorkerEnv(Countdown, 2, 2)\n"
        "    print(env._workers[0].process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        identity = ProcessIdentity.of(child)
        parent.kill()
    while identity.is_alive():  # the test's time limit is the bound
        time.sleep(0.05)


def test_a_script_without_a_main_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from palaestra.env.make import EnvConfig, make_env\n"
        "make_env(EnvConfig(id='CartPole-v1', num_envs=2, vectorization='workers', num_workers=2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "palaestra.errors.ConfigError: env.vectorization = 'workers': the script starts worker processes when it is "
        "imported, and each of them imports it. Put what the script does under `if __name__ == '__main__':`, because "
        "every child process imports the script; or use env.vectorization='in_process'."
    )
    assert done.stderr.count("Traceback") == 1


class Sleeper(Countdown):
    """Never answers to action 1, as a hung simulator does."""

    def step(self, action):
        if action == 1:
            signal.pause()
        return super().step(action)


def test_a_hung_worker_is_killed_and_named():
    # Not preflighted: its random actions would hang this process.
    awake = Countdown()
    env = WorkerEnv(Sleeper, 2, 2, properties=EnvProperties(0.0, awake.observation_space, awake.action_space, 0))
    row = _reset_env(env)
    env._timeout_s = 0.2
    with pytest.raises(EnvironmentContractError, match=r"worker 1 .* did not respond within 0.2 s"):
        env.step(np.array([0, 1]), row)
    assert multiprocessing.active_children() == []


def test_closing_leaves_no_process_and_no_shared_memory():
    before = set(os.listdir("/dev/shm"))
    env = WorkerEnv(Countdown, 2, 2)
    processes = [worker.process.pid for worker in env._workers]
    _reset_env(env)
    env.close()
    env.close()
    assert set(os.listdir("/dev/shm")) <= before
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_factories_that_cannot_be_pickled_and_impossible_shares_are_refused_before_any_process_starts():
    with pytest.raises(ConfigError, match="cannot be sent to a worker"):
        WorkerEnv(lambda: Countdown(), 2, 2)
    with pytest.raises(ConfigError, match=r"env\.num_workers = 3"):
        WorkerEnv(Countdown, 2, 3)


def test_a_wrong_batch_of_actions_is_refused():
    env = WorkerEnv(Countdown, 2, 1)
    try:
        row = _reset_env(env)
        with pytest.raises(EnvironmentContractError, match=r"\(3,\), expected \(2,\)"):
            env.step(np.zeros(3, np.int64), row)
    finally:
        env.close()
