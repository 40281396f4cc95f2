"""What runners offer: scripts, environments with their parameters, settings, and whether they are ready."""

import inspect
import os
import shutil
import subprocess
import time
from dataclasses import replace

import pytest
from tests.runs.runners.acting import MACHINE
from tests.runs.runners.corl_data import CHECKOUT as CORL
from tests.runs.runners.example_runner import ExampleRunner
from tests.runs.runners.test_cleanrl import CHECKOUT

from palaestra.errors import ConfigError, UnknownEnvironment
from palaestra.runs.catalogue import Readiness
from palaestra.runs.process.environments import find_group, list_environments, read_parameters
from palaestra.runs.process.interpreter import Interpreter, ProbedParameter
from palaestra.runs.process.parameter_schema import is_object_only, parameter_properties
from palaestra.runs.process.probe import read_descriptions, shorten
from palaestra.runs.runner import Finding
from palaestra.runs.runners.catalogues import (
    environment_parameters_of,
    environments_of,
    list_tasks,
    readiness_of,
    scripts_of,
)
from palaestra.runs.runners.cleanrl import CleanrlRunner
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.runners.palaestra import OWN_ENVIRONMENTS, SCRIPTS, PalaestraRunner
from palaestra.runs.runners.registry import registered_runners
from palaestra.runs.runners.sb3 import ALGORITHMS, Sb3Runner
from palaestra.runs.runners.template import MyTrainerRunner
from palaestra.runs.spec import RunSpec

CLEANRL = RunSpec(runner="cleanrl", checkout=str(CHECKOUT))


# ---------------------------------------------------------------------- scripts


def test_the_algorithms_of_palaestra_are_those_of_its_registry():
    from palaestra.learner.registry import ALGORITHMS as REGISTRY

    on_screens = {info.name for info in SCRIPTS if "screen" in info.actions}
    elsewhere = {info.name for info in SCRIPTS if {"discrete", "continuous"} & set(info.actions)}
    assert (on_screens, elsewhere) == (
        set(REGISTRY["trajectories"]),
        {*REGISTRY["rollouts"], *REGISTRY["transitions"]},
    )


def test_every_algorithm_of_stable_baselines3_is_described():
    infos = {info.name: info for info in scripts_of(Sb3Runner(), RunSpec(runner="sb3"), MACHINE)}

    assert set(infos) == set(ALGORITHMS)
    assert all(info.installed and info.plays and info.warm_start and info.description for info in infos.values())
    assert (infos["dqn"].actions, infos["sac"].actions) == (("discrete",), ("continuous",))
    assert infos["ppo"].actions == ("discrete", "continuous")


def test_an_algorithm_whose_package_is_missing_names_the_command_that_installs_it(bare_python):
    infos = scripts_of(Sb3Runner(), RunSpec(runner="sb3", python=bare_python), MACHINE)

    remedies = {info.name: info.remedy for info in infos if not info.installed}
    assert remedies["ppo"] == f"{bare_python} -m pip install stable-baselines3"
    assert remedies["tqc"] == f"{bare_python} -m pip install sb3-contrib"


def test_the_scripts_of_a_checkout_say_what_can_become_of_their_runs():
    infos = {info.name: info for info in scripts_of(CleanrlRunner(), CLEANRL, MACHINE)}

    q_learning, gradient = infos["q_learning"], infos["policy_gradient"]
    assert (q_learning.saves_checkpoints, q_learning.plays, q_learning.actions) == (True, True, ("discrete",))
    assert q_learning.description.startswith("A script in the shape of CleanRL's dqn")
    assert q_learning.description.endswith("Saves its model with save_model=true.")
    assert (gradient.saves_checkpoints, gradient.plays) == (False, False)
    assert gradient.description.endswith("Saves no model, so that it cannot be played.")
    assert infos["normalizing"].actions == ("continuous",)
    assert not any(info.warm_start for info in infos.values())


