"""Methods of environments, called on the vector of them."""

import gymnasium
import pytest

from palaestra.env import EnvConfig, as_vector_env, make_env
from palaestra.env.native import NativeEnv
from palaestra.env.toy import Gate

GATE = "palaestra.env.toy:Gate"


class Level(gymnasium.Wrapper):
    """A wrapper with a method of its own."""

    def twice(self, number):
        return 2 * number


@pytest.fixture(params=["in_process", "workers", "sync", "async"])
def env(request):
    if request.param in ("sync", "async"):
        kind = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}[request.param]
        made = NativeEnv(kind([Gate] * 2))
    else:
        made = make_env(EnvConfig(id=GATE, num_envs=2, vectorization=request.param, num_workers=2))
    yield made
    made.close()


def test_a_method_is_called_in_every_environment(env):
    assert env.set_difficulty(3) == [3, 3]
    assert env.call("difficulty") == [3, 3]


def test_what_the_environments_do_not_have_is_no_attribute_and_harms_nothing(env):
    assert not hasattr(env, "set_weather")
    with pytest.raises(AttributeError, match=r"neither \w+ nor the environments in it have a method 'set_weather'"):
        env.set_weather(1)
    assert not hasattr(env, "difficulty")  # no method: read it with call
    assert env.set_task(1) == [1, 1]


def test_a_method_of_a_wrapper_counts():
    env = as_vector_env([Level(Gate()), Level(Gate())])
    assert env.twice(4) == [8, 8]


def test_kernels_have_no_environments_to_call():
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    with pytest.raises(AttributeError, match="'set_difficulty'"):
        env.set_difficulty(1)


def test_an_environment_that_is_vectorised_itself_answers_for_all():
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=4, vectorization="native"))
    assert not hasattr(env, "set_difficulty")
    assert env.call("num_envs") == [4] * 4
