"""Bad input gets one clear message and exit code 2, and nothing is written."""

import json
from pathlib import Path

import pytest

REFUSED = {
    "unknown environment": (["env.id=CartPol-v1"], "Nearest: CartPole-v1"),
    "unknown key": (["algorithm.learning_rat=1"], "Did you mean 'learning_rate'?"),
    "misspelled name of the algorithm": (["algorithm.nam=dqn"], "Did you mean 'name'?"),
    "unknown section": (["algorthm.learning_rate=1"], "Did you mean 'algorithm'?"),
    "wrong type": (["trainer.seed=abc"], "trainer.seed = 'abc'"),
    "minibatch that does not divide": (["algorithm.batch_size=20"], "Nearest that do: 16 and 32"),
    "minibatch larger than a rollout": (["algorithm.batch_size=128"], "does not divide the 64 samples"),
    "negative learning rate": (["algorithm.learning_rate=-1"], "greater than 0"),
    "not a number": (["algorithm.learning_rate=.nan"], "finite number"),
    "two lengths": (["trainer.iterations=3"], "Give one of them"),
    "unknown algorithm": (["algorithm.name=pppo"], "Did you mean 'ppo'?"),
    "unknown policy": (["policy.name=actr_critic"], "Did you mean 'actor_critic'?"),
    "policy that cannot be imported": (["policy.name=no.such:Net"], "cannot be imported"),
    "environment that cannot be imported": (["env.id=no.such:Env"], "cannot be imported"),
    "environment that raises": (["env.id=tests.env.faulty:Faulty"], "the simulator fell over"),
    "environment that returns NaN": (
        ["env.id=tests.env.faulty:Faulty", "env.kwargs.fault=nan_observation", "env.kwargs.at=7"],
        "not finite",
    ),
    "environment of the wrong shape": (
        ["env.id=tests.env.faulty:Faulty", "env.kwargs.fault=shape", "env.kwargs.at=1"],
        "shape",
    ),
    "a section that is no mapping": (["env=CartPole-v1"], "is not a mapping"),
    "a width that is no list": (["policy.hidden=64"], "Write policy.hidden=[64]"),
    "two rollout lengths": (["trainer.buffer_size=64"], "Give one of them"),
    "more environments than any machine": (["env.num_envs=1000000000"], "less than or equal to 65536"),
    "a count that is true": (["env.num_envs=true"], "env.num_envs = True: is true or false"),
    "a number that is false": (["algorithm.gamma=false"], "algorithm.gamma = False: is true or false"),
    "a width that is true": (["policy.hidden=[64, true]"], "policy.hidden = [64, True]: is true or false"),
    "no environments": (["env.num_envs=0"], "greater than or equal to 1"),
    "negative staleness": (["trainer.collection=asynchronous", "trainer.max_staleness=-1"], "greater than or equal"),
    "ring smaller than a segment": (
        ["trainer.buffer_type=vla", "trainer.rollout_length=128", "trainer.buffer_size=64"],
        "smaller than one segment",
    ),
    "ring of broken segments": (
        ["trainer.buffer_type=vla", "trainer.rollout_length=128", "trainer.buffer_size=200"],
        "Nearest: 128 and 256",
    ),
    "traces heavier than steps": (["algorithm.c_bar=2"], "V-trace needs c_bar <= rho_bar"),
    "a collector that is never started": (["trainer.collector=process"], "Add trainer.collection=asynchronous"),
    "seed that torch cannot take": (["trainer.seed=100000000000000000000"], "trainer.seed"),
    "hidden layer of no width": (["policy.hidden=[64, 0]"], "policy.hidden.1 = 0"),
    "hidden layer of negative width": (["policy.hidden=[-1]"], "policy.hidden.0 = -1"),
    "not an override": (["fast"], "is not key=value"),
    "override through a value": (["trainer.seed=1", "trainer.seed.x=1"], "has no keys"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(palaestra, config, case):
    words, reason = REFUSED[case]
    result = palaestra("train", config, *words)
    assert result.code == 2, result
    assert reason in result.err
    assert result.err.startswith("error: ")
    assert len(result.err.strip().splitlines()) == 1
    assert not Path("var").exists()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("bad.yaml", b"a: [1, 2", "is not YAML"),
        ("bad.yaml", b"just text", "not a mapping"),
        ("bad.yaml", b"", "is empty"),
        ("bad.yaml", b"trainer: {seed: 1}\ntrainer: {seed: 2}\n", "'trainer' is given twice"),
        ("bad.yaml", b"\x00\xff\xfe", "is not text"),
        ("bad.json", b'{"a": 1,,}', "is not JSON"),
        ("bad.json", b'{"env": {"id": "A"}, "env": {"id": "B"}}', "is ambiguous: the key 'env' is given twice"),
        ("bad.json", b'{"env": {"id": "A", "id": "B"}}', "is ambiguous: the key 'id' is given twice"),
        ("bad.yaml", b"name: 2020-01-01\nenv: {id: CartPole-v1}", "name = datetime.date(2020, 1, 1)"),
        ("bad.yaml", b"env: &env {id: CartPole-v1, kwargs: *env}", "is not YAML: an anchor contains itself"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(palaestra, tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    result = palaestra("train", name)
    assert (result.code, reason in result.err) == (2, True), result
    assert not Path("var").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Nope-v9"], "env.id = 'Nope-v9': no environment has this name"),
        (["no_such_module:Env"], "cannot be imported"),
        (["CartPole-v1", "env.id=CartPol-v1"], "Nearest: CartPole-v1"),
        (["CartPole-v1", "trainer.sed=1"], "Did you mean 'seed'?"),
    ],
)
def test_what_cannot_be_trained_is_refused_without_a_notice_about_default_settings(palaestra, words, message):
    result = palaestra("train", *words)
    assert result.code == 2
    assert message in result.err
    assert "with default settings" not in result.err


def test_an_environment_id_trains_after_a_notice_with_the_tuned_configurations(palaestra):
    result = palaestra(
        "train",
        "CartPole-v1",
        "trainer.total_timesteps=64",
        "env.num_envs=2",
        "trainer.rollout_length=32",
        "algorithm.batch_size=32",
        "telemetry.progress=false",
    )
    assert result.code == 0
    assert "CartPole-v1 with default settings; tuned ones: palaestra train cartpole" in result.err


def test_a_missing_file_is_refused_and_its_neighbours_named(palaestra, config):
    result = palaestra("train", "smal.yaml")
    assert result.code == 2
    assert "small.yaml" in result.err


def test_a_damaged_checkpoint_is_refused_by_eval_and_by_resume(palaestra, config):
    document = json.loads(palaestra("train", config, "--json").out)
    policy = Path(document["checkpoint"]) / "policy.safetensors"
    whole = policy.read_bytes()
    for damaged, reason in ((whole[:-40], "truncated"), (whole[:-1] + b"\x01", "corrupt")):
        policy.write_bytes(damaged)
        result = palaestra("eval", document["checkpoint"], "--episodes", 1)
        assert (result.code, reason in result.err) == (2, True), result
        result = palaestra("train", "--resume", document["run_id"], "trainer.total_timesteps=512")
        assert (result.code, reason in result.err) == (2, True), result
        assert "newest intact one: palaestra train --resume" in result.err
        evaluation = palaestra("eval", document["run_id"], "--episodes", 1, "--checkpoint", "latest")
        assert evaluation.code == 2
        intact_one = evaluation.err.strip().rstrip(".").partition("The newest intact one is ")[2]
        assert palaestra("eval", intact_one, "--episodes", 1).code == 0
    assert not (Path(document["run_dir"]) / "attempt_2").exists()
    command = result.err.strip().rstrip(".").partition("newest intact one: palaestra ")[2].split()
    result = palaestra(*command, "trainer.total_timesteps=512", "--json")
    assert (result.code, json.loads(result.out)["run_id"]) == (0, document["run_id"])


def test_a_run_without_any_intact_checkpoint_says_to_start_again(palaestra, config):
    document = json.loads(palaestra("train", config, "--json").out)
    for file in Path(document["run_dir"]).glob("attempt_1/checkpoints/*/state.json"):
        file.write_text("{}")
    result = palaestra("train", "--resume", document["run_id"], "trainer.total_timesteps=512")
    assert (result.code, "No checkpoint of the run is intact: start it again" in result.err) == (2, True), result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "abc"], "error: --seed = 'abc': input should be a valid integer. See: palaestra train --help."),
        (["--seed=1.5"], "error: --seed = '1.5': input should be a valid integer. See: palaestra train --help."),
        (["--sede", "1"], "No such option: --sede"),
        (["--warm-start"], "--warm-start"),
    ],
)
def test_an_option_that_cannot_be_read_is_refused_in_one_line(palaestra, config, words, message):
    result = palaestra("train", config, *words)
    assert (result.code, message in result.err) == (2, True), result
    assert len(result.err.strip().splitlines()) == 1
    assert not Path("var").exists()


