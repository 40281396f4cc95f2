"""What the preflight of a CORL run says about GPUs, time, disk space, JAX and credentials."""

import os
import sys
from dataclasses import replace

import pytest
from tests.runs.runners.corl_data import CHECKOUT, find_refusal, make_spec, map_findings, needs_pyrallis

from palaestra.errors import ConfigError
from palaestra.runs.process.interpreter import Interpreter, Probe
from palaestra.runs.runners.corl import CorlRunner
from palaestra.runs.runners.corl.checks import jax_findings, range_findings
from palaestra.runs.runners.corl.script import read_corl_script


@needs_pyrallis
def test_a_gpu_for_a_torch_that_sees_none_is_refused(corl_home, machine):
    blind = replace(machine, environment={**machine.environment, "CUDA_VISIBLE_DEVICES": ""}, gpus=("0",))

    refused = find_refusal(make_spec(gpus=1), blind)

    assert (refused.check, "sees no GPU" in refused.text) == ("gpu", True)
    assert refused.remedy.startswith(f"{sys.executable} -m pip install torch")
    assert refused.remedy.endswith("or leave --gpus out")


@needs_pyrallis
def test_the_device_of_a_run_is_that_of_its_gpus(corl_home, paths, machine):
    without, leased = make_spec(config={"device": "cuda"}), make_spec(gpus=1)

    warning = map_findings(without, machine)["gpu"]

    assert (warning.level, warning.remedy) == ("warning", "Use --gpus 1")
    assert warning.text == "device = cuda, but no GPU was requested: it runs on the CPU"
    assert "--device=cpu" in CorlRunner().plan(without, paths, machine).argv
    assert "--device=cuda" in CorlRunner().plan(leased, paths, replace(machine, gpus=("0",))).argv
    assert "gpu" not in map_findings(make_spec(), machine)


