"""Every source and every publisher that we ship keeps what the training loop relies on; broken ones are found out."""

import pytest
import torch

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.env import EnvConfig, make_env
from palaestra.learner import PPO
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.train.vector import VectorTraining
from palaestra.transport.conformance import check_publisher, check_source
from palaestra.transport.source import Batch, SavedState, TrainingProgress
from palaestra.transport.weights import SharedWeights


class ListSource:
    """A source of prepared batches."""

    def __init__(self, batches):
        self._batches, self._position = list(batches), 0
        self.progress = TrainingProgress()

    def next_batch(self):
        if self._position == len(self._batches):
            return None
        self._position += 1
        self.progress.add(1)
        return Batch(self._batches[self._position - 1], steps=1)

    def release(self, batch, version):
        self.progress.updates += 1

    def requeue(self, batch):
        self._position -= 1
        self.progress.add(-1)

    def raise_if_failed(self):
        pass

    def metrics(self, batch, timing):
        return {"env_step": float(self.progress.steps)}

    def state(self):
        return SavedState({}, {"position": self._position})

    def load_state(self, state):
        self._position = int(state.facts["position"])
        return True

    def close(self):
        pass


def _training(asynchronous=None):
    config = EnvConfig(id="CartPole-v1", num_envs=2)
    env = make_env(config)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=(8,)), seed=1)
    return VectorTraining(
        policy, env, PPO(batch_size=16), seed=1, asynchronous=asynchronous, env_config=config
    )  # fmt: skip


def _ready(asynchronous=None):
    training = _training(asynchronous)
    training.start(100_000, 8)
    training.publisher.publish(0, training.learner.weights())
    return training.source


@pytest.mark.parametrize("collector", [None, "thread", "process"])
def test_sources_of_rollouts_keep_their_promises(collector):
    settings = None if collector is None else AsyncConfig(collector=collector, max_staleness=3)
    check_source(lambda: _ready(settings), requeues=collector is not None)


def test_a_list_is_a_source():
    check_source(lambda: ListSource(["a", "b", "c", "d"]))


@pytest.mark.parametrize(
    ("breaking", "rule"),
    [
        ({"next_batch": lambda self: None}, "returned None"),
        ({"release": lambda self, batch, version: None}, "progress.updates must be"),
        ({"metrics": lambda self, batch, timing: {"loss": float("nan")}}, "not finite"),
        ({"requeue": lambda self, batch: None}, "must be the next one"),
        ({"state": lambda self: ({"position": 3}, {})}, "must return a SavedState"),
        ({"state": lambda self: SavedState({}, {"position": object()})}, "plain JSON"),
        ({"state": lambda self: SavedState({"position": 3}, {})}, "must hold tensors"),
        ({"load_state": lambda self, state: None}, "must return whether"),
    ],
)
def test_a_source_that_breaks_a_rule_is_told_which(breaking, rule):
    broken = type("Broken", (ListSource,), breaking)
    with pytest.raises(AssertionError, match=rule):
        check_source(lambda: broken(["a", "b", "c", "d"]))


def _weights(policy):
    return [parameter.detach().clone().tolist() for parameter in policy.parameters()]


def _change(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)


def test_the_same_memory_publishes_every_update_at_once():
    policy = _training().policy
    check_publisher(
        SharedWeights(), lambda: policy, lambda: _change(policy), lambda: (None, _weights(policy)), copies=False
    )


def test_a_board_publishes_copies_by_version():
    training = _training(AsyncConfig())
    training.start(1000, 8)
    board = training.publisher.board
    targets = [array.copy() for array in training.learner.weights().read()]

    def read():
        return board.read_into(targets), [array.tolist() for array in targets]

    check_publisher(training.publisher, training.learner.weights, lambda: _change(training.policy), read)


def test_a_publisher_that_shares_memory_with_the_learner_is_found_out():
    policy = _training().policy
    with pytest.raises(AssertionError, match="weights that were not published"):
        check_publisher(SharedWeights(), lambda: policy, lambda: _change(policy), lambda: (None, _weights(policy)))