def test_a_script_that_cannot_run_here_says_what_it_needs(tmp_path):
    checkout = shutil.copytree(CHECKOUT, tmp_path / "checkout")
    folder = checkout / "cleanrl"
    source = (folder / "q_learning.py").read_text()
    (folder / "jaxed.py").write_text(source.replace("import tyro", "import no_such_package_a\nimport tyro"))
    (folder / "q_learning_atari.py").write_text(source)
    (folder / "odd.py").write_text("# Has no arguments\nprint()\n")

    spec = RunSpec(runner="cleanrl", checkout=str(checkout))
    infos = {info.name: info for info in scripts_of(CleanrlRunner(), spec, MACHINE)}

    assert infos["jaxed"].remedy.endswith("-m pip install no_such_package_a")
    assert (infos["jaxed"].installed, infos["q_learning"].installed) == (False, True)
    assert infos["q_learning_atari"].plays is False
    assert "passes no class of its own to tyro.cli" in infos["odd"].description
    assert (infos["odd"].installed, infos["odd"].plays) == (False, False)


def test_a_script_begins_with_its_first_comment_if_it_has_no_docstring(tmp_path):
    checkout = shutil.copytree(CHECKOUT, tmp_path / "checkout")
    path = checkout / "cleanrl" / "q_learning.py"
    path.write_text("# docs can be found elsewhere\n" + path.read_text().partition('"""\n')[2])

    spec = RunSpec(runner="cleanrl", checkout=str(checkout))
    (info,) = [info for info in scripts_of(CleanrlRunner(), spec, MACHINE) if info.name == "q_learning"]

    assert info.description.startswith("Docs can be found elsewhere. Saves")


# ---------------------------------------------------------------------- environments


def test_our_own_environments_are_those_of_palaestra_envs():
    from palaestra.env.make import known_environments

    infos = environments_of(PalaestraRunner(), RunSpec(), MACHINE)

    ours = {entry.id for entry in known_environments() if entry.origin != "gymnasium"}
    assert ours == set(OWN_ENVIRONMENTS)
    listed = {info.env_id: info for info in infos}
    # Gymnasium registers removed environments with a function that explains it.
    known = {entry.id for entry in known_environments()}
    assert {"HalfCheetah-v2", "GymV21Environment-v0"} & set(listed) == set()
    assert {info.env_id for info in infos if info.kind == "gymnasium"} <= known
    assert len(listed) == len(infos)
    assert (listed["palaestra/TableReach-v0"].group, listed["palaestra/TableReach-v0"].max_episode_steps) == (
        "Palaestra", 25,
    )  # fmt: skip


def test_environments_have_groups_and_the_newest_version_is_marked():
    infos = {info.env_id: info for info in environments_of(Sb3Runner(), RunSpec(runner="sb3"), MACHINE)}

    assert {infos[name].group for name in ("CartPole-v1", "Pendulum-v1")} == {"Classic control"}
    assert (infos["FrozenLake-v1"].group, infos["LunarLander-v3"].group) == ("Toy text", "Box2D")
    assert (infos["CartPole-v0"].newest, infos["CartPole-v1"].newest) == (False, True)
    assert (infos["CartPole-v1"].installed, infos["CartPole-v1"].max_episode_steps) == (True, 500)
    jax = infos["phys2d/CartPole-v1"]
    assert (jax.installed, "pip install 'gymnasium[jax]'" in jax.remedy) == (False, True)


@pytest.mark.parametrize(
    ("entry_point", "group"),
    [
        ("minigrid.envs:EmptyEnv", "MiniGrid"),
        ("ale_py.env:AtariEnv", "Atari"),
        ("my_maze.tasks:Maze", "My maze"),
        ("", "Other"),
    ],
)
def test_other_packages_are_groups_of_their_own(entry_point, group):
    assert find_group(entry_point) == group


def test_screen_tasks_are_environments_of_palaestra_only():
    tasks = {info.task for info in list_tasks()}
    screens = {info.env_id for info in environments_of(PalaestraRunner(), RunSpec(), MACHINE) if info.kind == "screen"}

    assert screens == tasks >= {"click_target/button", "data_entry/form"}
    assert not any(info.kind == "screen" for info in environments_of(Sb3Runner(), RunSpec(), MACHINE))


@pytest.fixture
def small_gymnasium(tmp_path):
    """An interpreter with a package of the name that registers one environment and counts how often it is imported."""
    directory = tmp_path / "small"
    subprocess.run(["python3", "-m", "venv", "--without-pip", str(directory)], check=True)
    (site,) = directory.glob("lib/python3*/site-packages")
    counter = tmp_path / "imports"
    (site / "gymnasium.py").write_text(
        "from types import SimpleNamespace as N\n"
        "registry = {'Small-v0': N(entry_point='small:Env', max_episode_steps=7)}\n"
        f"open({str(counter)!r}, 'a').write('x')\n"
    )
    return Interpreter(str(directory / "bin" / "python"), "for the test"), site, counter