def test_a_command_that_does_not_exist_is_refused_with_the_nearest_one(palaestra):
    result = palaestra("evl")
    assert (result.code, result.err) == (
        2,
        "error: No such command 'evl'. Did you mean 'eval'? See: palaestra --help\n",
    )


def test_a_checkpoint_of_another_shape_is_refused(palaestra, config):
    document = json.loads(palaestra("train", config, "--json").out)
    result = palaestra("train", "--resume", document["run_id"], "policy.hidden=[32]", "trainer.total_timesteps=512")
    assert result.code == 2
    assert "this policy has" in result.err


def test_a_finished_run_says_how_to_train_on(palaestra, config):
    document = json.loads(palaestra("train", config, "--json").out)
    result = palaestra("train", "--resume", document["run_id"])
    assert result.code == 2
    assert "trainer.total_timesteps=512" in result.err


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_eval_refuses_a_seed_that_is_none(palaestra, config, seed):
    result = palaestra("eval", "any", "--seed", seed)
    assert (result.code, "--seed" in result.err) == (2, True), result


@pytest.mark.parametrize(
    "words", [["runs", "list"], ["runs", "start", "--runner", "echo"], ["checkpoints", "list"], ["gateway"], ["train"]]
)
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_palaestra_home_that_is_a_file_is_refused_with_a_remedy(
    palaestra, config, tmp_path, monkeypatch, words, place
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / place))
    # With a token in the environment, which a running gateway of other tests may have set, a gateway needs no file.
    monkeypatch.delenv("PALAESTRA_GATEWAY_TOKEN", raising=False)
    result = palaestra(*words, *([config] if words == ["train"] else []))
    message = (
        f"error: state directory = '{tmp_path / place}/var/training': {tmp_path / 'file'} is not a directory. "
        "Set PALAESTRA_HOME to a directory.\n"
    )
    assert result == (2, "", message)


