import json
from pathlib import Path

import pytest
import yaml

from palaestra.cli.catalog import schema as print_schema
from palaestra.runs.catalogue import Readiness, ScriptInfo
from palaestra.runs.presets import Preset
from palaestra.runs.runner import Finding, LaunchPreview, RunnerCapabilities
from palaestra.runs.runners.sb3 import Sb3Config
from palaestra.studio.model.form import Form
from palaestra.studio.model.launch import LaunchModel, PresetsModel, starting_point

ROOT = Path(__file__).parents[3]
RUNNERS = {name: RunnerCapabilities(title=name) for name in ("echo", "palaestra", "sb3", "cleanrl")}
SCHEMA = {
    "properties": {
        "steps": {"type": "integer", "default": 100, "minimum": 1},
        "seed": {"type": "integer"},
        "env": {"properties": {"kwargs": {"type": "object"}, "num_envs": {"type": "integer", "default": 1}}},
        "algorithm": {"type": "object"},
    }
}


@pytest.fixture
def model():
    """The own trainer is chosen and its form has arrived."""
    model = LaunchModel()
    model.set_runners(RUNNERS)
    model.set_schema("palaestra", "", SCHEMA)
    return model


def _script(name):
    return ScriptInfo(name=name, title=name)


def _preview(*findings, command=(), needs_consent=False):
    is_refused = any(finding.level == "refused" for finding in findings)
    return LaunchPreview(
        findings=findings,
        command=None if is_refused else {"argv": list(command)},
        digest="d",
        needs_consent=needs_consent,
        run_id="r",
    )


def _build(model, env_id="CartPole-v1", parameters=None, *, seed=0):
    return model.build_spec(env_id, parameters or {}, seed=seed)


# ---------------------------------------------------------------------- choices and drafts


def test_our_own_trainer_comes_first_and_the_one_for_trials_last():
    model = LaunchModel()
    assert (model.capabilities, model.refusal) == (None, "Choose a trainer")
    model.set_runners(RUNNERS)
    assert list(model.runners) == ["palaestra", "cleanrl", "sb3", "echo"]
    assert (model.runner, model.capabilities) == ("palaestra", RUNNERS["palaestra"])
    model.set_runners({"echo": RUNNERS["echo"], "sb3": RUNNERS["sb3"]})
    assert model.runner == "sb3"

    model.set_runners({})

    assert model.runner == ""


def test_a_trainer_that_is_gone_takes_its_check_with_it(model):
    model.begin_check()
    model.finish_check(_preview())
    assert model.refusal == ""

    model.set_runners({"sb3": RUNNERS["sb3"]})

    assert (model.runner, model.preview, model.refusal) == ("sb3", None, "Check it first")


def test_the_same_catalogue_again_keeps_the_choice_and_the_check(model):
    model.choose_script("ppo")
    model.begin_check()
    model.finish_check(_preview())
    model.set_runners(RUNNERS)

    assert (model.script, model.refusal) == ("ppo", "")


def test_each_runner_and_script_keeps_its_own_draft(model):
    model.edit("steps", "7")
    model.change_options(name="mine", gpus=1)
    model.choose_runner("sb3")
    model.set_scripts("sb3", [_script("ppo"), _script("sac")])
    assert (model.script, model.form.text("steps"), model.draft.options.name) == ("ppo", "", "")
    model.choose_script("sac")
    model.edit("steps", "9")

    model.choose_runner("palaestra")
    assert (model.form.text("steps"), model.draft.options.name, model.draft.options.gpus) == ("7", "mine", 1)
    model.choose_runner("sb3")

    assert (model.script, model.form.text("steps")) == ("sac", "9")


def test_the_first_script_is_chosen_when_the_list_arrives_and_a_chosen_one_stays(model):
    model.set_scripts("palaestra", [])
    assert model.script == ""
    model.set_scripts("palaestra", [_script("ppo"), _script("dqn")])
    assert model.script == "ppo"
    model.choose_script("dqn")
    model.set_scripts("palaestra", [_script("ppo"), _script("dqn")])
    assert model.script == "dqn"

    model.set_scripts("sb3", [_script("sac")])

    assert (model.script, model.scripts["sb3"]) == ("dqn", (_script("sac"),))


def test_a_runner_that_is_unknown_or_already_chosen_changes_nothing(model):
    before = model.revision
    model.choose_runner("zzz")
    model.choose_runner("palaestra")
    model.choose_script("")

    assert (model.runner, model.revision) == ("palaestra", before)


