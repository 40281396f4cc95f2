"""Same inputs, same machine: the same bits, whatever the kernel cache holds and in whatever order it was filled."""

import os
import subprocess
import sys

import pytest

# `inner` is too large for LLVM to inline it unasked, and has sums that may be reassociated.
NESTED = """
import hashlib
import sys

import numpy as np

from palaestra.kernels.compile import compile_kernel

@compile_kernel
def inner(rows, x, out):
    n = rows.shape[0]
    mean, spread, loss = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(n):
        mean += x[rows[i]]
    mean *= np.float32(1.0) / np.float32(n)
    for i in range(n):
        spread += (x[rows[i]] - mean) ** 2
    scale = np.float32(1.0) / np.sqrt(spread)
    for i in range(n):
        a = (x[rows[i]] - mean) * scale
        ratio = np.exp(a)
        loss += ratio - np.float32(1.0) - a - min(a * ratio, a * min(max(ratio, np.float32(0.8)), np.float32(1.2)))
        out[i] = a * ratio
    out[0] = loss

@compile_kernel
def outer(rows, x, out):
    for start in range(0, rows.shape[0], 50):
        inner(rows[start : start + 50], x, out[start : start + 50])
    inner(rows, x, out)

rng = np.random.default_rng(0)
x, rows, out = rng.standard_normal(1003).astype(np.float32), rng.permutation(1003), np.empty(1003, np.float32)
for name in sys.argv[1:]:
    {"inner": inner, "outer": outer}[name](rows, x, out)
print(hashlib.sha256(out.tobytes()).hexdigest(), sum(outer.stats.cache_hits.values()))
"""

TRAINING = """
import hashlib
import sys

from palaestra.env import as_vector_env
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer

env = as_vector_env(sys.argv[1], num_envs=4)
policy = ActorCritic(env.observation_space, env.action_space, seed=0)
Trainer(policy, env, PPO(n_epochs=4, batch_size=128), seed=0, compiled="on").train(1024, rollout_length=128)
digest = hashlib.sha256()
for value in policy.state_dict().values():
    digest.update(value.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.fixture
def run(tmp_path):
    """Run a script in a process of its own with a kernel cache by name, and return the words that it printed."""

    def _run(code, cache, *arguments):
        script = tmp_path / "script.py"
        if not script.exists():  # numba takes a file that was written again for another one
            script.write_text(code)
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / cache), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(script), *arguments]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return _run


def test_a_kernel_that_calls_another_gives_the_same_bits_compiled_and_loaded_in_any_order(run):
    compiled, hits = run(NESTED, "one", "outer")
    assert hits == "0"
    assert run(NESTED, "one", "outer") == [compiled, "1"]
    assert run(NESTED, "one", "inner", "outer") == [compiled, "1"]
    run(NESTED, "other", "inner")
    assert run(NESTED, "other", "outer") == [compiled, "0"]


def test_training_gives_the_same_weights_with_an_empty_and_with_a_full_kernel_cache(run):
    assert run(TRAINING, "cache", "CartPole-v1") == run(TRAINING, "cache", "CartPole-v1")


@pytest.mark.slow
def test_training_gives_the_same_weights_when_another_run_filled_a_part_of_the_kernel_cache(run):
    alone = run(TRAINING, "pendulum", "Pendulum-v1")
    run(TRAINING, "both", "CartPole-v1")
    assert run(TRAINING, "both", "Pendulum-v1") == alone
    assert run(TRAINING, "both", "Pendulum-v1") == alone