def test_an_answer_is_kept_until_packages_change_or_a_refresh(small_gymnasium):
    interpreter, site, counter = small_gymnasium

    def list_and_count(**options):
        assert [info.env_id for info in list_environments(interpreter, MACHINE, **options)] == ["Small-v0"]
        return len(counter.read_text())

    assert list_and_count() == 1
    assert list_and_count() == 1
    (site / "another_package").mkdir()
    os.utime(site, (time.time() + 5, time.time() + 5))
    assert list_and_count() == 2
    assert list_and_count(refresh=True) == 3
    assert list_and_count() == 3


def test_an_interpreter_without_gymnasium_or_that_does_not_start_is_named(bare_python, tmp_path):
    with pytest.raises(ConfigError, match=f"{bare_python} -m pip install gymnasium"):
        list_environments(Interpreter(bare_python, ""), MACHINE)
    with pytest.raises(ConfigError, match="exit code 1"):
        list_environments(Interpreter("/bin/false", ""), MACHINE)


# ---------------------------------------------------------------------- parameters of environments


def _parameters(env_id, runner=None):
    schema = environment_parameters_of(runner or PalaestraRunner(), env_id, RunSpec(), MACHINE)
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    return schema["properties"]


def test_parameters_have_types_defaults_and_choices():
    lake = _parameters("FrozenLake8x8-v1")
    assert (lake["map_name"]["default"], lake["map_name"]["enum"]) == ("8x8", ["4x4", "8x8", None])
    assert (lake["is_slippery"]["type"], lake["is_slippery"]["default"]) == ("boolean", True)
    assert lake["reward_schedule"]["default"] == [1, 0, 0]
    assert "render_mode" not in lake
    lander = _parameters("LunarLander-v3", Sb3Runner())
    assert (lander["continuous"]["default"], _parameters("LunarLanderContinuous-v3")["continuous"]["default"]) == (
        False, True,
    )  # fmt: skip
    assert (lander["gravity"]["type"], lander["gravity"]["exclusiveMinimum"]) == ("number", -12)
    assert lander["wind_power"]["description"].startswith("Dictates the maximum magnitude of linear wind")
    assert _parameters("BipedalWalker-v3")["hardcore"]["default"] is False
    assert _parameters("Pendulum-v1")["g"] == {
        "description": "Acceleration of gravity.",
        "type": "number",
        "default": 10.0,
    }


def test_a_default_that_json_lacks_is_left_out():
    hopper = _parameters("Hopper-v5")

    assert "default" not in hopper["healthy_z_range"]  # up to infinity
    assert hopper["healthy_angle_range"]["default"] == [-0.2, 0.2]


def test_our_own_tasks_and_environments_have_parameters():
    assert _parameters("click_target/button")["difficulty"] == {
        "type": "integer", "default": 1, "minimum": 1, "maximum": 8,
        "description": "From one large button to twelve small ones.",
    }  # fmt: skip
    assert _parameters("data_entry/form")["rows"]["maximum"] == 14
    assert _parameters("palaestra.env.toy:Bandit")["arms"]["default"] == 3
    assert _parameters("compiled/CartPole-v1") == {}


@pytest.mark.parametrize("task", list_tasks()[:3] + list_tasks()[-1:], ids=lambda info: info.task)
def test_a_task_takes_the_defaults_that_its_schema_declares(task):
    from palaestra.errors import SessionRefused
    from palaestra.sessions.suites import make_task

    properties = task.parameters["properties"]
    suite, _, name = task.task.partition("/")
    defaults = {key: part["default"] for key, part in properties.items()}
    assert make_task(suite, name, 0, defaults).step_limit == make_task(suite, name, 0, {}).step_limit
    for key, part in properties.items():
        refused = part["minimum"] - 1 if "minimum" in part else None
        with pytest.raises(SessionRefused):
            make_task(suite, name, 0, {key: refused})


def test_scripts_of_cleanrl_take_no_parameters_and_echo_none():
    assert environment_parameters_of(CleanrlRunner(), "FrozenLake-v1", CLEANRL, MACHINE)["properties"] == {}
    assert environment_parameters_of(EchoRunner(), "Anything", RunSpec(), MACHINE)["properties"] == {}
    assert environments_of(EchoRunner(), RunSpec(runner="echo"), MACHINE) == []


