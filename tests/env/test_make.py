"""From a configuration to environments: the choice of vectorisation, and every way of being refused."""

import sys
import types
from importlib.metadata import EntryPoint

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from palaestra.config import parse_section
from palaestra.env import factory, make
from palaestra.env.factory import EnvFactory
from palaestra.env.in_process import InProcessEnv
from palaestra.env.inspection import EnvProperties
from palaestra.env.make import EnvConfig, as_vector_env, known_environments, make_env
from palaestra.env.native import NativeEnv
from palaestra.env.spaces import allocate_row
from palaestra.env.toy import Countdown
from palaestra.env.workers import WorkerEnv
from palaestra.errors import ConfigError, UnknownEnvironment


def test_cheap_environments_stay_in_the_process_and_many_copies_use_the_native_form():
    few, many = make_env(EnvConfig(id="CartPole-v1")), make_env(EnvConfig(id="CartPole-v1", num_envs=16))
    assert isinstance(few, InProcessEnv)
    assert few.num_envs == 8
    assert isinstance(many, NativeEnv)
    assert many.num_envs == 16


@pytest.mark.parametrize(
    ("milliseconds", "busy", "cores", "num_envs", "processes"),
    [
        (1.0, 1.0, 4, 3, 3),  # computes: one process per core, at most one per environment
        (1.0, 1.0, 2, 8, 2),
        (1.0, 1.0, 1, 8, 1),  # one core: nothing to share
        (0.2, 1.0, 4, 8, 1),  # 1.6 ms for all eight is not worth it
        (37.0, 0.01, 2, 8, 8),  # waits: all at once, whatever the cores
        (37.0, 0.01, 1, 8, 8),
        (37.0, 0.01, 2, 100, 32),  # but not hundreds of processes unasked
        (10.0, 0.5, 2, 8, 4),  # half of a step on the core: two for each core
        (0.2, 0.01, 2, 8, 1),
    ],
)
def test_auto_shares_out_what_computes_over_cores_and_lets_what_waits_wait_together(
    monkeypatch, milliseconds, busy, cores, num_envs, processes
):
    made = []
    space = Countdown()
    properties = EnvProperties(milliseconds / 1e3, space.observation_space, space.action_space, 0, busy)
    monkeypatch.setattr(make, "inspect_env", lambda make, name, patience_s: properties)
    monkeypatch.setattr(make, "usable_cores", lambda: cores)
    monkeypatch.setattr(make, "WorkerEnv", lambda make, n, count, properties, first_index: made.append(count))
    make_env(EnvConfig(id="palaestra.env.toy:Countdown", num_envs=num_envs))
    assert made == ([] if processes == 1 else [processes])


def test_workers_can_be_asked_for():
    env = make_env(EnvConfig(id="palaestra.env.toy:Countdown", num_envs=2, vectorization="workers", num_workers=2))
    try:
        assert isinstance(env, WorkerEnv)
    finally:
        env.close()


def test_a_time_limit_of_ones_own_replaces_the_registered_one_in_every_form():
    for form in ("in_process", "native"):
        env = make_env(EnvConfig(id="CartPole-v1", num_envs=2, vectorization=form, max_episode_steps=3))
        row = allocate_row(env.observation_space, 2)
        env.reset(0, row)
        ended = [e.length for _ in range(3) for e in env.step(np.zeros(2, np.int64), row)]
        assert ended == [3, 3]
    toy = make_env(EnvConfig(id="palaestra.env.toy:Countdown", num_envs=1, max_episode_steps=2))
    row = allocate_row(toy.observation_space, 1)
    toy.reset(0, row)
    assert [e.length for _ in range(4) for e in toy.step(np.zeros(1, np.int64), row)] == [2, 2]


@pytest.mark.parametrize(
    ("env_id", "told"),
    [
        ("CartPol-v1", "no environment has this name. Nearest: CartPole-v1"),
        ("CartPole-v7", "no such version. Nearest: CartPole-v"),
        ("nowhere/Maze-v0", "no such namespace"),
        ("no_such_module:Maze", "'no_such_module' cannot be imported"),
        ("palaestra.env.toy:Countdwn", "has no 'Countdwn'. Nearest: Countdown"),
    ],
)
def test_an_unknown_environment_is_answered_with_the_nearest_names(env_id, told):
    with pytest.raises(UnknownEnvironment, match=told.replace("(", r"\(")) as error:
        make_env(EnvConfig(id=env_id))
    assert "\n" not in str(error.value)


