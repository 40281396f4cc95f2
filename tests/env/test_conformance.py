"""All implementations keep the rules, and the kit notices when one does not."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.env.faulty import Faulty

from palaestra.env import toy
from palaestra.env.conformance import check
from palaestra.env.factory import EnvFactory
from palaestra.env.in_process import InProcessEnv
from palaestra.env.native import NativeEnv
from palaestra.env.workers import WorkerEnv

_TOYS = [toy.Bandit, toy.Countdown, toy.Gate, toy.MaskedChoice, toy.MixedSenses, toy.Pixels, toy.TargetReach]


@pytest.mark.parametrize("make", [*_TOYS, partial(Faulty, fault="none"), EnvFactory("CartPole-v1")])
def test_the_in_process_form_keeps_the_rules(make):
    check(lambda: InProcessEnv(make, 3))


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("make", _TOYS)
def test_the_native_form_keeps_the_rules_in_every_autoreset_mode(make, mode):
    check(lambda: NativeEnv(SyncVectorEnv([make] * 3, autoreset_mode=mode)), steps=60)


def test_the_native_cartpole_keeps_the_rules():
    check(lambda: NativeEnv(gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")))


@pytest.mark.parametrize("make", [toy.MaskedChoice, toy.MixedSenses])
def test_the_worker_form_keeps_the_rules(make):
    check(lambda: WorkerEnv(make, 3, 2), steps=40)


class _Unwritten(InProcessEnv):
    def step(self, action, row):
        kept = row.reward.copy()
        ended = super().step(action, row)
        row.reward[:] = kept
        return ended


class _Unseeded(InProcessEnv):
    def reset(self, seed, row):
        super().reset(int(np.random.default_rng().integers(2**31)), row)


class _Miscounted(InProcessEnv):
    def step(self, action, row):
        return [end._replace(length=end.length + 1) for end in super().step(action, row)]


class _Underpaid(InProcessEnv):
    def step(self, action, row):
        return [end._replace(episode_return=0.0) for end in super().step(action, row)]


class _Silent(InProcessEnv):
    def step(self, action, row):
        super().step(action, row)
        return []


class _Forgetful(InProcessEnv):
    def restore(self, snapshot, row):
        self.reset(0, row)
        return True


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (_Unwritten, "every field of the row is written"),
        (_Unseeded, "the same seed gives the same first observation"),
        (_Miscounted, "EpisodeEnd.length counts"),
        (_Underpaid, "EpisodeEnd.episode_return is the sum"),
        (_Silent, "EpisodeEnd is given once"),
        (_Forgetful, "restore writes the observation"),
    ],
)
def test_a_broken_rule_is_named(broken, rule):
    with pytest.raises(AssertionError, match=rule):
        check(lambda: broken(partial(toy.TargetReach, length=7), 2), steps=30)