@pytest.mark.parametrize("env_id", ["CartPol-v1", "no_such_module:Env", "json:nothing", ""])
def test_an_unknown_environment_is_refused_with_the_nearest(env_id):
    with pytest.raises(UnknownEnvironment) as refused:
        environment_parameters_of(Sb3Runner(), env_id, RunSpec(runner="sb3"), MACHINE)

    assert refused.value.value == env_id
    if env_id == "CartPol-v1":
        assert "CartPole-v1" in refused.value.remedy


def test_reading_parameters_of_a_broken_interpreter_is_refused():
    with pytest.raises(ConfigError, match="exit code 1"):
        read_parameters("CartPole-v1", Interpreter("/bin/false", ""), MACHINE)


# ---------------------------------------------------------------------- settings


def test_settings_of_an_algorithm_come_from_its_signature():
    schema = Sb3Runner().config_schema(RunSpec(runner="sb3", script="sac"))
    algorithm = schema["properties"]["algorithm"]["properties"]

    assert schema["properties"]["total_timesteps"]["default"] == 100_000
    assert algorithm["gamma"] == {
        "description": "The discount factor", "type": "number", "default": 0.99, "minimum": 0, "maximum": 1,
    }  # fmt: skip
    assert (algorithm["buffer_size"]["type"], algorithm["buffer_size"]["default"]) == ("integer", 1_000_000)
    assert (algorithm["ent_coef"]["type"], algorithm["ent_coef"]["default"]) == (["number", "string"], "auto")
    assert algorithm["policy_kwargs"]["type"] == ["object", "null"]
    # The program sets these, and no configuration can hold an object.
    assert not {"policy", "env", "seed", "verbose", "action_noise", "replay_buffer_class"} & set(algorithm)


def test_without_the_library_or_a_script_settings_are_free(bare_python):
    for spec in (RunSpec(runner="sb3", script="sac", python=bare_python), RunSpec(runner="sb3"), RunSpec(script="xyz")):
        algorithm = Sb3Runner().config_schema(spec)["properties"]["algorithm"]
        assert ("properties" in algorithm, algorithm["additionalProperties"]) == (False, True)


def test_settings_of_palaestra_are_those_of_the_algorithm_for_environments_or_screens():
    runner = PalaestraRunner()

    plain = runner.config_schema(RunSpec(script="ppo"))["properties"]
    screens = runner.config_schema(RunSpec(script="ppo", env_id="click_target/button"))["properties"]
    grpo = runner.config_schema(RunSpec(script="grpo"))["properties"]

    assert ("env" in plain, plain["algorithm"]["properties"]["clip_range"]["default"]) == (True, 0.2)
    assert ("env" in screens, "model" in screens, "model" in grpo) == (False, True, True)
    assert "group_size" in grpo["algorithm"]["properties"]
    assert "name" not in plain["algorithm"]["properties"]
    assert runner.config_schema(RunSpec())["properties"]["algorithm"]["type"] == "object"


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        ("float | collections.abc.Callable[[float], float]", 0.1, {"type": "number", "default": 0.1}),
        ("Union[int, tuple[int, str]]", 1, {"type": ["array", "integer"], "default": 1}),
        ("Optional[typing.List[int]]", None, {"type": ["array", "null"], "default": None}),
        ("Literal['a', 'b'] | None", "a", {"enum": ["a", "b", None], "default": "a"}),
        ("torch.device | str", "auto", {"type": "string", "default": "auto"}),
        ("Schedule", 0.5, {"type": "number", "default": 0.5}),
        ("my.Type", None, {"type": "string", "default": None}),
        ("not python at all", None, {"type": "string", "default": None}),
        ("float", 1, {"type": "number", "default": 1}),
        ("", None, {"type": "string", "default": None}),
    ],
)
def test_an_annotation_becomes_the_type_of_a_field(kind, default, expected):
    schema = parameter_properties({"x": ProbedParameter(default, False, kind)})["x"]

    assert {key: value for key, value in schema.items() if key != "description"} == expected


def test_only_an_annotation_of_objects_alone_leaves_a_parameter_out():
    kinds = {"type[Buffer] | None": True, "noise.ActionNoise": True, "float | Schedule": False, "": False, "int": False}

    assert {kind: is_object_only(ProbedParameter(None, False, kind)) for kind in kinds} == kinds