def test_a_missing_dependency_names_the_command_that_installs_it(monkeypatch):
    def refuse(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")

    monkeypatch.setattr(factory.gymnasium, "make", refuse)
    monkeypatch.setattr(factory, "_is_installed", lambda package: package != "Box2D")
    with pytest.raises(UnknownEnvironment, match=r"\(Box2D\)\. pip install 'palaestra\[box2d\]'"):
        EnvFactory("LunarLander-v3")()
    lander = next(known for known in known_environments() if known.id == "LunarLander-v3")
    assert not lander.installed
    assert "box2d" in lander.remedy


def test_wrong_arguments_name_the_kwargs():
    with pytest.raises(ConfigError, match=r"env.kwargs.*lenght"):
        make_env(EnvConfig(id="palaestra.env.toy:Countdown", kwargs={"lenght": 3}))
    with pytest.raises(ConfigError, match=r"env.kwargs.*gravitas"):
        make_env(EnvConfig(id="CartPole-v1", kwargs={"gravitas": 3}))
    with pytest.raises(ConfigError, match=r"env.kwargs.*gravitas"):
        make_env(EnvConfig(id="CartPole-v1", kwargs={"gravitas": 3}, vectorization="native"))


def test_factories_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="cannot be called"):
        make_env(EnvConfig(id="palaestra.env.toy:__name__"))
    with pytest.raises(ConfigError, match=r"returned a float, not a gymnasium\.Env"):
        make_env(EnvConfig(id="time:time"))
    with pytest.raises(ConfigError, match=r"env\.vectorization"):
        make_env(EnvConfig(id="palaestra.env.toy:Countdown", vectorization="native"))


def test_an_address_is_an_attribute_first_and_gymnasiums_module_form_second(monkeypatch):
    module = types.ModuleType("my_tasks")
    monkeypatch.setitem(sys.modules, "my_tasks", module)
    gymnasium.register("MyCountdown-v0", entry_point=Countdown, max_episode_steps=3)
    try:
        env = EnvFactory("my_tasks:MyCountdown-v0")()
        assert isinstance(env.unwrapped, Countdown)
        module.Fast = lambda length=2: Countdown(length)
        assert isinstance(EnvFactory("my_tasks:Fast", {"length": 4})(), Countdown)
    finally:
        del gymnasium.registry["MyCountdown-v0"]


def test_a_factory_that_fails_says_how():
    with pytest.raises(ConfigError, match="making it failed with ZeroDivisionError"):
        EnvFactory(f"{__name__}:_broken")()


def _broken():
    return 1 / 0


def test_whatever_stands_for_an_environment_becomes_ours():
    ours = InProcessEnv(Countdown, 2)
    assert as_vector_env(ours) is ours
    assert as_vector_env(Countdown()).num_envs == 1
    assert as_vector_env([Countdown(), Countdown()]).num_envs == 2
    assert isinstance(as_vector_env(SyncVectorEnv([Countdown] * 3)), NativeEnv)
    assert as_vector_env("CartPole-v1", num_envs=2).num_envs == 2
    assert as_vector_env(EnvConfig(id="CartPole-v1", num_envs=3)).num_envs == 3
    with pytest.raises(ConfigError, match="a dict is not an environment"):
        as_vector_env({})


def test_the_list_of_environments_holds_gymnasiums_and_ours():
    known = {one.id: one for one in known_environments()}
    assert known["CartPole-v1"].installed
    assert known["compiled/CartPole-v1"].origin == "compiled"
    assert EnvFactory("palaestra.env.toy:Countdown")().action_space.n == 2
    for name, one in known.items():
        if one.origin == "toy":
            EnvFactory(name)().close()


def test_a_configuration_is_checked_before_anything_is_made():
    with pytest.raises(ConfigError, match=r"num_env.*Did you mean 'num_envs'"):
        parse_section(EnvConfig, {"id": "CartPole-v1", "num_env": 2}, place="env")
    with pytest.raises(ConfigError, match=r"env\.num_envs = 0"):
        parse_section(EnvConfig, {"id": "CartPole-v1", "num_envs": 0}, place="env")
    assert all(field.description for field in EnvConfig.model_fields.values())


def test_old_versions_are_made_without_a_remark():
    assert make_env(EnvConfig(id="CartPole-v0", num_envs=1)).num_envs == 1


def test_packages_register_environments_and_a_broken_one_takes_nobody_with_it(monkeypatch, caplog):
    module = types.ModuleType("maze_package")
    module.register = lambda: gymnasium.register("Maze-v3", entry_point="palaestra.env.toy:Countdown")
    monkeypatch.setitem(sys.modules, "maze_package", module)
    addresses = ("no_such_package", "maze_package:absent", "maze_package", "maze_package:register")
    points = [EntryPoint(address, address, make.GROUP) for address in addresses]
    monkeypatch.setattr(make, "entry_points", lambda group: points)
    monkeypatch.setattr(make, "_REGISTERED", {})
    try:
        make._register_environments()
        assert isinstance(make_env(EnvConfig(id="Maze-v3", num_envs=1)), InProcessEnv)
    finally:
        gymnasium.registry.pop("Maze-v3")
    assert [record.args[0] for record in caplog.records] == ["no_such_package", "maze_package:absent"]
