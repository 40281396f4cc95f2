"""The errors that docs/faq.md quotes are those that the program prints."""

import re

import pytest
from tests.docs.blocks import DOCS, ROOT

from palaestra.cli.app import main

PAGE = " ".join((DOCS / "faq.md").read_text().split())
_BROKEN = """
import gymnasium
import numpy as np


class Shape(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Old(Shape):
    def reset(self):
        return np.zeros(2, np.float32)


class Raises(Shape):
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return {}["speed"]
"""
TRAIN = f"train {ROOT}/configs/ppo/cartpole.yaml trainer.device=cpu"
ERRORS = {
    f"{TRAIN} algorithm.learning_rat=1": "algorithm.learning_rat = 1: unknown key. Did you mean 'learning_rate'?",
    f"{TRAIN} algorithm.batch_size=100": "algorithm.batch_size = 100: does not divide the 512 samples of a rollout",
    f"{TRAIN} algorithm.n_epochs=true": "algorithm.n_epochs = True: is true or false, which this key does not accept",
    f"{TRAIN} env.id=walk:Walk": "env.id = 'walk:Walk': the module 'walk' cannot be imported",
    f"{TRAIN} env.id=CartPol-v1": "env.id = 'CartPol-v1': no environment has this name",
    f"{TRAIN} env.id=faq_broken:Shape": "at reset, the observation has shape (3,), the observation space says (2,)",
    f"{TRAIN} env.id=faq_broken:Old": "reset() got an unexpected keyword argument 'seed'",
    f"{TRAIN} env.id=faq_broken:Raises": "raised KeyError: 'speed' (",
    "eval zzz": "run = 'zzz': no such run",
    "plan --gpus 1 hardware.gpu_memory_gb=24": "an update of … needs 35 GB on each of 1 GPUs",
}


@pytest.mark.parametrize(("words", "quoted"), ERRORS.items(), ids=[words[-40:] for words in ERRORS])
def test_an_error_that_the_page_quotes_is_printed(words, quoted, tmp_path, monkeypatch, capsys):
    if words.startswith("plan"):
        (tmp_path / "qwen.yaml").write_text(
            re.search(r'```yaml title="qwen.yaml"\n(.*?)```', (DOCS / "tutorials/qwen.md").read_text(), re.S)[1]
        )
        words = words.replace("plan", "plan qwen.yaml --no-scale model.gradient_checkpointing=false")
    (tmp_path / "faq_broken.py").write_text(_BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["palaestra", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (1, 2)
    message = capsys.readouterr().err
    assert all(part.strip() in message for part in quoted.replace("reset()", "").split("…")), message
    assert quoted in PAGE