def test_readiness_is_kept_for_each_runner(model):
    ready = Readiness(level="missing", text="not installed")
    model.set_readiness("sb3", ready)

    assert model.readiness == {"sb3": ready}


def test_an_option_that_no_run_has_is_a_mistake_of_the_program(model):
    with pytest.raises(TypeError):
        model.change_options(gpu=1)


def test_keys_that_are_set_elsewhere_are_not_in_the_form(model, capsys):
    print_schema("run")
    model.set_schema("palaestra", "ppo", json.loads(capsys.readouterr().out))
    model.choose_script("ppo")
    hidden = {"name", "env.id", "env.kwargs", "trainer.seed", "telemetry.progress", "telemetry.wandb"}

    assert not hidden & model.form.fields.keys()
    assert {"env.num_envs", "trainer.total_timesteps", "telemetry.wandb_project"} <= model.form.fields.keys()


def test_a_form_that_arrives_for_another_runner_is_kept_for_it(model):
    model.set_schema("sb3", "ppo", Sb3Config.model_json_schema())
    assert "num_envs" not in model.form.fields

    model.choose_runner("sb3")
    model.choose_script("ppo")

    assert model.draft.has_schema
    assert {"policy", "num_envs"} <= model.form.fields.keys()
    assert "env_kwargs" not in model.form.fields


# ---------------------------------------------------------------------- the request


def test_the_request_holds_the_changes_the_options_and_the_environment(model):
    model.edit("steps", "500")
    model.change_options(name="mine", tags=("a",), gpus=2, nice=5, video=True, track="offline", warm_start="abc")
    model.choose_script("ppo")
    model.set_schema("palaestra", "ppo", SCHEMA)
    model.edit("steps", "700")
    model.change_options(seed=4)

    spec = _build(model, seed=3)

    assert (spec.runner, spec.script, spec.env_id, spec.config) == ("palaestra", "ppo", "CartPole-v1", {"steps": 700})
    assert (spec.seed, spec.name, spec.nice, spec.warm_start) == (4, "", 10, None)
    model.choose_script("")
    spec = _build(model, seed=3)
    assert (spec.script, spec.seed, spec.name, spec.tags) == (None, 3, "mine", ("a",))
    assert (spec.gpus, spec.nice, spec.video, spec.track, spec.warm_start) == (2, 5, True, "offline", "abc")


@pytest.mark.parametrize(
    ("schema", "config"),
    [
        (SCHEMA, {"env": {"num_envs": 2, "kwargs": {"size": 5}}}),
        ({"properties": {"env_kwargs": {"type": "object"}}}, {"env_kwargs": {"size": 5}}),
    ],
)
def test_parameters_go_where_the_schema_of_the_runner_takes_them(model, schema, config):
    model.set_schema("palaestra", "", schema)
    if "env" in config:
        model.edit("env.num_envs", "2")

    assert _build(model, parameters={"size": 5}).config == config


def test_parameters_that_a_runner_cannot_take_are_refused_and_not_dropped(model):
    model.choose_runner("cleanrl")
    model.set_schema("cleanrl", "", {"properties": {"total_timesteps": {"type": "integer"}}})

    with pytest.raises(ValueError, match=r"^is_slippery of FrozenLake-v1: cleanrl takes no parameters"):
        _build(model, "FrozenLake-v1", {"is_slippery": False})
    assert _build(model, "FrozenLake-v1").config == {}


def test_the_place_of_the_parameters_is_found_even_when_the_form_hides_it(model):
    assert "env.kwargs" not in model.form.fields
    assert _build(model, parameters={"a": 1}).config == {"env": {"kwargs": {"a": 1}}}


def test_a_screen_task_is_a_list_of_tasks(model):
    model.set_screen(True)
    assert _build(model, "miniwob/click-test").config == {"tasks": [{"task": "miniwob/click-test"}]}
    spec = _build(model, "data_entry/form", {"rows": 2})
    assert (spec.env_id, spec.config["tasks"]) == (None, [{"task": "data_entry/form", "params": {"rows": 2}}])


def test_the_form_of_screen_tasks_begins_with_a_small_model_that_presets_keep_and_the_user_may_clear(model, capsys):
    print_schema("ui")
    model.choose_script("grpo")
    model.set_schema("palaestra", "grpo", json.loads(capsys.readouterr().out))
    assert (model.form.problems(), model.form.changes()) == ({}, {"model": {"name": "tiny"}})
    assert not {"experiment_name", "tasks", "trainer.seed"} & model.form.fields.keys()
    assert model.start_from("miniwob/click-test")
    assert model.form.problems() == {}
    model.load_values({"model": {"name": "Qwen/Qwen3-VL-2B-Instruct"}})
    assert model.form.changes() == {"model": {"name": "Qwen/Qwen3-VL-2B-Instruct"}}

    model.edit("model.name", "")

    assert model.refusal == "model.name is required"