def test_w_and_b_without_credentials_is_refused_with_both_remedies(corl_home, machine, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    bare = replace(machine, environment={**environment, "HOME": str(tmp_path)})

    refused = {f.check: f for f in CorlRunner().preflight(make_spec(track="online"), bare) if f.level == "refused"}
    with_key = replace(bare, environment={**bare.environment, "WANDB_API_KEY": "x" * 40})
    accepted = map_findings(make_spec(track="online"), with_key)

    assert "WANDB_API_KEY" in refused["credentials"].text
    assert "wandb login" in refused["credentials"].remedy
    assert "leave --track out" in refused["credentials"].remedy
    assert accepted["credentials"].level == "ok"


@pytest.mark.parametrize(
    ("url", "level"), [("", "ok"), ("https://wandb.example:8443/team", "refused"), ("http://localhost:8080", "ok")]
)
def test_a_login_is_looked_up_for_the_server_of_the_run(corl_home, machine, tmp_path, url, level):
    (tmp_path / ".netrc").write_text(
        "machine api.wandb.ai login user password secret\nmachine localhost login user password secret\n"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    variables |= {"HOME": str(tmp_path), "WANDB_BASE_URL": url}

    credentials = map_findings(make_spec(track="online"), replace(machine, environment=variables))["credentials"]

    assert credentials.level == level
    assert level == "ok" or "wandb.example in ~/.netrc" in credentials.text


def test_a_login_is_looked_up_for_the_server_that_the_request_names(corl_home, machine, tmp_path):
    (tmp_path / ".netrc").write_text("machine wandb.example login user password secret\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    spec = make_spec(track="online", environment={"WANDB_BASE_URL": "https://wandb.example"})

    findings = map_findings(spec, replace(machine, environment={**variables, "HOME": str(tmp_path)}))

    assert findings["credentials"].level == "ok"


def test_a_disk_that_is_too_small_for_the_checkpoints_is_refused(corl_home, machine):
    # 1,000,000 updates with a checkpoint every 5,000 are 200 files.
    refused = find_refusal(make_spec(), replace(machine, free_disk_bytes=100 << 20))

    assert refused.check == "disk"
    assert "200 checkpoints" in refused.text
    assert "checkpoints_path=null" in refused.remedy


@pytest.mark.parametrize(
    ("config", "text", "remedy"),
    [
        ({"eval_freq": -1}, "eval_freq = -1: must be at least 1", "Its default is 5000"),
        ({"eval_freq": 0}, "eval_freq = 0: must be at least 1", "Its default is 5000"),
        ({"batch_size": 0}, "batch_size = 0: must be at least 1", "Its default is 64"),
        ({"n_episodes": 0}, "n_episodes = 0: must be at least 1", "Its default is 2"),
        ({"max_timesteps": -5}, "max_timesteps = -5: must be at least 1", "Its default is 1000000"),
        ({"discount": 7}, "discount = 7: must be between 0 and 1", "Its default is 0.99"),
        ({"frac": 5.0}, "frac = 5.0: must be above 0 and at most 1", "Its default is 0.1"),
        ({"frac": 0}, "frac = 0: must be above 0 and at most 1", "Its default is 0.1"),
    ],
)
def test_a_value_outside_the_range_of_its_field_is_refused_by_its_name(corl_home, paths, machine, config, text, remedy):
    refused = find_refusal(make_spec(config=config), machine)

    assert (refused.check, refused.text) == ("flag", text)
    assert refused.remedy == remedy
    with pytest.raises(ConfigError, match=text.partition(":")[0]):
        CorlRunner().plan(make_spec(config=config), paths, machine)


def test_the_ends_of_a_range_and_fields_without_one_are_accepted():
    script = read_corl_script(CHECKOUT / "algorithms" / "offline" / "regression.py")

    values = {"eval_freq": 1, "discount": 1, "frac": 1.0, "learning_rate": -1.0, "buffer_size": -1}

    assert range_findings(script, values) == []


def test_fine_tuning_may_skip_a_phase_and_not_both():
    script = read_corl_script(CHECKOUT / "algorithms" / "finetune" / "online.py")

    assert range_findings(script, {"offline_iterations": 0}) == []
    (negative,) = range_findings(script, {"online_iterations": -1})
    (empty,) = range_findings(script, {"offline_iterations": 0, "online_iterations": 0})

    assert negative.text == "online_iterations = -1: must be at least 0"
    assert empty.text == "offline_iterations = 0: the run would have no updates"
    assert empty.remedy == "Set offline_iterations=1 or more"


def test_a_script_for_jax_is_refused_without_jax_and_with_one_that_lacks_a_function(corl_home, machine):
    without = find_refusal(make_spec(script="accelerated"), machine)
    script = read_corl_script(CHECKOUT / "algorithms" / "offline" / "accelerated.py")
    (later,) = jax_findings(script, Interpreter("python", "as given"), Probe(packages={"jax": "0.10.2"}))
    earlier = list(jax_findings(script, Interpreter("python", "as given"), Probe(packages={"jax": "0.4.35"})))

    assert without.check == "dependency:jax"
    assert "is not installed" in without.text
    assert later.level == "refused"
    assert "calls jax.tree_map, which jax 0.10.2 does not have" in later.text
    assert "jax==0.4.35" in later.remedy
    assert earlier == []


def test_a_long_run_on_a_cpu_and_a_run_without_an_evaluation_are_warned_about(corl_home, machine):
    long = map_findings(make_spec(config={"batch_size": 1024}), machine)
    unevaluated = map_findings(make_spec(config={"max_timesteps": 100}), machine)

    assert long["time"].level == "warning"
    assert "1,000,000 updates on a CPU take about" in long["time"].text
    assert "max_timesteps=" in long["time"].remedy
    assert unevaluated["evaluation"].level == "warning"
    assert "no checkpoint would be saved" in unevaluated["evaluation"].text
    assert "time" not in unevaluated
