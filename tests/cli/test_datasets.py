"""`palaestra datasets` as a user calls it."""

import errno
import json
import os
import subprocess
import sys
from contextlib import closing

import h5py
import numpy as np
import pytest
from tests.experience.datasets.samples import count_up, make_dataset

from palaestra.files.home import Home

CREATE = ("datasets", "create", "cartpole/random-v0", "--env", "CartPole-v1", "--steps", "200", "--score-episodes", "2")


@pytest.fixture
def root(tmp_path):
    return Home(tmp_path.resolve() / "var" / "training").datasets


@pytest.fixture
def made(palaestra):
    result = palaestra(*CREATE, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_a_dataset_is_created_listed_shown_and_verified(palaestra, made):
    assert (made["dataset_id"], made["total_steps"], made["env_id"]) == ("cartpole/random-v0", 200, "CartPole-v1")
    assert made["about"]["policy"] == "random"
    listed = json.loads(palaestra("datasets", "list", "--json").out)
    assert [(row["dataset_id"], row["state"], row["sha256"]) for row in listed] == [
        ("cartpole/random-v0", "verified", made["sha256"])
    ]
    assert json.loads(palaestra("datasets", "show", "cartpole/random-v0", "--json").out)["sha256"] == made["sha256"]
    assert "verified" in palaestra("datasets", "verify", "cartpole/random-v0").out
    assert "cartpole/random-v0  CartPole-v1" in palaestra("datasets", "list").out
    assert "Discrete(2)" in palaestra("datasets", "show", "cartpole/random-v0").out


def test_without_datasets_the_list_says_how_to_make_one(palaestra):
    result = palaestra("datasets", "list")
    assert (result.code, "palaestra datasets create" in result.out) == (0, True)
    assert json.loads(palaestra("datasets", "list", "--json").out) == []


def test_a_flipped_byte_is_exit_code_1_for_verify_and_2_for_use(palaestra, made, root):
    main = root / "cartpole/random-v0/data/main_data.hdf5"
    data = bytearray(main.read_bytes())
    data[-1] ^= 1
    main.write_bytes(data)
    result = palaestra("datasets", "verify", "--all", "--json")
    assert result.code == 1
    (row,) = json.loads(result.out)
    assert (row["fits"], "main_data.hdf5 was changed" in row["problem"]) == (False, True)
    result = palaestra("datasets", "show", "cartpole/random-v0")
    assert (result.code, result.out) == (2, "")
    assert "SHA-256 differs" in result.err


def test_a_checkpoint_collects_data_and_measures_the_expert(palaestra, config, made):
    run = json.loads(palaestra("train", config, "--json").out)
    result = palaestra(
        *("datasets", "create", "cartpole/medium-v0", "--checkpoint", run["run_id"], "--stochastic", "--noise", "0.1"),
        *("--num-episodes", "5", "--score-episodes", "3", "--expert-checkpoint", run["run_id"], "--json"),
    )
    assert result.code == 0, result.err
    dataset = json.loads(result.out)
    assert dataset["total_episodes"] == 5
    assert dataset["env_id"] == "CartPole-v1"
    assert dataset["about"]["algorithm"] == "ppo"
    assert dataset["about"]["trained_steps"] == 256
    assert (dataset["about"]["deterministic"], dataset["about"]["noise"]) == (False, 0.1)
    assert dataset["expert_score"] > 0
    wrong = palaestra(
        *("datasets", "create", "a-v0", "--checkpoint", run["run_id"], "--env", "Acrobot-v1", "--steps", "10")
    )
    assert (wrong.code, "was trained in CartPole-v1" in wrong.err) == (2, True)


def test_an_expert_is_measured_in_the_environment_of_the_data(palaestra, config):
    run = json.loads(palaestra("train", config, "--json").out)
    words = ("--steps", "50", "--score-episodes", "2", "--expert-checkpoint", run["run_id"], "--json")
    kwargs = ("--env-kwargs", '{"sutton_barto_reward": true}')
    result = palaestra("datasets", "create", "a-v0", "--env", "CartPole-v1", *kwargs, *words)
    assert result.code == 2
    assert "its score -1 is not above the random score -1" in result.err
    wrong = palaestra("datasets", "create", "b-v0", "--env", "Acrobot-v1", *words)
    assert wrong.code == 2
    assert "was trained in CartPole-v1, the data comes from Acrobot-v1" in wrong.err


def _write_d4rl(path, total=30):
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["observations"] = rng.uniform(-1, 1, (total, 3)).astype(np.float32)
        file["actions"] = rng.uniform(-2, 2, (total, 1)).astype(np.float32)
        file["rewards"] = np.zeros(total, np.float32)
        file["terminals"] = np.zeros(total, bool)
        file["timeouts"] = np.arange(total) % 10 == 9
        file["infos/qpos"] = np.zeros(total)
    return path


def test_a_file_in_the_style_of_d4rl_is_imported(palaestra, tmp_path):
    path = _write_d4rl(tmp_path / "pendulum.hdf5")
    words = ("datasets", "import", path, "--id", "pendulum/d4rl-v0", "--env", "Pendulum-v1", "--score-episodes", "1")
    result = palaestra(*words, "--expert-score", "-150", "--json")
    assert result.code == 0, result.err
    dataset = json.loads(result.out)
    assert (dataset["total_steps"], dataset["total_episodes"], dataset["steps_dropped"]) == (27, 3, 3)
    assert dataset["expert_score"] == -150
    assert dataset["random_score"] < -150
    again = palaestra(*words)
    assert (again.code, "exists already" in again.err) == (2, True)


def test_a_file_keeps_the_arguments_of_its_environment_and_given_scores(palaestra, tmp_path):
    path = _write_d4rl(tmp_path / "pendulum.hdf5")
    words = ("datasets", "import", path, "--id", "pendulum/moon-v0", "--env", "Pendulum-v1", "--json")
    result = palaestra(*words, "--env-kwargs", '{"g": 1.6}', "--random-score", "-900", "--expert-score", "-100")
    assert result.code == 0, result.err
    dataset = json.loads(result.out)
    assert dataset["about"]["env_kwargs"] == {"g": 1.6}
    assert (dataset["random_score"], dataset["expert_score"]) == (-900, -100)


def test_an_expert_score_that_is_not_above_the_random_score_is_refused_with_both(palaestra, tmp_path, root):
    path = _write_d4rl(tmp_path / "pendulum.hdf5")
    words = ("datasets", "import", path, "--id", "a-v0", "--env", "Pendulum-v1", "--expert-score", "-2000")
    given = palaestra(*words, "--random-score", "-900")
    assert given.code == 2
    assert "--expert-score = -2000.0: the expert score must be above the random score, which is -900." in given.err
    measured = palaestra(*words, "--score-episodes", "1")
    assert (measured.code, "must be above the random score, which is -" in measured.err) == (2, True)
    created = palaestra(*CREATE, "--expert-score", "3")
    assert (created.code, "--expert-score = 3.0: the expert score must be above" in created.err) == (2, True)
    assert not root.exists()


def test_a_directory_of_minari_is_adopted(palaestra, root):
    made = palaestra(*CREATE, "--env-kwargs", '{"sutton_barto_reward": true}', "--json")
    assert json.loads(made.out)["about"]["env_kwargs"] == {"sutton_barto_reward": True}
    for name in ("manifest.json", "index.npy"):
        (root / "cartpole/random-v0" / name).unlink()
    assert "not verified" in palaestra("datasets", "list").out
    assert palaestra("datasets", "show", "cartpole/random-v0").code == 2
    result = palaestra("datasets", "import", root / "cartpole/random-v0", "--json")
    assert result.code == 0, result.err
    about = json.loads(result.out)["about"]
    assert about == {"imported": "minari", "env_kwargs": {"sutton_barto_reward": True}, "max_episode_steps": 500}
    assert palaestra("datasets", "verify", "--all").code == 0


def test_a_directory_of_minari_gets_the_scores_that_it_lacks(palaestra, tmp_path, root):
    made = palaestra(*CREATE[:-1], "0", "--env-kwargs", '{"sutton_barto_reward": true}', "--json")
    assert json.loads(made.out)["random_score"] is None
    for name in ("manifest.json", "index.npy"):
        (root / "cartpole/random-v0" / name).unlink()
    words = ("datasets", "import", root / "cartpole/random-v0", "--json")
    refused = palaestra(*words, "--env-kwargs", "{}")
    assert (refused.code, "the metadata of a Minari directory has it" in refused.err) == (2, True)
    result = palaestra(*words, "--expert-score", "500", "--score-episodes", "2")
    assert result.code == 0, result.err
    dataset = json.loads(result.out)
    assert (dataset["random_score"], dataset["expert_score"]) == (-1.0, 500.0)


def test_a_download_without_a_network_is_one_message_and_exit_code_1(palaestra, monkeypatch):
    monkeypatch.delenv("MINARI_REMOTE", raising=False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    result = palaestra("datasets", "download", "D4RL/door/human-v2")
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert "Check the network" in result.err


def test_pruning_shows_first_and_removes_with_yes(palaestra, made, root):
    assert palaestra("datasets", "prune", "--max-size", "5GB", "--yes").out == "Nothing to remove.\n"
    result = palaestra("datasets", "prune", "--max-size", "1kB", "--dry-run")
    assert "cartpole/random-v0 would be removed" in result.out
    assert (root / "cartpole/random-v0").exists()
    refused = palaestra("datasets", "prune", "cartpole/random-v0")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    result = palaestra("datasets", "prune", "cartpole/random-v0", "--yes", "--json")
    assert json.loads(result.out)["removed"] == ["cartpole/random-v0"]
    assert not (root / "cartpole").exists()


def test_the_limit_stops_new_datasets_and_is_what_prune_uses(palaestra, made, root, monkeypatch):
    monkeypatch.setenv("PALAESTRA_DATASETS_MAX_SIZE", "1kB")
    refused = palaestra("datasets", "create", "a-v0", "--env", "CartPole-v1", "--steps", "100")
    assert (refused.code, "PALAESTRA_DATASETS_MAX_SIZE allows (1.0 kB)" in refused.err) == (2, True)
    assert "cartpole/random-v0 would be removed" in palaestra("datasets", "prune", "--dry-run").out
    assert palaestra("datasets", "prune", "--max-size", "1GB", "--yes").out == "Nothing to remove.\n"
    assert json.loads(palaestra("datasets", "prune", "--yes", "--json").out)["removed"] == ["cartpole/random-v0"]


def test_an_interrupted_download_is_listed_and_removed(palaestra, root):
    from palaestra.experience.datasets.incomplete_downloads import hold_download

    with hold_download(root, "D4RL/door/human-v2") as place:
        (place / "part").write_bytes(bytes(2_000_000))
        assert palaestra("datasets", "prune", "--max-size", "0", "--yes").out == "Nothing to remove.\n"
        refused = palaestra("datasets", "prune", "D4RL/door/human-v2", "--yes")
        assert (refused.code, "is being downloaded" in refused.err) == (2, True)
    listed = palaestra("datasets", "list")
    assert "2.0 MB" in listed.out
    assert "incomplete" in listed.out
    assert "continue it with: palaestra datasets download D4RL/door/human-v2" in listed.err
    assert "D4RL/door/human-v2 removed (2.0 MB)" in palaestra("datasets", "prune", "--max-size", "1MB", "--yes").out
    assert not any(root.iterdir())


def test_a_dataset_of_a_queued_run_is_not_removed(palaestra, made, root, home):
    from palaestra.files.atomic import write_json
    from palaestra.runs.phase import Phase
    from palaestra.runs.record import RunRecord
    from palaestra.runs.store.registry import Registry

    run = home.run("waiting-1")
    run.path.mkdir(parents=True)
    write_json(run.spec, {"runner": "corl", "overrides": ["dataset=cartpole/random-v0"]})
    with closing(Registry.open(home.registry)) as registry:
        registry.put(
            RunRecord(
                run_id="waiting-1", runner="corl", agent_id="corl/iql", env_id="", phase=Phase.QUEUED, created=1.0
            )
        )
    result = palaestra("datasets", "prune", "--max-size", "0", "--yes", "--json")
    assert json.loads(result.out) == {
        "removed": [],
        "bytes": 0,
        "dry_run": False,
        "in_use": {"cartpole/random-v0": ["waiting-1"]},
    }
    refused = palaestra("datasets", "prune", "cartpole/random-v0", "--yes")
    assert (refused.code, "run waiting-1 uses it" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("create", "cartpole/random-v0", "--env", "CartPole-v1"), "--steps"),
        (("create", "cartpole/random-v0", "--env", "CartPole-v1", "--steps", "0"), "--steps = 0"),
        (("create", "cartpole/random-v0", "--env", "CartPole-v1", "--num-episodes", "-4"), "--num-episodes = -4"),
        (("create", "cartpole/random-v0", "--steps", "10"), "--env"),
        (("create", "cartpole/random-v0", "--env", "Nowhere-v0", "--steps", "10"), "no environment has this name"),
        (("create", "../../etc/x-v0", "--env", "CartPole-v1", "--steps", "10"), "is not a dataset id"),
        (("create", "/etc/x-v0", "--env", "CartPole-v1", "--steps", "10"), "is not a dataset id"),
        (("create", "a b-v0", "--env", "CartPole-v1", "--steps", "10"), "is not a dataset id"),
        (("create", "naïve-v0", "--env", "CartPole-v1", "--steps", "10"), "is not a dataset id"),
        (("create", "a-v0", "--env", "CartPole-v1", "--steps", "ten"), "--steps"),
        (("create", "a-v0", "--env", "CartPole-v1", "--steps", "9", "--env-kwargs", "[1]"), "is not a JSON object"),
        (("create", "a-v0", "--env", "CartPole-v1", "--steps", "9", "--env-kwargs", '{"mass": 1}'), "env.kwargs"),
        (("create", "a-v0", "--env", "CartPole-v1", "--steps", "10", "--seed", "-1"), "--seed = -1"),
        (("create", "a-v0", "--env", "CartPole-v1", "--steps", "10", "--checkpoint", "none"), "--checkpoint = 'none'"),
        (
            ("create", "a-v0", "--env", "CartPole-v1", "--steps", "9", "--expert-checkpoint", "none"),
            "--expert-checkpoint = 'none': there is no such run or checkpoint.*palaestra runs list",
        ),
        (
            ("create", "a-v0", "--env", "CartPole-v1", "--steps", "9", "--env-kwargs", '{"render_mode": "human"}'),
            "Leave render_mode out",
        ),
        (("create", "a-v0", "--env", "CartPole-v1", "--steps", "10", "--policy", "os:getcwd"), "getcwd"),
        (("create", "a-v0", "--env", "CartPole-v1", "--steps", str(10**13)), "on the disk of"),
        (("show", "nothing-v0"), "there is none of this name"),
        (("show", ".."), "is not a directory with data/metadata.json"),
        (("verify",), "nothing to verify"),
        (("verify", "nothing-v0"), "there is none of this name"),
        (("import", "missing.hdf5", "--id", "a-v0", "--env", "CartPole-v1"), "is not a file"),
        (("import", "missing.hdf5"), "--id"),
        (("import", ".", "--env", "CartPole-v1"), "--env"),
        (("import", "."), "is no Minari directory: it has no data/metadata.json"),
        (("prune",), "nothing to remove is given"),
        (("prune", "--max-size", "lots"), "is not a size"),
        (("prune", "--older-than", "-3d"), "is not an age"),
        (("prune", "a-v0", "--max-size", "1GB"), "--max-size = '1GB': datasets are named too .a-v0.*not both"),
        (("prune", "a-v0", "--older-than", "3d", "-y"), "--older-than = '3d': datasets are named too"),
        (("prune", "../x-v0", "--yes"), "there is none of this name"),
        (("download", "../x-v0"), "is not a dataset id"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(palaestra, root, words, message):
    import re

    result = palaestra("datasets", *words)
    assert result.code == 2, result.err
    assert result.out == ""
    assert result.err.count("\n") == 1, result.err
    assert re.search(message, result.err), result.err
    assert not root.exists() or not any(root.rglob("*"))


def test_data_of_an_unknown_environment_is_described_in_words(palaestra, tmp_path):
    dataset = make_dataset(tmp_path / "elsewhere", episodes=[count_up(1)], env_id="")
    result = palaestra("datasets", "import", dataset.path)
    assert "count/up-v0 imported: 1 step in 1 episode of an unknown environment; random score" in result.out


def test_a_full_disk_is_one_message_with_a_remedy(palaestra, root, monkeypatch):
    def fail(self, episode):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "main_data.hdf5")

    monkeypatch.setattr("palaestra.experience.datasets.dataset.DatasetWriter.add", fail)
    result = palaestra(*CREATE)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert (
        "No space left on device: 'main_data.hdf5'. Free space, for example with: palaestra datasets prune"
        in result.err
    )
    assert not root.exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupt_while_collecting_leaves_nothing(tmp_path, root, name):
    """The process interrupts itself after its fifth episode."""
    words = ["datasets", "create", "a/b-v0", "--env", "CartPole-v1", "--steps", "1000000"]
    (root / "keep").mkdir(parents=True)
    program = (
        "import os, signal, sys\n"
        "from palaestra.cli import main\n"
        "from palaestra.experience.datasets.dataset import DatasetWriter\n"
        "add = DatasetWriter.add\n"
        "def interrupt(self, episode):\n"
        "    add(self, episode)\n"
        "    if self.num_episodes == 5:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "DatasetWriter.add = interrupt\n"
        f"sys.argv = ['palaestra', *{words!r}]\n"
        "main()"
    )
    environment = {**os.environ, "PALAESTRA_HOME": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert (finished.returncode, "Traceback" in finished.stderr) == (130, False), finished.stderr
    assert [path.name for path in root.iterdir()] == ["keep"]


def test_two_creations_of_one_id_leave_one_whole_dataset(tmp_path, root, palaestra):
    environment = {**os.environ, "PALAESTRA_HOME": str(tmp_path)}
    words = [sys.executable, "-m", "palaestra", *CREATE]
    processes = [subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert sorted(code for _, code in results) == [0, 2], results
    assert any("exists already" in text for text, _ in results)
    assert palaestra("datasets", "verify", "--all").code == 0
    assert [path.name for path in (root / "cartpole").iterdir()] == ["random-v0"]


def test_a_file_system_that_refuses_to_write_is_one_message_and_leaves_nothing(tmp_path, root):
    """A limit on the size of files stands in for a full disk."""
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "from palaestra.cli import main\n"
        "sys.argv = ['palaestra', 'datasets', 'create', 'a/b-v0', '--env', 'CartPole-v1', '--steps', '20000']\n"
        "main()"
    )
    environment = {**os.environ, "PALAESTRA_HOME": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert finished.returncode == 1, finished.stderr
    assert (finished.stderr.count("\n"), "File too large" in finished.stderr) == (1, True), finished.stderr
    assert not root.exists() or not any(root.rglob("*.hdf5"))