def test_a_value_that_cannot_be_used_is_named_in_one_line(model):
    model.edit("steps", "0")
    with pytest.raises(ValueError, match=r"^steps must lie from 1$"):
        _build(model)
    model.edit("steps", "")
    model.change_options(name="two words")

    with pytest.raises(ValueError, match=r"^name = 'two words': may hold letters, digits, [^\n]*$"):
        _build(model)


# ---------------------------------------------------------------------- preflight and launch


def test_launch_is_possible_only_after_a_check_that_found_nothing_to_fix(model):
    assert model.refusal == "Check it first"
    model.edit("steps", "0")
    assert model.refusal == "steps must lie from 1"
    model.edit("steps", "")
    model.begin_check()
    assert (model.refusal, model.findings) == ("Checking …", ())
    finding = Finding("disk", "ok", "10 GB free")

    model.finish_check(_preview(finding))

    assert (model.refusal, model.stage, model.findings) == ("", "checked", (finding,))
    model.begin_launch()
    assert model.refusal == "Launching …"
    model.finish_launch("run-1")
    assert (model.launched, model.stage, model.refusal) == ("run-1", "editing", "Check it first")


def test_a_check_that_refuses_disables_the_launch(model):
    model.begin_check()
    model.finish_check(_preview(Finding("disk", "refused", "The disk is full")))

    assert model.refusal == "The check found something to fix"


def test_foreign_code_needs_consent_which_a_new_check_takes_back(model):
    model.begin_check()
    model.finish_check(_preview(needs_consent=True))
    assert model.refusal == "Agree to the command first"
    model.set_consent(True)
    assert model.refusal == ""

    model.begin_check()
    model.finish_check(_preview(needs_consent=True))

    assert model.refusal == "Agree to the command first"


def _edit(model):
    model.edit("steps", "5")


def _rename(model):
    model.change_options(name="x")


def _load(model):
    model.load_values({"steps": 5})


def _choose_script(model):
    model.choose_script("other")


def _choose_runner(model):
    model.choose_runner("sb3")


CHANGES = [_edit, _rename, _load, _choose_script, _choose_runner]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_the_check_and_the_consent_void(model, change):
    model.begin_check()
    model.finish_check(_preview(needs_consent=True))
    model.set_consent(True)

    change(model)

    assert (model.preview, model.has_consent, model.stage) == (None, False, "editing")


@pytest.mark.parametrize("change", CHANGES)
def test_the_answer_to_a_check_of_earlier_values_is_not_shown(model, change):
    model.begin_check()
    change(model)

    model.finish_check(_preview())

    assert (model.preview, model.refusal) == (None, "Check it first")


def test_a_change_during_a_launch_waits_for_its_answer(model):
    model.begin_check()
    model.finish_check(_preview())
    model.begin_launch()
    model.edit("steps", "5")
    assert model.stage == "launching"

    model.finish_launch("run-1")

    assert (model.stage, model.launched) == ("editing", "run-1")


def test_a_failure_is_shown_until_something_changes(model):
    model.begin_check()
    model.fail("The service does not answer.")
    assert (model.stage, model.problem) == ("editing", "The service does not answer.")

    model.edit("steps", "5")

    assert model.problem == ""


@pytest.mark.parametrize(
    ("text", "remedy", "path", "remark"),
    [
        ("steps = 0: must be above 0", "", "steps", "must be above 0"),
        ("steps = 0: must be above 0", "Write 1.", "steps", "must be above 0. Write 1"),
        ("algorithm = {'a': 1}: is not known", "", "algorithm", "is not known"),
        ("algorithm = {'a: b': ': '}: no: never", "", "algorithm", "no: never"),
        ("algorithm.batch_size = -1: must be above 0", "", "algorithm", "batch_size: must be above 0"),
        ("algorithm = <object>: is odd", "", "algorithm", "<object>: is odd"),
        ("algorithm = strange", "", "algorithm", "strange"),
    ],
)
def test_a_finding_about_a_key_is_shown_beside_its_field_without_the_value(model, text, remedy, path, remark):
    model.begin_check()
    model.finish_check(_preview(Finding("flag", "refused", text, remedy)))

    assert model.form.problems() == {path: remark}


