"""The `palaestra` command, called as a person would but within the test's process and an empty directory."""

import sys
from typing import NamedTuple

import pytest

from palaestra.cli import main


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def palaestra(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PALAESTRA_HOME", raising=False)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["palaestra", *(str(word) for word in words)])
        try:
            main()
            code = 0
        except SystemExit as left:
            code = left.code or 0
        heard = capsys.readouterr()
        return Said(code, heard.out, heard.err)

    return call


@pytest.fixture
def config(tmp_path):
    """A run of four quick updates."""
    path = tmp_path / "small.yaml"
    path.write_text(
        "env: {id: CartPole-v1, num_envs: 2}\n"
        "algorithm: {name: ppo, learning_rate: 3e-4, n_epochs: 2, batch_size: 32}\n"
        "trainer: {total_timesteps: 256, rollout_length: 32, checkpoint_every: 1}\n"
    )
    return path