def test_descriptions_are_read_from_the_usual_forms_of_docstrings():
    text = inspect.cleandoc("""Title.

    :param rate: how fast
        it learns
    :param other: more

    * `gravity`: pulls down. Default -10

    | `weight` | **float** | `1` | Of the term |
    """)
    assert read_descriptions(text) == {
        "rate": "How fast it learns", "other": "More", "gravity": "Pulls down. Default -10", "weight": "Of the term",
    }  # fmt: skip
    assert shorten("one. " * 60) == ("One. " + "one. " * 49).strip()
    assert shorten("word " * 60).endswith("word …")


# ---------------------------------------------------------------------- readiness


def test_every_runner_here_is_ready_within_a_second_once_asked(monkeypatch):
    machine = replace(
        MACHINE, environment={**MACHINE.environment, "PALAESTRA_CLEANRL": str(CHECKOUT), "PALAESTRA_CORL": str(CORL)}
    )
    for name, runner in registered_runners().items():
        readiness_of(runner, RunSpec(runner=name), machine)
        began = time.monotonic()
        readiness = readiness_of(runner, RunSpec(runner=name), machine)
        assert (readiness.level, time.monotonic() - began < 1.0) == ("ready", True), (name, readiness)


def test_what_is_missing_comes_with_the_remedy(bare_python):
    sb3 = readiness_of(Sb3Runner(), RunSpec(runner="sb3", python=bare_python), MACHINE)
    assert (sb3.level, sb3.text) == ("missing", f"stable-baselines3 is not installed in {bare_python}")
    assert sb3.remedy == f"{bare_python} -m pip install 'stable-baselines3'"
    assert [finding.level for finding in sb3.findings].count("refused") == 3
    without = replace(MACHINE, environment={k: v for k, v in MACHINE.environment.items() if k != "PALAESTRA_CLEANRL"})
    cleanrl = readiness_of(CleanrlRunner(), RunSpec(runner="cleanrl"), without)
    assert (cleanrl.level, "git clone" in cleanrl.remedy) == ("missing", True)
    nowhere = readiness_of(PalaestraRunner(), RunSpec(python="/nowhere"), MACHINE)
    assert (nowhere.level, "/nowhere" in nowhere.text) == ("missing", True)


def test_a_refusal_counts_more_than_a_warning_and_a_warning_more_than_none():
    good, warning, refused = (
        Finding("a", "ok", "x"),
        Finding("b", "warning", "y", "z"),
        Finding("dependency:c", "refused", "w"),
    )

    assert Readiness.from_findings([good]).level == "ready"
    assert Readiness.from_findings([good, warning]).text == "y"
    assert (Readiness.from_findings([warning, refused]).level, Readiness.from_findings([warning, refused]).text) == (
        "missing", "c w",
    )  # fmt: skip


# ---------------------------------------------------------------------- runners of other packages


def test_a_runner_that_declares_nothing_has_sensible_defaults():
    runner, spec = MyTrainerRunner(), RunSpec(runner="my-trainer")

    assert scripts_of(runner, spec, MACHINE) == []
    assert "CartPole-v1" in {info.env_id for info in environments_of(runner, spec, MACHINE)}
    assert "map_name" in environment_parameters_of(runner, "FrozenLake-v1", spec, MACHINE)["properties"]
    assert readiness_of(runner, spec, MACHINE).level == "ready"
    assert readiness_of(runner, RunSpec(python="/bin/false"), MACHINE).level == "missing"


def test_a_runner_that_declares_something_is_asked():
    runner, spec = ExampleRunner(), RunSpec(runner="example")

    assert [info.name for info in scripts_of(runner, spec, MACHINE)] == ["second"]
    assert [info.group for info in environments_of(runner, spec, MACHINE)] == ["Example"]
    assert "speed" in environment_parameters_of(runner, "CartPole-v1", spec, MACHINE)["properties"]
    assert readiness_of(runner, spec, MACHINE).level == "warning"


class _Broken(ExampleRunner):
    def scripts(self, spec, machine):
        return [1 / 0]

    environments = environment_parameters = readiness = scripts


def test_a_fault_in_a_runner_is_an_error_that_names_it():
    broken, spec = _Broken(), RunSpec(runner="example")

    with pytest.raises(ConfigError, match=r"example'?: failed \(ZeroDivisionError"):
        scripts_of(broken, spec, MACHINE)
    with pytest.raises(ConfigError, match="failed"):
        environments_of(broken, spec, MACHINE)
    assert readiness_of(broken, spec, MACHINE).level == "missing"