@pytest.mark.parametrize("text", ["The disk is full", "env.id = 'x': unknown", "seed"])
def test_a_finding_about_something_else_is_only_in_the_list(model, text):
    model.begin_check()
    model.finish_check(_preview(Finding("flag", "refused", text), Finding("gpu", "warning", "steps = 1: slow")))

    assert model.form.problems() == {}


def test_a_finding_that_another_change_has_solved_does_not_block_the_launch(model):
    model.begin_check()
    model.finish_check(_preview(Finding("flag", "refused", "steps = 100: more than env.num_envs allows")))
    model.edit("env.num_envs", "4")
    assert model.refusal == "steps more than env.num_envs allows"

    model.begin_check()
    model.finish_check(_preview())

    assert model.refusal == ""


# ---------------------------------------------------------------------- recommended settings and presets


def test_recommended_settings_fit_the_form_of_our_own_trainer_and_lose_nothing(model, capsys):
    print_schema("run")
    schema = json.loads(capsys.readouterr().out)
    print_schema("ppo")
    schema["properties"]["algorithm"] = json.loads(capsys.readouterr().out)
    schema["properties"]["algorithm"]["properties"]["name"] = {"type": "string"}
    model.set_schema("palaestra", "ppo", schema)
    model.choose_script("ppo")

    for env_id in ("CartPole-v1", "LunarLander-v3", "Hopper-v5", "Pendulum-v1"):
        assert model.start_from(env_id)
        assert model.form.problems() == {}
    model.start_from("LunarLander-v3")

    changes = model.form.changes()
    assert changes["algorithm"]["value_clip"] is None
    assert changes["trainer"]["total_timesteps"] == 1_000_000
    assert "learning_rate" not in changes["algorithm"]  # "3e-4" is the default, 0.0003


def test_the_recommended_settings_are_those_of_the_example_configs():
    configs = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs" / "ppo").glob("*.yaml"))]
    assert len(configs) == 7

    for config in configs:
        env_id = config["env"].pop("id")
        assert starting_point("palaestra", env_id) == config, env_id


def test_the_recommended_settings_of_tables_are_those_of_the_example_configs():
    configs = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs" / "tabular").glob("*.yaml"))]
    assert len(configs) == 4

    for config in configs:
        env_id, script = config["env"].pop("id"), config["algorithm"]["name"]
        assert starting_point("palaestra", env_id, script) == config, (env_id, script)


def test_settings_of_another_algorithm_are_not_recommended():
    assert starting_point("palaestra", "CartPole-v1", "ppo")["algorithm"]["name"] == "ppo"
    assert starting_point("palaestra", "CartPole-v1", "dqn") == {"trainer": {"total_timesteps": 200_000}}
    assert starting_point("palaestra", "CartPole-v1", "sarsa") == {"trainer": {"total_timesteps": 500_000}}


def test_there_is_no_recommendation_before_the_form_or_for_another_runner(model):
    model.choose_runner("cleanrl")
    assert not model.start_from("CartPole-v1")
    model.choose_runner("palaestra")
    model.choose_script("unread")

    assert not model.start_from("CartPole-v1")


def test_an_environment_without_settings_of_its_own_gets_the_general_ones():
    assert starting_point("palaestra", "Acrobot-v1")["trainer"]["total_timesteps"] == 500_000
    assert starting_point("palaestra", "Unknown-v0")["trainer"] == {"total_timesteps": 200_000}
    assert starting_point("cleanrl", "CartPole-v1") == {}


def test_presets_are_kept_by_kind_and_found_by_name():
    presets = PresetsModel()
    fast = Preset(kind="train.palaestra.ppo", name="fast", values={"steps": 1}, saved=1.0)
    presets.set_all("train.palaestra.ppo", [fast])

    assert presets.names("train.palaestra.ppo") == ["fast"]
    assert presets.get("train.palaestra.ppo", "fast") == fast
    assert presets.get("train.palaestra.ppo", "slow") is presets.get("train.sb3.ppo", "fast") is None
    assert (presets.names("train.sb3.ppo"), presets.revision) == ([], 1)


def test_a_preset_of_another_version_leaves_out_what_the_form_does_not_have(model):
    model.load_values({"steps": 5, "gone": {"x": 1}, "env": {"num_envs": 1}})

    assert isinstance(model.form, Form)
    assert model.form.changes() == {"steps": 5}