def test_a_state_directory_that_is_a_file_is_refused_with_a_remedy(palaestra, tmp_path):
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "training").touch()
    result = palaestra("runs", "list")
    assert (result.code, "training is not a directory. Set PALAESTRA_HOME" in result.err) == (2, True), result


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError("Unable to allocate 116 TiB"), "out of memory (Unable to allocate 116 TiB)"),
    ],
)
def test_a_machine_that_is_full_is_one_message_and_exit_code_1(palaestra, config, monkeypatch, broken, reason):
    def fail(*_, **__):
        raise broken

    monkeypatch.setattr("palaestra.train.vector.train", fail)
    result = palaestra("train", config)
    assert result.code == 1
    assert reason in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_a_damaged_file_of_a_run_is_refused_by_name(palaestra, config):
    document = json.loads(palaestra("train", config, "--json").out)
    attempt = Path(document["run_dir"]) / "attempt_1"
    (attempt / "resolved.json").write_text("{")
    (attempt / "checkpoints" / "best.json").write_text("{")
    for words, name in ((["train", "--resume"], "resolved.json"), (["eval"], "best.json")):
        result = palaestra(*words, document["run_id"])
        assert (result.code, name in result.err) == (2, True), result


def test_an_exception_of_several_lines_is_printed_in_one(palaestra, config, tmp_path, monkeypatch):
    (tmp_path / "talkative.py").write_text("def make():\n    raise RuntimeError('first\\nsecond')\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = palaestra("train", config, "env.id=talkative:make")
    assert result.code == 2
    assert "first" in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_an_unknown_run_is_refused(palaestra):
    result = palaestra("eval", "nothing-like-it")
    assert result.code == 2
    assert "no such run" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "cartpol"], "NAME = 'cartpol': is not one of 'screens', 'cartpole'. Did you mean 'cartpole'?"),
        (["eval", "x", "--checkpoint", "bes"], "--checkpoint = 'bes': is not one of 'best', 'latest'. Did you mean"),
        (["demo", "xyz"], "NAME = 'xyz': is not one of 'screens', 'cartpole'. Write NAME as one of them."),
    ],
)
def test_a_value_that_is_none_of_the_choices_suggests_the_closest(palaestra, words, message):
    result = palaestra(*words)
    assert result.code == 2
    assert result.err.startswith(f"error: {message}")


def test_an_option_without_its_value_refers_to_the_help_of_its_command(palaestra):
    result = palaestra("runs", "list", "--sort")
    assert (result.code, result.err) == (
        2,
        "error: Option '--sort' requires an argument. See: palaestra runs list --help\n",
    )
